// Interleaved1F1B for 8 ranks, 32 microbatches and 2 chunks a rank: worked out and proved.
#include <chevron/schedule.hpp>

constexpr auto const& plan =
    chevron::checked<chevron::catalogue::interleaved_1f1b, chevron::shape{.ranks = 8, .micro_batches = 32, .chunks = 2}>;
static_assert(plan.size.micro_batches == 32);
