// Chunks are counted from 0, on each rank from the input side.
// expect: invalid_schedule<chevron::law::description, 0, -1, .*"rank 0: a token names a chunk this rank does not have, chunk -1"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::linear, warmup(F(0) * (ranks - 1 - rank)) | steady(F(0), B) | cooldown(B));
#else
inline constexpr auto mine = schedule(placement::linear, warmup(F(-1) * (ranks - 1 - rank)) | steady(F(-1), B) | cooldown(B));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
