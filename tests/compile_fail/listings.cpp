// List schedules: kinds named twice or not at all, no placement, a limit that is no count.
// expect: static assertion failed.*prefer names each kind once, from the first to the last: prefer\(I, F, W\)
// expect: static assertion failed.*prefer takes kinds, from the first to the last: prefer\(I, F, W\)
// expect: placement_policy.*with Where = int
// expect: int_or_rank_expression.*with Value = double
// expect-clang: static assertion failed.*prefer names each kind once, from the first to the last: prefer\(I, F, W\)
// expect-clang: static assertion failed.*prefer takes kinds, from the first to the last: prefer\(I, F, W\)
// expect-clang: 'int' does not satisfy 'counted_placement'
// expect-clang: 'double' does not satisfy 'int_or_rank_expression'
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
constexpr auto work = schedule_of(work_graph::split_backward);
constexpr auto once = work.prefer(I, F);
constexpr auto kinds = work.prefer(F);
constexpr auto placed = work.place(placement::vee);
constexpr auto limited = work.at_most_in_flight(2);
#else
constexpr auto work = schedule_of(work_graph::split_backward);
constexpr auto once = work.prefer(F, F);
constexpr auto kinds = work.prefer(overlap(F, B));
constexpr auto placed = work.place(2);
constexpr auto limited = work.at_most_in_flight(1.5);
#endif
