#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <chevron/csv/csv_check.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// What the page asks the engine, as text, and what becomes of it: a plan, its costs, what the laws say.

namespace playground {

using chevron::owned_costs;

/// Settings as the page sends them, `key=value` a line; after a line `csv` the rest is a schedule as CSV.
struct settings {
  std::string schedule = "1F1B";     ///< a name of the catalogue, `listed` or `csv`
  std::string placement = "linear";  ///< of listed and searched schedules: linear, loop, vee, wave
  int ranks = 4, micro_batches = 8, chunks = 0;
  std::vector<double> forward{1}, backward_input{1}, backward_weight{1};  ///< one for all, or one a stage of `cost_stages`
  int cost_stages =
      0;  ///< the stages that costs are said of; another schedule cuts the same model elsewhere. 0: as many as it has
  double latency = 0;      ///< of each message, after its transfer
  double message = 0;      ///< what the transfer takes at full speed: its size over the bandwidth
  int slow_link = -1;      ///< between this rank and the next
  double slow_factor = 1;  ///< there, messages take so many times as long
  chevron::occupies occupies = chevron::occupies::nobody;
  double hidden = 0;
  bool first_input_gradient = true;
  double memory_limit = 0;  ///< in microbatches of a rank's whole share; 0: none
  int trials = 0;
  int seed = 1;
  std::vector<int> moves;  ///< threes: rank, from, to; of a fused pair where its first half is
  std::string csv;
  std::string problem;  ///< why this cannot be used; empty: it can
};

/// A plan with what the laws say of it.
struct judged {
  chevron::plan plan;
  chevron::finding broken;
  std::string sentence;   ///< of `broken`; empty: all laws hold
  bool playable = false;  ///< its actions name stages and ranks that exist: as far as it goes it can be played
  bool complete = false;  ///< it runs to its end
};

settings read_settings(std::string_view text);
/// The plan asked for, with `memory_limit` as its declared limit and actions moved.
judged make(settings const& asked);
/// Costs for a plan: those of the settings, cut anew where it has another number of stages than they speak of.
owned_costs prices(settings const& asked, chevron::plan_view const& plan);
/// What is drawn and said of a plan, as JSON.
std::string answer(settings const& asked, judged const& of);
/// The plan as a C++ program that proves it while it compiles and prints its timeline.
std::string as_program(settings const& asked, judged const& of);

}  // namespace playground
