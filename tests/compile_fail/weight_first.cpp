// A weight gradient ahead of the input gradient it comes from.
// expect: invalid_schedule<chevron::law::order, 0, 4, .*"rank 0, step 4: 0W0 comes before 0I0, which it needs"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, I, W) | cooldown(I, W));
#else
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, W, I) | cooldown(W, I));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
