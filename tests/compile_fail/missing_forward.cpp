// More backwards than forwards: the warm-up stops after as many microbatches as there are ranks.
// expect: invalid_schedule<chevron::law::complete, 0, -1, .*"rank 0: 0F4 is missing: every stage runs every microbatch forward"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::linear, warmup(F * micro_batches) | cooldown(B));
#else
inline constexpr auto mine = schedule(placement::linear, warmup(F * ranks) | cooldown(B));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
