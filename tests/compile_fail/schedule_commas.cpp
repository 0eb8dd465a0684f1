// Phases joined with commas are one mistake and one error: no broken law is reported for them.
// expect: static assertion failed.*between placement and phases stands at most an order: depth_first\(group\) or breadth_first; phases are joined with \|
// errors: 1
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B));
#else
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)), steady(F, B), cooldown(B));
#endif
constexpr auto plan = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
