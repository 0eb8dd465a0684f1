// A wave that never crosses, and a map without the number of stages.
// expect: static assertion failed.*a wave crosses the ranks at least once: wave<n> needs n >= 1
// expect: static assertion failed.*a placement of your own is mapped\(chunks, map\): how many stages each rank has.* a function int\(int stage, shape\) that gives a stage's rank
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
constexpr auto wave = placement::wave<1>;
constexpr auto mine = placement::mapped(1, [](int stage, shape) { return stage; });
#else
constexpr auto wave = placement::wave<0>;
constexpr auto mine = placement::mapped([](int stage, shape) { return stage; });
#endif
