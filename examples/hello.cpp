// prints: makespan 33
#include <iostream>
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

inline constexpr auto mine = schedule(placement::linear,           // where: stage s on rank s
    warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B));  // how: fill the pipe, alternate, drain it

// Compiles only if no rank ever waits in vain, every gradient is computed exactly once, and memory stays as declared.
constexpr auto proved = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(peak_in_flight(proved, 0) == 4);                     // chunks whose activations rank 0 keeps at once
static_assert(makespan(proved, costs{.forward = 1, .backward_input = 1, .backward_weight = 1}) == 33);

int main() { std::cout << show::timeline_text(proved, costs{}) << '\n'; }
