#include "plans.hpp"

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/prove/check.hpp>

namespace differential {

plan_facts facts_of(std::string const& schedule, int ranks, int micro_batches, int slices) {
  auto const plan = chevron::catalogue::make_plan(schedule, {.ranks = ranks, .micro_batches = micro_batches, .slices = slices});
  plan_facts out;
  if (chevron::check(plan)) return out;
  out.stages = plan.stages;
  out.additions.resize(static_cast<std::size_t>(plan.stages));
  for (int s = 0; s < plan.stages; ++s) out.rank_of.push_back(plan.rank_of.data[static_cast<std::size_t>(s)]);
  for (int i = 0; i < plan.view().total(); ++i) {
    chevron::action const a = plan.actions.data[static_cast<std::size_t>(i)];
    if (a.kind != chevron::kind::backward && a.kind != chevron::kind::backward_weight) continue;
    out.additions[a.stage].push_back(a.micro_batch);
  }
  return out;
}

std::vector<std::string> const& schedules() {
  static std::vector<std::string> const names = [] {
    std::vector<std::string> all;
    chevron::catalogue::for_each([&](auto const& one) { all.emplace_back(one.name); });
    return all;
  }();
  return names;
}

std::vector<std::string> const& sliced_schedules() {
  static std::vector<std::string> const names{"Seq1F1B", "SeqZB-H1", "SeqInterleaved1F1B", "GPipe", "LoopedBFS"};
  return names;
}

}  // namespace differential
