// A count that divides by a number that is 0 on one rank.
// expect: invalid_schedule<chevron::law::description, -1, -1, .*"a rank expression divides by 0, or takes a remainder of it: .*; rank 1"
// expect: static assertion failed.*this schedule breaks a law
// expect-clang: invalid_schedule<chevron::law::description, -1, -1, .*"a rank expression divides by 0
// expect-clang: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto ahead = 4 / max_of(1 - rank, 1);
#else
inline constexpr auto ahead = 4 / (1 - rank);
#endif
inline constexpr auto mine = schedule(placement::linear, warmup(F * min_of(ranks - 1 - rank, ahead)) | steady(F, B) | cooldown(B));
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 2, .micro_batches = 8}>;
