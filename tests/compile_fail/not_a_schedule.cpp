// The gate's argument is no schedule.
// expect: static assertion failed.*checked takes a schedule: a description, a list schedule, a building block, from_csv, or a constexpr function plan\(shape\)
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::linear, steady(F) | cooldown(B));
#else
inline constexpr auto mine = steady(F) | cooldown(B);
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
