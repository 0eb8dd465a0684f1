// A block whose gradient starts before that of the next stage has ended: the whole backward takes two slots.
// expect: invalid_schedule<chevron::law::description, 0, -1, .*"rank 0: 0B0 must have a later slot in the block: it does not wait for the end of 1B0"
// expect: static assertion failed.*this schedule breaks a law
// expect-clang: invalid_schedule<chevron::law::description, 0, -1, .*"rank 0: 0B0 must
// expect-clang: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = building_block(placement::linear, every(3), F.at(rank), B.at(3 * ranks - 2 - 2 * rank));
#else
inline constexpr auto mine = building_block(placement::linear, every(3), F.at(rank), B.at(2 * ranks - 1 - rank));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
