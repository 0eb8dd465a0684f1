#pragma once

#include <string>
#include <utility>
#include <vector>

#include <chevron/tools/search/jitter.hpp>
#include <chevron/tools/search/robust.hpp>

#include "request.hpp"

/// \file
/// Times that vary: how, from the flags, and what many draws say of schedules.

namespace plan_program {

/// What `--jitter`, `--replicas`, `--slow-replica`, `--draws` and `--seed` ask for.
chevron::search::jitter jitter_of(request const& asked);
/// Whether there is anything to draw.
bool varies(chevron::search::jitter const& how);
/// What each rank multiplies its computations' times by, as `--slow-rank` says.
std::vector<double> slow_ranks(request const& asked, int ranks);
/// All of it as a sentence, with a newline; empty where times are as planned.
std::string jitter_words(request const& asked, chevron::search::jitter const& how);
/// One schedule of a table of drawn times.
struct drawn_row {
  std::string name;
  int chunks = 0;
  double planned = 0;           ///< its length without jitter
  std::vector<double> lengths;  ///< by draw
  double peak = 0;              ///< in microbatches of a rank's whole share
};

/// A table, the rows being in the order of their 90th percentiles, and which of them are as good as the first.
std::string drawn_table(std::vector<drawn_row> const& rows, chevron::show::text_style const& style);

/// A table of what a search under jitter came to on each placement, and what is to be said of the first.
std::string robust_words(std::vector<std::pair<std::string, chevron::search::robust_found const*>> const& all,
                         chevron::show::text_style const& style);
/// The same of one placement as members of a JSON object, each after a comma.
std::string robust_json(chevron::search::robust_found const& found);

}  // namespace plan_program
