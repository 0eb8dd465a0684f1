// A plan holds computations; communication is put in when it is lowered.
// expect: invalid_schedule<chevron::law::ids_in_range, 3, 1, .*"rank 3, step 1: 3SEND_B0 is no computation: a plan holds only F, B, I, W, R and own actions; stages: 4"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

// A plan by hand: 1F1B with a change.
constexpr plan mine(shape size) {
  plan made = expand(catalogue::one_f_one_b, size);
#ifndef LEGAL
  made.actions.data[made.begin.data[3] + 1] = make_action(kind::send_backward, 3, 0);
#endif
  return made;
}
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
