// A fused pair with its halves the wrong way round: PyTorch's reader takes any actions in any order there.
// expect: invalid_schedule<chevron::law::description, -1, -1, .*"line 1, column 6: .{1,2}0B0.{1,2}: the first half of a fused pair must be an F, as in \(0F7;7B3\)OVERLAP_F_B
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/csv.hpp>
#include <chevron/schedule.hpp>

using namespace chevron;

#ifdef LEGAL
inline constexpr auto mine = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n");
#else
inline constexpr auto mine = from_csv("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n");
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 1, .micro_batches = 2}>;
