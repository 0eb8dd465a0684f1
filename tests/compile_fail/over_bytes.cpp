// A memory limit in bytes below the bytes that the warm-up keeps.
// expect: invalid_schedule<chevron::law::bytes, 0, 3, .*"rank 0, step 3: 0F3 makes 4096 bytes in flight, the declared limit is 4095"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B))
    .at_most_bytes_in_flight(4096, sizes{.activation = 1024});
#else
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B))
    .at_most_bytes_in_flight(4095, sizes{.activation = 1024});
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
