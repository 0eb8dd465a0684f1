// A search within a limit that nothing can keep: on a V a microbatch is in flight twice on each rank. The error names the least.
// expect: invalid_schedule<chevron::law::description, .*"a microbatch on its way holds a chunk with each stage of a rank: the memory limit must be at least 2"
// expect-clang: a microbatch on its way holds a chunk with each stage of a rank: the memory limit must be at least 2"
#include <chevron/schedule.hpp>
#include <chevron/search.hpp>

using namespace chevron;

inline constexpr costs measured{10, 11, 9, 0.5};
#ifdef LEGAL
inline constexpr auto mine = search::best(placement::vee, measured).at_most_in_flight(2).trying({.trials = 20});
#else
inline constexpr auto mine = search::best(placement::vee, measured).at_most_in_flight(1);
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 2, .micro_batches = 3}>;
