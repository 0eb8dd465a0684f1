// A table whose second row waits for an action that its first row runs too late: row and column are rank and step.
// expect: invalid_schedule<chevron::law::deadlock, 0, 1, .*"rank 0, step 1: 0B0 waits for 1B0, which is queued on rank 1 behind 1F1; 1F1 waits for 0F1, which is queued behind 0B0"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = table(row(F(0, 0), F(0, 1), B(0, 0), B(0, 1)), row(F(1, 0), F(1, 1), B(1, 0), B(1, 1)));
#else
inline constexpr auto mine = table(row(F(0, 0), B(0, 0), F(0, 1), B(0, 1)), row(F(1, 0), F(1, 1), B(1, 0), B(1, 1)));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 2, .micro_batches = 2}>;
