// A microbatch that is computed twice.
// expect: invalid_schedule<chevron::law::no_duplicate, 2, 3, .*"rank 2, step 3: 2F0 was already done at step 0"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;

// A plan by hand: 1F1B, with one action put in another's place.
constexpr plan mine(shape size) {
  plan made = expand(catalogue::one_f_one_b, size);
#ifndef LEGAL
  made.actions.data[made.begin.data[2] + 3] = make_action(kind::forward, 2, 0);
#endif
  return made;
}
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
