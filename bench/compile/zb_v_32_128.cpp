// ZBVZeroBubble for 32 ranks and 128 microbatches, near the largest that is worth proving in a compiler.
#include <chevron/schedule.hpp>

constexpr auto const& plan = chevron::checked<chevron::catalogue::zb_v, chevron::shape{.ranks = 32, .micro_batches = 128}>;
static_assert(plan.size.micro_batches == 128);
