// computes: a brief search for each schedule that is shown
#include "shorter.hpp"

#include <array>
#include <utility>

#include <chevron/base/format.hpp>
#include <chevron/catalogue/catalogue.hpp>
#include <chevron/search.hpp>

#include "../common/placements.hpp"
#include "memory.hpp"

namespace plan_program {
namespace {

/// The placement by name that has the stages where a plan has them; null where none has.
char const* placement_of(chevron::plan_view const& plan) {
  for (char const* name : {"linear", "loop", "vee", "wave"}) {
    if (!placements::exist(name, plan.size.chunks)) continue;
    bool same = plan.stages == plan.size.ranks * plan.size.chunks;
    for (int s = 0; same && s < plan.stages; ++s)
      same = plan.rank_of[s] == placements::on(name, [&](auto const& where) { return where.rank_of(s, plan.size); });
    if (same) return name;
  }
  return nullptr;
}

}  // namespace

std::optional<shorter_schedule> shorter_than(request const& asked, chevron::plan_view const& plan,
                                             chevron::cost_view const& costs, int costs_of) {
  constexpr int trials = 100, most_actions = 30'000;
  if (plan.size.slices > 1) return std::nullopt;
  bool const few = plan.size.micro_batches < 2 * plan.size.ranks;
  bool const varies = !asked.lengths.empty() || !asked.jitter.spread.empty() || !asked.jitter.slow_ranks.empty();
  if (!few || varies || plan.forward_only || plan.total() > most_actions || !chevron::catalogue::contains(plan.name))
    return std::nullopt;
  char const* const placement = placement_of(plan);
  if (placement == nullptr) return std::nullopt;
  bool split = false;
  for (int i = 0; i < plan.total(); ++i) split = split || plan.actions[i].kind == chevron::kind::backward_weight;
  chevron::activation_limit const memory{static_cast<double>(chevron::peak_in_flight(plan))};
  double const length = chevron::makespan(plan, costs);
  auto const found = placements::on(placement, [&](auto const& where) {
    auto const work = split ? chevron::work_graph::split_backward : chevron::work_graph::full_backward;
    return chevron::search::find({.where = chevron::placed_on(where, plan.size), .costs = costs, .memory = memory, .work = work},
                                 {.trials = trials});
  });
  if (found.best.problem || !(found.length < length * (1 - 1e-9))) return std::nullopt;
  request brief = asked;
  brief.search.trials = std::to_string(trials);
  brief.search.seed = "1";
  brief.bytes = {};
  return shorter_schedule{found.length, command_text(brief, "search", plan.size, costs_of) + " --placement " + placement +
                                            (plan.size.chunks > 1 ? " --chunks " + std::to_string(plan.size.chunks) : "") +
                                            " --memory-limit " + chevron::show::number(memory.most / plan.size.chunks, 9) +
                                            (split ? "" : " --full-backward")};
}

}  // namespace plan_program
