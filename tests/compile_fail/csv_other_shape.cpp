// A schedule from a file has its size; another cannot be asked for.
// expect: invalid_schedule<chevron::law::shape, -1, -1, .*"asked for another number of ranks than the CSV has lines; it has 2"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/csv.hpp>
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

inline constexpr auto mine = from_csv("0F0,0B0\n1F0,1B0\n");
#ifdef LEGAL
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 2, .micro_batches = 1}>;
#else
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 1}>;
#endif
