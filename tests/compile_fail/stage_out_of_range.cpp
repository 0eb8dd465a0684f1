// A stage beyond the last one.
// expect: invalid_schedule<chevron::law::ids_in_range, 0, 0, .*"rank 0, step 0: 7F0 names a stage that does not exist; stages: 4"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

// A plan by hand: 1F1B with a change.
constexpr plan mine(shape size) {
  plan made = expand(catalogue::one_f_one_b, size);
#ifndef LEGAL
  made.actions.data[0] = make_action(kind::forward, 7, 0);
#endif
  return made;
}
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
