// Fused pairs of halves that make no pair.
// expect: static assertion failed.*a fused pair is a forward and a backward, in this order: overlap\(F, B\) or overlap\(F, I\)
// expect: static assertion failed.*a fused pair is two tokens, a forward and a backward: overlap\(F, B\), overlap\(F\(0\), I\(1\)\)
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
constexpr auto in_order = overlap(F(0), B(1));
constexpr auto of_two = overlap(F, I);
#else
constexpr auto in_order = overlap(B(1), F(0));
constexpr auto of_two = overlap(F, I * 2);
#endif
