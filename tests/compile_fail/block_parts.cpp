// A building block whose interval is a bare number, and one without its placement.
// expect: static assertion failed.*a building block begins with its placement and its interval, as in building_block\(placement::vee, every\(6\), F\(0\).at\(0\)\)
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
constexpr auto spaced = building_block(placement::linear, every(2), F(0).at(rank), B(0).at(2 * ranks - 1 - rank));
#else
constexpr auto spaced = building_block(placement::linear, 2, F(0).at(rank), B(0).at(2 * ranks - 1 - rank));
#endif
