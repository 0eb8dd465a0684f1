// A table has one shape.
// expect: invalid_schedule<chevron::law::shape, -1, -1, .*"with this table micro_batches can be 2, not 4"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

inline constexpr auto mine = table(row(F(0, 0), F(0, 1), B(0, 0), B(0, 1)), row(F(1, 0), B(1, 0), F(1, 1), B(1, 1)));
#ifdef LEGAL
constexpr auto const& plan_of_mine = checked<mine, mine.size()>;
#else
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 2, .micro_batches = 4}>;
#endif
