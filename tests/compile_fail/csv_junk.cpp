// A schedule from a file, embedded and proved: text after an action is not silently dropped.
// expect: invalid_schedule<chevron::law::description, -1, -1, .*"line 2, column 1: .{1,2}1F0x.{1,2} goes on after its microbatch: wanted is a comma or the end of the line there"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/csv.hpp>
#include <chevron/schedule.hpp>

using namespace chevron;

#ifdef LEGAL
inline constexpr auto mine = from_csv("0F0,0B0\n1F0,1B0\n");
#else
inline constexpr auto mine = from_csv("0F0,0B0\n1F0x,1B0\n");
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 2, .micro_batches = 1}>;
