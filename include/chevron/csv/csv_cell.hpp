#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <chevron/plan/action.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/plan/kinds.hpp>

/// \file
/// The grammar of PyTorch's schedule CSV, cell by cell: `3F0`, `3SEND_F0`, `3REDUCE_GRAD`, a fused pair `(0F7;7B3)OVERLAP_F_B`,
/// or nothing (an idle step). As in PyTorch's reader a cell may be in quotes, blanks around an action are ignored, and blank
/// lines at the end are not ranks. A first line `# own actions: X after=W every, Y before=B` says what X, Y and Z are; PyTorch's
/// reader knows no such actions. Otherwise this reader is stricter: PyTorch's reader ignores text after an action, accepts an
/// action without a microbatch, and accepts any two actions as a fused pair.

namespace chevron {

/// Limits of a file: ranks, actions, characters of a line.
inline constexpr int max_csv_ranks = max_stages;
inline constexpr int max_csv_actions = 1 << 25;
inline constexpr int max_csv_line = 1 << 26;

/// Words of PyTorch's files for which Chevron's programs have no instruction.
enum class csv_extra : std::uint8_t {
  none,
  wait_reduce_gradients,  ///< WAIT_REDUCE_GRAD, from PyTorch 2.15 on
  unshard,                ///< UNSHARD: fetch a stage's sharded parameters
  reshard                 ///< RESHARD: free these parameters
};

/// One cell, or one half of a fused pair. If `extra` is set, `what` has no meaning.
struct csv_cell {
  bool empty = true;
  bool fused = false;  ///< the cell is the F of a pair, the next cell the other half
  csv_extra extra = csv_extra::none;
  kind what{};
  int stage = 0;
  int micro_batch = 0;  ///< the microbatch; if the scanner knows the number of slices, the unit
  int slice = -1;       ///< the number after the point, as in `3F0.1`; -1: there is none
  int column = 0;       ///< column, from 1, of the first character that is no blank

  constexpr bool is_instruction() const { return !empty && extra == csv_extra::none; }
  constexpr bool computes() const { return is_instruction() && is_compute(what); }
  constexpr action as_action() const {
    action a = make_action(what, stage, micro_batch);
    a.fused = fused ? 1 : 0;
    return a;
  }
};

/// Reads a text cell by cell. After each cell, `row_ended` says whether the cell was the last of its line. A fused pair is read
/// as two cells, its halves, each with its own column.
class csv_scanner {
 public:
  /// \param slices number of slices of each microbatch, computed by `measure_csv`
  constexpr explicit csv_scanner(std::string_view text, int slices = 1) : text_(text), slices_(slices) {
    while (!text_.empty() && (is_blank(text_.back()) || text_.back() == '\n' || text_.back() == '\r')) text_.remove_suffix(1);
    if (text_.starts_with('#')) read_declarations();
  }

  /// The line of rank 0, from 1: the second if the first declares own actions.
  constexpr int first_line() const { return first_line_; }
  /// What the first line declares of X, Y or Z. \param number 0 for X
  constexpr own_kind const& own(int number) const { return own_[number]; }

  constexpr bool done() const { return at_ >= text_.size() && !after_comma_ && other_half_.empty; }
  constexpr bool row_ended() const { return row_ended_; }
  constexpr int line() const { return line_; }
  /// The fault of the last cell, if any.
  constexpr finding const& problem() const { return problem_; }

  constexpr csv_cell next() {
    if (!other_half_.empty) {
      csv_cell const half = other_half_;
      other_half_.empty = true;
      row_ended_ = pair_ends_row_;
      return half;
    }
    if (row_ended_) {
      ++line_;
      line_start_ = at_;
      row_ended_ = false;
    }
    // Compilers run this too, so the inner loop works on plain pointers and reads each character once.
    char const* const all = text_.data();
    std::size_t const size = text_.size();
    std::size_t const from = at_;
    std::size_t const longest = line_start_ + static_cast<std::size_t>(max_csv_line);
    std::size_t const stop = size < longest ? size : longest;
    std::size_t i = from;
    if (i < stop && all[i] == '"') {  // a comma in quotes does not end the cell
      do ++i;
      while (i < stop && all[i] != '"' && all[i] != '\n');
    }
    while (i < stop && all[i] != ',' && all[i] != '\n') ++i;
    csv_cell cell;
    cell.column = static_cast<int>(from - line_start_) + 1;
    at_ = size;
    after_comma_ = false;
    if (i == longest && i < size && all[i] != '\n') {
      fail(max_csv_line + 1, {},
           "this line has more than 67108864 characters: no schedule has so many; is this file a schedule?");
      return cell;
    }
    std::size_t length = i - from;
    if (i < size) {
      after_comma_ = all[i] == ',';
      at_ = i + 1;
    }
    if (!after_comma_) {
      row_ended_ = true;
      if (i < size && length > 0 && all[i - 1] == '\r') --length;
    }
    std::string_view there = stripped(text_.substr(from, length), cell.column);
    if (!there.empty() && all[from] == '"') {
      if (there.size() == 1 || there.find('"', 1) != there.size() - 1) {
        fail_cell(cell, there, " has no closing quote at its end: wanted is one action between quotes, such as \"0F0\"");
        return cell;
      }
      ++cell.column;
      there = stripped(there.substr(1, there.size() - 2), cell.column);
    }
    if (there.empty()) return cell;
    if (there.front() == '(')
      read_pair(cell, there);
    else
      read(cell, there, false);
    return cell;
  }

 private:
  struct spelling {
    char const* letters;
    int length;
    kind what;
    csv_extra extra;
    bool has_micro_batch;
  };

  constexpr void fail(int column, std::string_view there, char const* words) {
    problem_ = {.broken = law::description, .words = words, .line = line_, .column = column, .there = there};
  }

  /// Sets the fault of a cell: `words`, or a byte order mark or NUL byte if the cell has one.
  constexpr void fail_cell(csv_cell const& cell, std::string_view there, char const* words) {
    if (there.starts_with("\xef\xbb\xbf")) words = " begins with a byte order mark: save the file as UTF-8 without one";
    for (char c : there) {
      if (c == 0) words = " holds a NUL byte: a schedule is plain text, such as 0F0,0F1,0B0";
    }
    fail(cell.column, there, words);
  }

  static constexpr bool is_blank(char c) { return c == ' ' || c == '\t'; }

  /// Removes the blanks around a cell's text; `column` moves to its first character.
  static constexpr std::string_view stripped(std::string_view there, int& column) {
    while (!there.empty() && is_blank(there.back())) there.remove_suffix(1);
    while (!there.empty() && is_blank(there.front())) {
      there.remove_prefix(1);
      ++column;
    }
    return there;
  }

  /// Reads the number at `at`, and moves `at` after it; -1: there is none, -2: a leading zero, -3: above `highest`.
  static constexpr int take_number(char const* there, int& at, int length, int highest) {
    int const first = at;
    int value = 0;
    int i = first;
    for (; i < length && there[i] >= '0' && there[i] <= '9'; ++i) {
      if (value <= highest) value = value * 10 + (there[i] - '0');
    }
    at = i;
    return i == first ? -1 : i > first + 1 && there[first] == '0' ? -2 : value > highest ? -3 : value;
  }

  /// Reads a first line such as `# own actions: X after=IW every, Y before=B`.
  constexpr void read_declarations() {
    std::string_view line = text_.substr(0, text_.find('\n'));
    at_ = line.size() < text_.size() ? line.size() + 1 : text_.size();
    if (line.ends_with('\r')) line.remove_suffix(1);
    constexpr std::string_view head = "# own actions:";
    if (!line.starts_with(head)) {
      return fail(1, line.substr(0, line.size() < 20 ? line.size() : 20),
                  ": a line that begins with # declares X, Y and Z, such as # own actions: X after=W every, Y before=B");
    }
    for (std::size_t i = head.size(); i <= line.size() && !problem_;) {
      std::size_t const comma = line.find(',', i) < line.size() ? line.find(',', i) : line.size();
      int column = static_cast<int>(i) + 1;
      std::string_view const declaration = stripped(line.substr(i, comma - i), column);
      read_declaration(declaration, column);
      i = comma + 1;
    }
    line_ = first_line_ = 2;
    line_start_ = at_;
  }
  /// Reads one declaration: a letter, then `after=` and `before=` with letters of kinds, and `every`.
  constexpr void read_declaration(std::string_view there, int column) {
    if (there.empty()) there = "# own actions:";
    if (there.front() < 'X' || there.front() > 'Z' || (there.size() > 1 && !is_blank(there[1])))
      return fail(column, there, " declares no action: wanted is X, Y or Z, such as X after=W every");
    own_kind& row = own_[there.front() - 'X'];
    if (row.declared) return fail(column, there, " declares this action a second time");
    row.declared = true;
    for (std::size_t i = 1; i < there.size();) {
      std::size_t end = i;
      while (end < there.size() && !is_blank(there[end])) ++end;
      std::string_view const word = there.substr(i, end - i);
      bool const after = word.starts_with("after="), before = word.starts_with("before=");
      if (word == "every") {
        row.every = true;
      } else if (after || before) {
        std::uint8_t& kinds = after ? row.after : row.before;
        for (char const letter : word.substr(word.find('=') + 1)) {
          int k = 0;
          while (k < compute_kinds && letters_of(static_cast<kind>(k))[0] != letter) ++k;
          if (k == compute_kinds)
            return fail(column, word, " names no kind: wanted are letters such as after=IW, of F, B, I, W, R, X, Y and Z");
          kinds = static_cast<std::uint8_t>(kinds | kind_bit(static_cast<kind>(k)));
        }
      } else if (!word.empty()) {
        return fail(column, word, " is not known: wanted is after=, before= or every, such as X after=W every");
      }
      i = end + 1;
    }
  }

  /// Reads a pair, `(0F7;7B3)OVERLAP_F_B`: the F into `cell`; the next call of `next` returns the second half.
  constexpr void read_pair(csv_cell& cell, std::string_view there) {
    int const column = cell.column;
    constexpr auto none = std::string_view::npos;
    std::size_t const close = there.find(')');
    if (close == none)
      return fail(column, there, " has no closing bracket: a fused pair is an F and a B or I, such as (0F7;7B3)OVERLAP_F_B");
    if (there.find('(', 1) < close)
      return fail(column, there, " is a pair within a pair: each half is one action, such as (0F7;7B3)OVERLAP_F_B");
    if (there.substr(close + 1) != "OVERLAP_F_B")
      return fail(column, there,
                  ": wanted is OVERLAP_F_B right after the bracket, and nothing else, such as (0F7;7B3)OVERLAP_F_B");
    std::string_view const halves = there.substr(1, close - 1);
    std::size_t const middle = halves.find(';');
    csv_cell first, second;
    first.column = column + 1;
    second.column = first.column + static_cast<int>(middle) + 1;
    std::string_view const one = middle == none ? halves : stripped(halves.substr(0, middle), first.column);
    std::string_view const other = middle == none ? "" : stripped(halves.substr(middle + 1), second.column);
    if (one.empty() || other.empty() || other.find(';') != none) {
      return fail(column, there,
                  " has not two halves: wanted are an F and a B or I with one semicolon between, such as (0F7;7B3)OVERLAP_F_B");
    }
    read(first, one, true);
    if (problem_) return;
    read(second, other, true);
    if (problem_) return;
    if (!first.is_instruction() || first.what != kind::forward)
      return fail(first.column, one, ": the first half of a fused pair must be an F, as in (0F7;7B3)OVERLAP_F_B");
    if (!second.is_instruction() || !makes_input_gradient(second.what)) {
      return fail(second.column, other, ": the second half of a fused pair must be a B or an I, as in (0F7;7B3)OVERLAP_F_B");
    }
    cell = first;
    cell.fused = true;
    other_half_ = second;
    pair_ends_row_ = row_ended_;
    row_ended_ = false;
  }

  /// Reads one action, alone or as half of a pair.
  constexpr void read(csv_cell& cell, std::string_view whole, bool half) {
    char const* const there = whole.data();
    int const length = static_cast<int>(whole.size());
    int i = 0;
    auto const wrong = [&](char const* words) { fail_cell(cell, whole, words); };
    cell.stage = take_number(there, i, length, max_stages - 1);
    if (cell.stage < 0) {
      return wrong(cell.stage == -1   ? " does not start with a stage: an action is stage, type, microbatch, such as 2F0"
                   : cell.stage == -2 ? " has a stage with leading zeros: write 2F0, not 02F0"
                                      : " names a stage above 1023, the highest there can be");
    }
    int const word = i;
    while (i < length && ((there[i] >= 'A' && there[i] <= 'Z') || there[i] == '_')) ++i;
    int const known = spelled(there + word, i - word);
    if (known < 0) {
      return wrong(whole.substr(static_cast<std::size_t>(word), static_cast<std::size_t>(i - word)) == "BW"
                       ? ": BW is a retired spelling: today the full backward is B, the input gradient I (once B), the weight "
                         "gradient W"
                       : unknown_type.data());
    }
    spelling const& found = spellings[static_cast<std::size_t>(known)];
    cell.what = found.what;
    cell.extra = found.extra;
    if (found.has_micro_batch) {
      cell.micro_batch = take_number(there, i, length, max_micro_batches - 1);
      if (cell.micro_batch < 0) {
        return wrong(cell.micro_batch == -1   ? " has no microbatch: an action ends in its microbatch, such as 2F0"
                     : cell.micro_batch == -2 ? " has a microbatch with leading zeros: write 2F1, not 2F01"
                                              : " names a microbatch above 65534, the highest there can be");
      }
      if (i < length && there[i] == '.') {
        cell.slice = take_number(there, ++i, length, max_micro_batches - 1);
        if (cell.slice < 0) return wrong(" has no slice after its point: an action of a slice is such as 2F0.1");
        if (slices_ > 1) cell.micro_batch = cell.micro_batch * slices_ + cell.slice;
      }
    }
    if (i < length) {
      return wrong(half                    ? " goes on after its end: each half of a fused pair is one action, such as 0F7"
                   : found.has_micro_batch ? " goes on after its microbatch: wanted is a comma or the end of the line there"
                                           : " goes on after its type: this type has no microbatch");
    }
    cell.empty = false;
  }

  /// The error about an unknown kind, with the letters of all compute kinds (plan/kinds.hpp).
  static constexpr auto unknown_type = [] {
    std::array<char, 160> words{};
    std::size_t length = 0;
    auto const add = [&](std::string_view part) {
      for (char const c : part) words[length++] = c;
    };
    add(" has no type that is known: wanted is ");
    for (int k = 0; k < static_cast<int>(kind::own_x); ++k) {
      add(k == 0 ? "" : k + 1 < static_cast<int>(kind::own_x) ? ", " : " or ");
      add(letters_of(static_cast<kind>(k)));
    }
    add(" after the stage, such as 2F0 (");
    for (int k = 0; k < own_kinds; ++k) {
      add(k == 0 ? "" : k + 1 < own_kinds ? ", " : " or ");
      add(letters_of(static_cast<kind>(static_cast<int>(kind::own_x) + k)));
    }
    add(" for own actions)");
    return words;
  }();

  /// The kinds by their letters, and further words of the dialects.
  static constexpr auto spellings = [] {
    std::array<spelling, program_kinds - 2 + 3> all{};
    int count = 0;
    auto const add = [&](char const* letters, kind what, csv_extra extra, bool has_micro_batch) {
      all[static_cast<std::size_t>(count++)] = {letters, static_cast<int>(std::string_view(letters).size()), what, extra,
                                                has_micro_batch};
    };
    for (int k = 0; k < program_kinds; ++k) {
      kind const what = static_cast<kind>(k);
      if (what == kind::optimizer_step || what == kind::unshard) continue;
      add(letters_of(what), what, csv_extra::none, !is_of_stage(what));
    }
    add("WAIT_REDUCE_GRAD", kind::optimizer_step, csv_extra::wait_reduce_gradients, false);
    add("UNSHARD", kind::unshard, csv_extra::unshard, false);
    add("RESHARD", kind::optimizer_step, csv_extra::reshard, false);
    return all;
  }();

  /// The index of a word in `spellings`; -1: it is none. Not its address, which g++ 12 with UBSan can compare with null at run
  /// time only.
  static constexpr int spelled(char const* word, int length) {
    int index = 0;
    for (spelling const& one : spellings) {
      int same = 0;
      while (one.length == length && same < length && one.letters[same] == word[same]) ++same;
      if (one.length == length && same == length) return index;
      ++index;
    }
    return -1;
  }

  std::string_view text_;
  int slices_ = 1;
  std::size_t at_ = 0;
  std::size_t line_start_ = 0;
  int line_ = 1;
  bool row_ended_ = false;
  bool after_comma_ = false;  // a comma was read last, so a cell follows, even an empty one at the end of the text
  csv_cell other_half_{};     // the second half of the pair whose F was the last cell; empty: none
  bool pair_ends_row_ = false;
  int first_line_ = 1;
  own_kind own_[own_kinds]{};
  finding problem_{};
};

}  // namespace chevron
