// 1F1B for 32 ranks and 128 microbatches: worked out and proved.
#include <chevron/schedule.hpp>

constexpr auto const& plan = chevron::checked<chevron::catalogue::one_f_one_b, chevron::shape{.ranks = 32, .micro_batches = 128}>;
static_assert(plan.size.micro_batches == 128);
