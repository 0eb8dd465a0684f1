// A placement of one's own that sends the last stage past the last rank.
// expect: invalid_schedule<chevron::law::placement, -1, -1, .*"the placement puts a stage on a rank that does not exist, stage 3 \(there are 4 ranks\)"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::mapped(1, [](int stage, shape) { return stage; }), steady(F) | cooldown(B));
#else
inline constexpr auto mine = schedule(placement::mapped(1, [](int stage, shape) { return stage == 3 ? 4 : stage; }), steady(F) | cooldown(B));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
