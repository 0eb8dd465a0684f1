// A placement of one's own that leaves a rank without work.
// expect: invalid_schedule<chevron::law::placement, -1, -1, .*"a rank has no stage, rank 1"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::mapped(1, [](int stage, shape) { return stage; }), steady(F) | cooldown(B));
#else
inline constexpr auto mine = schedule(placement::mapped(1, [](int stage, shape) { return stage == 1 ? 0 : stage; }), steady(F) | cooldown(B));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
