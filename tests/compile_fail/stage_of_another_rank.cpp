// An action on a rank that does not hold its stage.
// expect: invalid_schedule<chevron::law::ids_in_range, 1, 0, .*"rank 1, step 0: 0F0 is on the wrong rank: its stage lives on rank 0"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;

// A plan by hand: 1F1B, with one action put in another's place.
constexpr plan mine(shape size) {
  plan made = expand(catalogue::one_f_one_b, size);
#ifndef LEGAL
  made.actions.data[made.begin.data[1] + 0] = make_action(kind::forward, 0, 0);
#endif
  return made;
}
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
