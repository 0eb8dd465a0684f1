// V-Half's block without the gap between its halves: for even P those of different microbatches meet.
// expect: invalid_schedule<chevron::law::description, 0, -1, .*"rank 0: 0I0 must move to another slot, or the blocks repeat at another interval: once repeated it meets 7F0"
// expect: static assertion failed.*this schedule breaks a law
// expect-clang: invalid_schedule<chevron::law::description, 0, -1, .*"rank 0: 0I0 must
// expect-clang: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto gap = 3;
#else
inline constexpr auto gap = 0;
#endif
inline constexpr auto mine =
    building_block(placement::vee, every(6), F(0).at(2 * rank), F(1).at(3 * ranks - 2 - rank),
                   I(1).at(3 * ranks - 1 + 2 * rank + gap), I(0).at(6 * ranks - 2 - rank + gap), W(1), W(0));
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
