// A microbatch that never goes forward on one stage.
// expect: invalid_schedule<chevron::law::complete, 1, -1, .*"rank 1: 1F2 is missing: every stage runs every microbatch forward"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

// A plan by hand: 1F1B with a change.
constexpr plan mine(shape size) {
  plan made = expand(catalogue::one_f_one_b, size);
#ifndef LEGAL
  made.actions.data[made.begin.data[1] + 2] = make_action(kind::backward_input, 1, 7);
#endif
  return made;
}
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
