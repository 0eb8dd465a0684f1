// ZBVZeroBubble for 8 ranks and 32 microbatches: worked out, proved and lowered to a program.
#include <chevron/schedule.hpp>

constexpr auto const& program = chevron::lowered<chevron::catalogue::zb_v, chevron::shape{.ranks = 8, .micro_batches = 32}>;
static_assert(program.view().total() > 0);
