// A file for PyTorch's FSDP, in which a backward runs after its stage's parameters are freed: PyTorch stops there in its first
// step; here it does not compile.
// expect: invalid_schedule<chevron::law::resident, 0, -1, .*"line 1, column 23: rank 0: 0B0 runs while its stage is not gathered. Remedy: before it, best one computation earlier, 0UNSHARD
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/csv.hpp>
#include <chevron/schedule.hpp>

using namespace chevron;

#ifdef LEGAL
inline constexpr auto mine = from_csv("0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0RESHARD\n");
#else
inline constexpr auto mine = from_csv("0UNSHARD,0F0,0RESHARD,0B0\n");
#endif
constexpr auto proved = checked<mine, shape{.ranks = 1, .micro_batches = 1}>;
