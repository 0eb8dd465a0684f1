// ZBVZeroBubble for 8 ranks and 32 microbatches: worked out and proved.
#include <chevron/schedule.hpp>

constexpr auto const& plan = chevron::checked<chevron::catalogue::zb_v, chevron::shape{.ranks = 8, .micro_batches = 32}>;
static_assert(plan.size.micro_batches == 32);
