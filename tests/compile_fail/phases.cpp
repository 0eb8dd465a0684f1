// Phases made of the wrong things, or joined in the wrong way.
// expect: static assertion failed.*a phase is made of tokens \(F, B, I, W\), sequences \(F \+ B\), fused pairs \(overlap\(F, B\)\) and repeated ones \(F \* rank\)
// expect: static assertion failed.*a phase needs at least one token, as in steady\(F, B\)
// expect: static assertion failed.*a phase holds no phases: join them with \|, as in warmup\(F\) \| steady\(F, B\)
// expect: static assertion failed.*\| joins phases and nothing else, as in steady\(F, B\) \| cooldown\(B\); in a phase, items are separated by commas
// expect: static assertion failed.*phases are joined with \|, as in warmup\(F\) \| steady\(F, B\) \| cooldown\(B\)
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
constexpr auto of_tokens = steady(F, B);
constexpr auto not_empty = steady(F);
constexpr auto side_by_side = warmup(F) | steady(F, B);
constexpr auto by_commas = steady(F, B) | cooldown(B);
constexpr auto by_bars = warmup(F) | cooldown(B);
#else
constexpr auto of_tokens = steady(F, rank);
constexpr auto not_empty = steady();
constexpr auto side_by_side = steady(F, steady(B));
constexpr auto by_commas = steady(F | B) | cooldown(B);
constexpr auto by_bars = warmup(F) + cooldown(B);
#endif
