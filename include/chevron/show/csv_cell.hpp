#pragma once

#include <cstdint>
#include <string_view>

#include <chevron/plan/action.hpp>
#include <chevron/plan/finding.hpp>

/// \file
/// The grammar of PyTorch's schedule CSV, cell by cell: `3F0`, `3SEND_F0`, `3REDUCE_GRAD`, a fused pair `(0F7;7B3)OVERLAP_F_B`,
/// or nothing (an idle step). Exact, where PyTorch's own reader drops what follows a match, takes a missing microbatch for none
/// and any actions at all for the halves of a pair.

namespace chevron {

/// Most ranks, actions and characters in a line that a file may have.
inline constexpr int max_csv_ranks = max_stages;
inline constexpr int max_csv_actions = 1 << 25;
inline constexpr int max_csv_line = 1 << 26;

/// Words of the dialects that are no instruction of a program here.
enum class csv_extra : std::uint8_t {
  none,
  wait_reduce_gradients,  ///< WAIT_REDUCE_GRAD, from PyTorch 2.15 on
  unshard,                ///< UNSHARD: fetch a stage's sharded parameters
  reshard                 ///< RESHARD: let go of them
};

/// One cell, or one half of a fused pair. With `extra`, `what` has no meaning.
struct csv_cell {
  bool empty = true;
  bool fused = false;  ///< the F of a pair: the next cell is its other half
  csv_extra extra = csv_extra::none;
  kind what{};
  int stage = 0;
  int micro_batch = 0;
  int column = 0;  ///< of the first character, counted from 1

  constexpr bool is_instruction() const { return !empty && extra == csv_extra::none; }
  constexpr bool computes() const { return is_instruction() && is_compute(what); }
  constexpr action as_action() const {
    action a = make_action(what, stage, micro_batch);
    a.fused = fused ? 1 : 0;
    return a;
  }
};

/// Walks through a text. After each cell, `row_ended` says whether it was the line's last. A fused pair comes as two cells, its
/// halves, each with its own column.
class csv_scanner {
 public:
  constexpr explicit csv_scanner(std::string_view text) : text_(text) {}

  constexpr bool done() const { return at_ >= text_.size() && !after_comma_ && other_half_.empty; }
  constexpr bool row_ended() const { return row_ended_; }
  constexpr int line() const { return line_; }
  /// What kept the last cell from being read, if anything.
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
    std::size_t const from = at_;
    while (at_ < text_.size() && text_[at_] != ',' && text_[at_] != '\n' &&
           at_ - line_start_ < static_cast<std::size_t>(max_csv_line))
      ++at_;
    csv_cell cell;
    cell.column = static_cast<int>(from - line_start_) + 1;
    std::string_view there = text_.substr(from, at_ - from);
    if (at_ < text_.size() && text_[at_] != '\n' && at_ - line_start_ >= static_cast<std::size_t>(max_csv_line)) {
      fail(max_csv_line + 1, {}, "this line has more than 67108864 characters: no schedule has; is this a schedule?");
      at_ = text_.size();
      after_comma_ = false;
      return cell;
    }
    if (at_ == text_.size() || text_[at_] == '\n') {
      row_ended_ = true;
      if (at_ < text_.size() && there.ends_with('\r')) there.remove_suffix(1);
    }
    after_comma_ = at_ < text_.size() && text_[at_] == ',';
    if (at_ < text_.size()) ++at_;
    if (there.empty()) return cell;
    if (there.front() == '(')
      read_pair(cell, there);
    else
      read(cell, there);
    return cell;
  }

 private:
  struct spelling {
    char const* letters;
    kind what;
    csv_extra extra;
  };

  constexpr void fail(int column, std::string_view there, char const* words) {
    problem_.broken = law::description;
    problem_.line = line_;
    problem_.column = column;
    problem_.there = there;
    problem_.words = words;
  }

  /// The number at the front of `rest`, taken off; -1: none, -2: a leading zero, -3: above `highest`.
  static constexpr int take_number(std::string_view& rest, int highest) {
    std::size_t count = 0;
    int value = 0;
    bool large = false;
    for (; count < rest.size() && rest[count] >= '0' && rest[count] <= '9'; ++count) {
      if (!large) value = value * 10 + (rest[count] - '0');
      large = large || value > highest;
    }
    bool const padded = count > 1 && rest[0] == '0';
    rest.remove_prefix(count);
    return count == 0 ? -1 : padded ? -2 : large ? -3 : value;
  }

  /// `(0F7;7B3)OVERLAP_F_B`: the F becomes `cell`, the other half is kept for the next call.
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
    if (middle == none || middle == 0 || middle + 1 == halves.size() || halves.find(';', middle + 1) != none) {
      return fail(column, there,
                  " has not two halves: wanted are an F and a B or I with one semicolon between, such as (0F7;7B3)OVERLAP_F_B");
    }
    csv_cell first, second;
    first.column = column + 1;
    second.column = first.column + static_cast<int>(middle) + 1;
    read(first, halves.substr(0, middle), true);
    if (problem_) return;
    read(second, halves.substr(middle + 1), true);
    if (problem_) return;
    if (!first.is_instruction() || first.what != kind::forward)
      return fail(first.column, halves.substr(0, middle),
                  ": the first half of a fused pair must be an F, as in (0F7;7B3)OVERLAP_F_B");
    if (!second.is_instruction() || (second.what != kind::backward && second.what != kind::backward_input)) {
      return fail(second.column, halves.substr(middle + 1),
                  ": the second half of a fused pair must be a B or an I, as in (0F7;7B3)OVERLAP_F_B");
    }
    cell = first;
    cell.fused = true;
    other_half_ = second;
    pair_ends_row_ = row_ended_;
    row_ended_ = false;
  }

  /// One action, on its own or as half of a pair.
  constexpr void read(csv_cell& cell, std::string_view there, bool half = false) {
    int const column = cell.column;
    for (char c : there) {
      if (c == 0) return fail(column, there, " holds a NUL byte: a schedule is plain text, such as 0F0,0F1,0B0");
    }
    if (there.front() == ' ' || there.back() == ' ' || there.front() == '\t' || there.back() == '\t') {
      return fail(column, there,
                  half ? " has blanks around it: a fused pair has none, such as (0F7;7B3)OVERLAP_F_B"
                       : " has blanks around it: wanted are actions with only commas between, such as 0F0,0F1");
    }
    std::string_view rest = there;
    cell.stage = take_number(rest, max_stages - 1);
    if (cell.stage == -1)
      return fail(column, there, " does not start with a stage: an action is stage, type, microbatch, such as 2F0");
    if (cell.stage == -2) return fail(column, there, " has a stage with leading zeros: write 2F0, not 02F0");
    if (cell.stage < 0) return fail(column, there, " names a stage above 2047, the highest there can be");

    std::size_t letters = 0;
    while (letters < rest.size() && ((rest[letters] >= 'A' && rest[letters] <= 'Z') || rest[letters] == '_')) ++letters;
    std::string_view const word = rest.substr(0, letters);
    rest.remove_prefix(letters);
    constexpr spelling spellings[] = {{"F", kind::forward, csv_extra::none},
                                      {"B", kind::backward, csv_extra::none},
                                      {"I", kind::backward_input, csv_extra::none},
                                      {"W", kind::backward_weight, csv_extra::none},
                                      {"SEND_F", kind::send_forward, csv_extra::none},
                                      {"RECV_F", kind::receive_forward, csv_extra::none},
                                      {"SEND_B", kind::send_backward, csv_extra::none},
                                      {"RECV_B", kind::receive_backward, csv_extra::none},
                                      {"WAIT_SEND_F", kind::wait_send_forward, csv_extra::none},
                                      {"WAIT_SEND_B", kind::wait_send_backward, csv_extra::none},
                                      {"REDUCE_GRAD", kind::reduce_gradients, csv_extra::none},
                                      {"WAIT_REDUCE_GRAD", kind::optimizer_step, csv_extra::wait_reduce_gradients},
                                      {"UNSHARD", kind::optimizer_step, csv_extra::unshard},
                                      {"RESHARD", kind::optimizer_step, csv_extra::reshard}};
    spelling const* found = nullptr;
    for (spelling const& one : spellings) {
      if (word == one.letters) found = &one;
    }
    if (word == "BW")
      return fail(
          column, there,
          ": BW is a retired spelling: today the full backward is B, the input gradient I (once B), the weight gradient W");
    if (found == nullptr)
      return fail(column, there, " has no type that is known: wanted is F, B, I or W after the stage, such as 2F0");
    cell.what = found->what;
    cell.extra = found->extra;
    bool const has_micro_batch = cell.extra == csv_extra::none && cell.what != kind::reduce_gradients;
    if (has_micro_batch) {
      cell.micro_batch = take_number(rest, max_micro_batches - 1);
      if (cell.micro_batch == -1) return fail(column, there, " has no microbatch: an action ends in its microbatch, such as 2F0");
      if (cell.micro_batch == -2) return fail(column, there, " has a microbatch with leading zeros: write 2F1, not 2F01");
      if (cell.micro_batch < 0) return fail(column, there, " names a microbatch above 65534, the highest there can be");
    }
    if (!rest.empty()) {
      if (half) return fail(column, there, " goes on after its end: each half of a fused pair is one action, such as 0F7");
      return fail(column, there,
                  has_micro_batch ? " goes on after its microbatch: wanted is a comma or the end of the line there"
                                  : " goes on after its type: this type has no microbatch");
    }
    cell.empty = false;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::size_t line_start_ = 0;
  int line_ = 1;
  bool row_ended_ = false;
  bool after_comma_ = false;  // then a cell follows, though it may be empty and the text's end
  csv_cell other_half_{};     // of the pair whose F was the last cell; empty: none
  bool pair_ends_row_ = false;
  finding problem_{};
};

}  // namespace chevron
