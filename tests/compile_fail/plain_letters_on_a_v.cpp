// The letters of a schedule in a line on a V: a rank draws its second chunk's I before that chunk has an F.
// expect: invalid_schedule<chevron::law::order, 0, 4, .*"rank 0, step 4: 7I0 comes before 7F0, which it needs; rank 0 holds 2 chunks, and a plain letter draws the next one: F.0., F.1. and so on name a chunk"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto where = placement::linear;
#else
inline constexpr auto where = placement::vee;
#endif
inline constexpr auto mine = schedule(where, warmup(F * (ranks - rank)) | steady(I, W, F) | cooldown(I, W));
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
