#pragma once

#include <string>

#include "hang.hpp"

/// \file
/// The first cause of a hang in words, as JSON and as a picture.

namespace plan_program {

/// `recv from rank 1`, `all_reduce 12 of group "dp"`.
std::string operation_words(recorder_dumps const& dumps, operation_place place);
/// One sentence without a full stop.
std::string hang_headline(recorder_dumps const& dumps, hang_story const& story);
/// The state of one rank: `waits for rank 2 in recv from rank 2`.
std::string hang_rank_words(recorder_dumps const& dumps, hang_story const& story, int rank);
/// Headline, remedy, chain of waits, a table of the ranks, remarks.
std::string hang_text(recorder_dumps const& dumps, hang_story const& story);
/// The same facts for programs.
std::string hang_json(recorder_dumps const& dumps, hang_story const& story);
/// A row for each rank with its last operations; pending ones are outlined, the culprits' rows are marked.
std::string hang_svg(recorder_dumps const& dumps, hang_story const& story);

}  // namespace plan_program
