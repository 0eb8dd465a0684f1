// Interleaving in groups of three microbatches on four ranks: the first chunk is done before the last rank has begun.
// expect: invalid_schedule<chevron::law::description, -1, -1, .*"a group must have a microbatch for each rank, at least 4, not 3"
// expect: static assertion failed.*this schedule breaks a law
// expect-clang: invalid_schedule<chevron::law::description, -1, -1, .*"a group must have
// expect-clang: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;

#ifdef LEGAL
inline constexpr auto mine = catalogue::interleaved_1f1b_with(6);
#else
inline constexpr auto mine = catalogue::interleaved_1f1b_with(3);
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 10}>;
