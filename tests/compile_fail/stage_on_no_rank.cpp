// Five stages listed for two ranks, one of them on a third.
// expect: invalid_schedule<chevron::law::placement, -1, -1, .*"the placement puts a stage on a rank that does not exist, stage 4 .there are 2 ranks."
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::of({0, 0, 0, 1, 1}), breadth_first, steady(F) | cooldown(B));
#else
inline constexpr auto mine = schedule(placement::of({0, 0, 0, 1, 2}), breadth_first, steady(F) | cooldown(B));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 2, .micro_batches = 4}>;
