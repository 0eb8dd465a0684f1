// Costs of four stages for a V of four ranks, which has eight.
// expect: invalid_schedule<chevron::law::description, .*"costs must be given for each stage, and the stages are 8, not 4"
// expect-clang: costs must be given for each stage, and the stages are 8, not 4"
#include <chevron/schedule.hpp>
#include <chevron/search.hpp>

using namespace chevron;

inline constexpr stage_costs<4> measured{{1, 1, 1, 2}, {1, 1, 1, 2}, {1, 1, 1, 2}, {}};
inline constexpr auto mine = search::best(placement::vee, measured).trying({.trials = 20});
#ifdef LEGAL
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 2, .micro_batches = 3}>;
#else
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 3}>;
#endif
