// A forward fused with its own backward, which needs it.
// expect: invalid_schedule<chevron::law::fused_pair, 3, 0, .*"rank 3, step 0: 3F0 is fused with its own backward, which needs it: 3B0"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

// A plan by hand: 1F1B with a change.
constexpr plan mine(shape size) {
  plan made = expand(catalogue::one_f_one_b, size);
#ifndef LEGAL
  made.actions.data[made.begin.data[3]].fused = 1;
#endif
  return made;
}
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
