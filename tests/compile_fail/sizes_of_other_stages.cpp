// Sizes for four stages, declared of a schedule with eight.
// expect: invalid_schedule<chevron::law::description, -1, -1, .*"sizes must be declared for each stage, and the stages are 8, not 4"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;

#ifdef LEGAL
inline constexpr auto mine = catalogue::zb_v.at_most_bytes_in_flight(100, sizes{.activation = 10});
#else
inline constexpr auto mine = catalogue::zb_v.at_most_bytes_in_flight(100, stage_sizes<4>{.activation = {10, 10, 10, 10}});
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
