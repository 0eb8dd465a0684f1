// A schedule, proved while this file compiles.
#include <chevron/schedule.hpp>
#include <chevron/version.hpp>

#include <cstdio>

constexpr auto plan = chevron::checked<chevron::catalogue::zb_v, chevron::shape{.ranks = 2, .micro_batches = 4}>;

int main() { std::printf("chevron %s: %d stages on %d ranks\n", chevron::version, plan.view().stages, plan.view().size.ranks); }
