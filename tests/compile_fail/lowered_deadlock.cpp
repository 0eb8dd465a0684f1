// Only a proved schedule is lowered: the same words as at the gate.
// expect: invalid_schedule<chevron::law::deadlock, 0, 1, .*"rank 0, step 1: 0B0 waits for 1B0, which is queued on rank 1 behind 1F1; 1F1 waits for 0F1, which is queued behind 0B0"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B));
#else
inline constexpr auto mine = schedule(placement::linear, warmup(F * (rank)) | steady(F, B) | cooldown(B));
#endif
constexpr auto const& program_of_mine = lowered<mine, shape{.ranks = 4, .micro_batches = 8}>;
