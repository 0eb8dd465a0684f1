// A list schedule with two chunks a rank must be placed: stages in a line have one.
// expect: invalid_schedule<chevron::law::shape, -1, -1, .*"with this placement chunks can be 1, not 2"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule_of(work_graph::full_backward).place(placement::loop);
#else
inline constexpr auto mine = schedule_of(work_graph::full_backward);
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8, .chunks = 2}>;
