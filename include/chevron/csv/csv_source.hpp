#pragma once

#include <string_view>

#include <chevron/csv/csv_check.hpp>

/// \file
/// A schedule written as CSV in a program's source, for `checked` and `lowered`.

namespace chevron {

/// A schedule written as CSV in a program's source, for `checked` and `lowered`: a constant with static storage.
///
/// ```cpp
/// inline constexpr auto mine = chevron::from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
/// constexpr auto const& plan = chevron::checked<mine, chevron::shape{.ranks = 2, .micro_batches = 2}>;
/// ```
///
/// A text that cannot be read or breaks a law does not compile; the compiler's message names line and column. Messages are
/// checked, too, if the text has communication.
struct csv_source {
  std::string_view text;
  channel_rules channels{};

  /// The same text, whose messages are proved for these channels, too: those of the program that runs them.
  ///
  /// ```cpp
  /// inline constexpr auto for_pytorch = chevron::from_csv("0F0,0SEND_F0\n1RECV_F0,1F0\n").over(chevron::channel_model::group);
  /// ```
  /// \param hosts_wait whether a rank waits at each message until the message has ended
  constexpr csv_source over(channel_model model, bool hosts_wait = false) const { return {text, {model, hosts_wait}}; }

  /// Reads and checks the text. \returns its plan, with the first fault in `problem`
  /// \param size must equal the text's own size, or the plan has a `problem`; 0 chunks accept any number
  constexpr plan operator()(shape size) const {
    csv_schedule read = read_csv(text);
    read.plan.channels = read.program.source.channels = channels;
    plan made = read.plan;
    if (made.problem) return made;
    if (!channels.are_own() && read.dialect == csv_dialect::compute_only) {
      made.problem = detail::fault(law::description,
                                   "the text has no messages to prove for channels. Remedy: the text that chevron-plan lower "
                                   "--format csv-comms writes, or no over(). Messages: ",
                                   0);
      return made;
    }
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
    auto const other = [](char const* words, int number) { return detail::fault(law::shape, words, number); };
    if (asked.ranks != has.ranks) return other("asked for another number of ranks than the CSV has lines; it has ", has.ranks);
    if (asked.micro_batches != has.micro_batches)
      return other("asked for another number of microbatches than the CSV has; it has ", has.micro_batches);
    if (asked.slices != has.slices) return other("asked for another number of slices than the CSV has; it has ", has.slices);
    if (asked.chunks != 0 && asked.chunks != has.chunks)
      return other("asked for another number of chunks than the CSV has; it has ", has.chunks);
    return {};
  }
};

// `checked` must know sizes before it calls for the plan: these functions return upper bounds without parsing the text.

/// An upper bound of the number of actions in the source's text.
constexpr int actions_at_most(csv_source const& source, shape) {
  int cells = 1;
  for (char c : source.text) cells += c == ',' || c == ';' || c == '\n' ? 1 : 0;
  return cells;
}
/// An upper bound of the number of stages in the source's text.
constexpr int stages_of(csv_source const& source, shape) {
  int stages = 0;
  int number = 0;
  bool in_number = false, at_front = true;  // `at_front`: at the beginning of an action
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

/// Makes a schedule from a literal. Other texts are for `read_csv`, since a `csv_source` does not copy its text.
template <std::size_t N>
constexpr csv_source from_csv(char const (&literal)[N]) {
  return {{literal, N - 1}, {}};
}
/// Catches arguments that are no literal: does not compile, and says that `from_csv` takes a literal.
/// \returns nothing, since it never compiles
template <class Text>
constexpr csv_source from_csv(Text const&) {
  static_assert(sizeof(Text) == 0,
                "from_csv takes a literal, as in from_csv(\"0F0,0B0\"); text that is known only at run time is for read_csv");
  return {};
}

}  // namespace chevron
