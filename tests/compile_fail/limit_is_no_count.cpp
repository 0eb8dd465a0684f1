// A limit that is no whole number.
// expect: int_or_rank_expression.*with Value = double
// expect-clang: 'double' does not satisfy 'int_or_rank_expression'
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
constexpr auto mine = schedule(placement::linear, steady(F) | cooldown(B)).at_most_in_flight(micro_batches);
#else
constexpr auto mine = schedule(placement::linear, steady(F) | cooldown(B)).at_most_in_flight(1.5);
#endif
