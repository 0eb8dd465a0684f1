// A fused pair is a forward and a backward, not two forwards.
// expect: invalid_schedule<chevron::law::fused_pair, 0, 0, .*"rank 0, step 0: 0F0 is marked as half of a fused pair, which is an F and then a B or I, but after it comes 0F1"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

// A plan by hand: 1F1B with a change.
constexpr plan mine(shape size) {
  plan made = expand(catalogue::one_f_one_b, size);
#ifndef LEGAL
  made.actions.data[made.begin.data[0]].fused = 1;
#endif
  return made;
}
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
