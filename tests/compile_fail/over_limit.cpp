// A declared memory limit below the warm-up's need.
// expect: invalid_schedule<chevron::law::in_flight, 0, 3, .*"rank 0, step 3: 0F3 makes 4 chunks in flight, the declared limit is 3"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B)).at_most_in_flight(ranks);
#else
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B)).at_most_in_flight(ranks - 1);
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
