// Five stages listed for three ranks, none of them on the last.
// expect: invalid_schedule<chevron::law::placement, -1, -1, .*"a rank has no stage, rank 2"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

inline constexpr auto mine = schedule(placement::of({0, 0, 0, 1, 1}), breadth_first, steady(F) | cooldown(B));
#ifdef LEGAL
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 2, .micro_batches = 4}>;
#else
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 3, .micro_batches = 4}>;
#endif
