#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::looped_bfs;

LAW(looped_bfs, lawful);

// For M ≥ P interleaved 1F1B's makespan; every rank keeps everything.
LAW(looped_bfs, [](plan_view const& plan) {
  if (plan.size.micro_batches < plan.size.ranks) return true;
  return makespans_are(plan,
                       [&](costs const& c) {
                         return ideal(plan, c) + (plan.size.ranks - 1) * (c.forward + c.backward_input + c.backward_weight);
                       }) &&
         peaks_are(plan, [&](int) { return plan.size.micro_batches * plan.size.chunks; });
});

constexpr auto reference = checked<looped_bfs, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 57 && makespan(reference, light_weights) == 95 &&
              makespan(reference, uneven) == 57);
