// The backward is split, but no action computes the weight gradients.
// expect: invalid_schedule<chevron::law::complete, 0, -1, .*"rank 0: 0W0 is missing: every I is followed by its W"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, I, W) | cooldown(I, W));
#else
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, I) | cooldown(I));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
