// A forward named without a slot.
// expect: static assertion failed: only a W can do without a slot: write F.0..at.slot., and so for B and I
// expect-clang: static assertion failed.*only a W can do without a slot
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = building_block(placement::linear, every(3), F.at(rank), I.at(3 * ranks - 2 - 2 * rank), W);
#else
inline constexpr auto mine = building_block(placement::linear, every(3), F, I.at(3 * ranks - 2 - 2 * rank), W);
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
