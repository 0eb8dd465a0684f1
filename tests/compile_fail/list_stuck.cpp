// On a V a microbatch is in flight twice on each rank: with room for one chunk nothing can ever enter.
// expect: invalid_schedule<chevron::law::description, 0, -1, .*"rank 0: list scheduling is stuck: allow more than the limit in flight, which is 1"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule_of(work_graph::split_backward).place(placement::vee).prefer(I, F, W).at_most_in_flight(2);
#else
inline constexpr auto mine = schedule_of(work_graph::split_backward).place(placement::vee).prefer(I, F, W).at_most_in_flight(1);
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
