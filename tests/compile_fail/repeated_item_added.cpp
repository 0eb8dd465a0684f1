// A repeated item with another letter added to it: which of them would be repeated?
// expect: static assertion failed.*a repeated item stands by itself: write warmup\(F \* 2, I\) or warmup\(\(F \+ F \+ I\) \* 3\), not F \* 2 \+ I
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::linear, steady(F * 2, I, W) | cooldown(I, W) | cooldown(W));
#else
inline constexpr auto mine = schedule(placement::linear, steady(F * 2 + I, W) | cooldown(I, W) | cooldown(W));
#endif
