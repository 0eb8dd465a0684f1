// Costs are named, since an F, an I and a W cost differently.
// expect: no known conversion for argument 2 from .int. to .const chevron::cost_view&.
// expect-clang: no known conversion from 'int' to 'const cost_view' for 2nd argument
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

constexpr auto const& plan_of_it = checked<catalogue::gpipe, shape{.ranks = 4, .micro_batches = 8}>;
#ifdef LEGAL
static_assert(makespan(plan_of_it, costs{.forward = 2}) > 0);
#else
static_assert(makespan(plan_of_it, 2) > 0);
#endif
