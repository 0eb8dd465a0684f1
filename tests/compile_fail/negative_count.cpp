// A warm-up count that falls below zero on the first rank.
// expect: invalid_schedule<chevron::law::description, 0, -1, .*"rank 0: a phase has a negative count, see max_of; it is -4"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B));
#else
inline constexpr auto mine = schedule(placement::linear, warmup(F * (rank - ranks)) | steady(F, B) | cooldown(B));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
