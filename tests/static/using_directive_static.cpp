// A user's file with `using namespace chevron;` and a global constant `program`, as docs/guides/training.md calls it: an unqualified
// `program` must not also name something of Chevron's, since the two would be ambiguous.
#include <chevron/csv.hpp>
#include <chevron/schedule.hpp>
#include <chevron/search.hpp>
#include <chevron/show.hpp>

using namespace chevron;

constexpr auto program = lowered<catalogue::zb_h1, shape{.ranks = 2, .micro_batches = 4}>;
static_assert(program.view().plan.size.ranks == 2 && program.view().total() > 0);
