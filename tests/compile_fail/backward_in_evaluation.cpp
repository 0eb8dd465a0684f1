// Evaluation has no gradients.
// expect: invalid_schedule<chevron::law::no_duplicate, 0, 4, .*"rank 0, step 4: 0B0 has no place in a forward-only plan"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

// A plan by hand: 1F1B with a change.
constexpr plan mine(shape size) {
  plan made = expand(catalogue::one_f_one_b, size);
#ifndef LEGAL
  made.forward_only = true;
#endif
  return made;
}
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
