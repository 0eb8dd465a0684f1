// A schedule without phases, of bare tokens, without a placement, on a bare map, with a number for an order.
// expect: static assertion failed.*a schedule ends with its phases, as in schedule\(placement::linear, warmup\(F \* \(ranks - 1 - rank\)\) \| steady\(F, B\) \| cooldown\(B\)\)
// expect: static assertion failed.*a schedule begins with its placement: linear, loop, vee, wave<n>, or your own map, placement::mapped\(chunks, map\)
// expect: static assertion failed.*between placement and phases stands at most an order: depth_first\(group\) or breadth_first; phases are joined with \|
// expect: static assertion failed.*the size of a round is an int or a rank expression: depth_first\(4\), depth_first\(ranks\)
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
constexpr auto phases_there = schedule(placement::linear, steady(F, B));
constexpr auto phases_of_tokens = schedule(placement::linear, steady(F) | cooldown(B));
constexpr auto joined = schedule(placement::loop, steady(F) | cooldown(B));
constexpr auto placed = schedule(placement::linear, steady(F) | cooldown(B));
constexpr auto mapped = schedule(placement::mapped(1, [](int stage, shape) { return stage; }), steady(F) | cooldown(B));
constexpr auto ordered = schedule(placement::loop, depth_first(3), steady(F) | cooldown(B));
constexpr auto rounds = depth_first(2);
#else
constexpr auto phases_there = schedule(placement::linear);
constexpr auto phases_of_tokens = schedule(placement::linear, F, B);
constexpr auto joined = schedule(placement::loop, steady(F), cooldown(B));
constexpr auto placed = schedule(steady(F) | cooldown(B));
constexpr auto mapped = schedule([](int stage, shape) { return stage; }, steady(F) | cooldown(B));
constexpr auto ordered = schedule(placement::loop, 3, steady(F) | cooldown(B));
constexpr auto rounds = depth_first(2.0);
#endif
