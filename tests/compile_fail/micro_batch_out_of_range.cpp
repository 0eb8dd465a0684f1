// A microbatch beyond the last one.
// expect: invalid_schedule<chevron::law::ids_in_range, 0, 0, .*"rank 0, step 0: 0F8 names a microbatch that does not exist; microbatches: 8"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;

// A plan by hand: 1F1B, with one action put in another's place.
constexpr plan mine(shape size) {
  plan made = expand(catalogue::one_f_one_b, size);
#ifndef LEGAL
  made.actions.data[made.begin.data[0] + 0] = make_action(kind::forward, 0, 8);
#endif
  return made;
}
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
