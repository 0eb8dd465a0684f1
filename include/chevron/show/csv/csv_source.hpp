#pragma once

#include <string_view>

#include <chevron/show/csv/csv_check.hpp>

/// \file
/// A schedule as CSV in a program's own source, for the gate.

namespace chevron {

/// A schedule written down as CSV in a program's own source, for the gate: a constant with static storage.
///
/// ```cpp
/// inline constexpr auto mine = chevron::from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
/// constexpr auto const& plan = chevron::checked<mine, chevron::shape{.ranks = 2, .micro_batches = 2}>;
/// ```
///
/// A text that cannot be read or breaks a law does not compile; the sentence has line and column. With communication in the
/// text, its messages are proved too.
struct csv_source {
  std::string_view text;

  /// The plan of the text, or its first fault in `problem`.
  /// \param size the text's own; 0 chunks stand for as many as the text has
  constexpr plan operator()(shape size) const {
    csv_schedule const read = read_csv(text);
    plan made = read.plan;
    if (made.problem) return made;
    made.problem = misfit(made.size, size);
    if (made.problem) return made;
    if (finding f = check(read, text)) {
      bool const of_program = !check(made.view());
      csv_place const at = place_of(f, text, of_program);
      f.line = at.line;
      f.column = at.column;
      made.problem = f;
    }
    return made;
  }

 private:
  static constexpr finding misfit(shape has, shape asked) {
    finding f;
    f.broken = law::shape;
    if (asked.ranks != has.ranks) {
      f.words = "asked for another number of ranks than the CSV has lines; it has ";
      f.number = has.ranks;
    } else if (asked.micro_batches != has.micro_batches) {
      f.words = "asked for another number of microbatches than the CSV has; it has ";
      f.number = has.micro_batches;
    } else if (asked.slices != has.slices) {
      f.words = "asked for another number of slices than the CSV has; it has ";
      f.number = has.slices;
    } else if (asked.chunks != 0 && asked.chunks != has.chunks) {
      f.words = "asked for another number of chunks than the CSV has; it has ";
      f.number = has.chunks;
    } else {
      return {};
    }
    return f;
  }
};

// For the gate, which has to know the sizes before it asks for the plan: upper bounds, without a parse.

/// At least as many actions as the source's text has.
constexpr int actions_at_most(csv_source const& source, shape) {
  int cells = 1;
  for (char c : source.text) cells += c == ',' || c == ';' || c == '\n' ? 1 : 0;
  return cells;
}
/// At least as many stages as the source's text has.
constexpr int stages_of(csv_source const& source, shape) {
  int stages = 0;
  int number = 0;
  bool in_number = false, at_front = true;  // of an action
  for (char c : source.text) {
    if (at_front && !in_number && (c == ' ' || c == '\t' || c == '"')) continue;
    if (at_front && c >= '0' && c <= '9') {
      number = number < max_stages ? number * 10 + (c - '0') : number;
      in_number = true;
      continue;
    }
    if (in_number && number < max_stages && number >= stages) stages = number + 1;
    number = 0;
    in_number = false;
    at_front = c == ',' || c == ';' || c == '\n' || c == '(';
  }
  return stages;
}

/// The schedule of a literal; other texts must outlive everything made from them, and go to `read_csv`.
template <std::size_t N>
constexpr csv_source from_csv(char const (&literal)[N]) {
  return {{literal, N - 1}};
}
/// Other arguments: does not compile, and says that `from_csv` takes a literal.
/// \returns never anything that is used
template <class Text>
constexpr csv_source from_csv(Text const&) {
  static_assert(sizeof(Text) == 0,
                "from_csv takes a literal, as in from_csv(\"0F0,0B0\"); text that is known only at run time is for read_csv");
  return {};
}

}  // namespace chevron
