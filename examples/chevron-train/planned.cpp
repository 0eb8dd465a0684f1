#include "planned.hpp"

#include <chevron/base/format.hpp>
#include <chevron/search.hpp>

#include "common/console.hpp"
#include "common/placements.hpp"
#include "common/programs.hpp"

namespace chevron::train {
namespace {

/// From which gain on other layers are worth a new start.
constexpr double worth_telling = .02;

std::string time(double milliseconds) { return duration(milliseconds * 1e-3); }

}  // namespace

std::string words_for(replan_report const& news) {
  // Steps that people read count from 1, those of the library from 0.
  std::string const after = "after step " + std::to_string(news.step + 1);
  std::string const next = "from step " + std::to_string(news.step + 2) + " on";
  std::string const medians = "the medians of " + some(news.steps, "step");
  std::string const changed = news.drift > 0 ? ", since costs have changed by " + show::percent(news.drift) : "";
  std::string const search = "a search of " + duration(news.seconds);
  std::string const least = "; no order of these stages takes less than " + time(news.bound);
  switch (news.what) {
    case schedule_event::changed:
      return after + changed + ", from " + medians + ": the schedule in use takes " + time(news.measured) + ", predicted " +
             time(news.running) + "; one found in " + search + " is predicted to take " + time(news.found) + ", " +
             show::percent(1 - news.found / news.running) + " less" + least + ". It is used " + next +
             ", and relies on the measured times of stages and messages";
    case schedule_event::kept:
      return after + changed + ", from " + medians + ": the schedule in use takes " + time(news.measured) + ", predicted " +
             time(news.running) + "; it stays, since the best of " + search + " would take " + time(news.found) + least;
    case schedule_event::confirmed:
      return after + ": the new schedule takes " + time(news.measured) + ", predicted " + time(news.found) +
             "; the one before took " + time(news.before) + ". It stays";
    case schedule_event::went_back:
      return after + ": the new schedule takes " + time(news.measured) + ", predicted " + time(news.found) +
             "; the one before took " + time(news.before) + " and is used again " + next +
             ": the times of stages and messages have changed";
  }
  return {};
}

std::string words_for_layers(options const& o, replan_report const& news) {
  if (news.what != schedule_event::changed && news.what != schedule_event::kept) return {};
  search::layer_costs const costs = search::layer_costs_of(news.costs, true);
  if (!costs.problem.empty()) return {};
  activation_limit const memory{static_cast<double>(chunk_limit(o))};
  auto const goal = o.post_validation ? search::objective::span : search::objective::makespan;
  plan const placed = placements::on(o.placement, [&](auto const& where) {
    return placed_on(where, {.ranks = o.ranks, .micro_batches = o.micro_batches, .chunks = o.chunks});
  });
  // Not for long: training waits.
  auto const got =
      search::find_layers(costs, {.where = placed, .memory = memory, .goal = goal},
                          {.brief = {.trials = 500}, .thorough = {.trials = 4000}, .most_looked_at = 24, .most_searched = 3});
  double const now = news.what == schedule_event::changed ? news.found : news.running;
  if (got.best.problem || !(got.length < now * (1 - worth_telling))) return {};
  return "other layers on the stages would gain more: --layers " + search::layers_text(got.layers) + " is predicted to take " +
         time(got.length) + ", " + show::percent(1 - got.length / now) + " less, with " + some(got.held, "layer") +
         " in flight on a rank at most (" + std::to_string(got.even_held) +
         " if they are even). Weights do not move while training: start with that flag, or go on with it from a checkpoint "
         "(--resume)";
}

}  // namespace chevron::train
