// A microbatch whose weight gradients would be added twice, by its B and by a W.
// expect: invalid_schedule<chevron::law::no_duplicate, 3, 3, .*"rank 3, step 3: 3W0 would add these gradients twice: this microbatch already has a B"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;

// A plan by hand: 1F1B, with one action put in another's place.
constexpr plan mine(shape size) {
  plan made = expand(catalogue::one_f_one_b, size);
#ifndef LEGAL
  made.actions.data[made.begin.data[3] + 3] = make_action(kind::backward_weight, 3, 0);
#endif
  return made;
}
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
