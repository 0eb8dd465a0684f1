// A pipeline of no ranks.
// expect: invalid_schedule<chevron::law::shape, -1, -1, .*"ranks must be at least 1, not 0"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;

#ifdef LEGAL
constexpr auto const& made = checked<catalogue::one_f_one_b, shape{.ranks = 1, .micro_batches = 8}>;
#else
constexpr auto const& made = checked<catalogue::one_f_one_b, shape{.ranks = 0, .micro_batches = 8}>;
#endif
