// A step of no microbatches.
// expect: invalid_schedule<chevron::law::shape, -1, -1, .*"micro_batches must be at least 1, not 0"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;

#ifdef LEGAL
constexpr auto const& made = checked<catalogue::zb_h1, shape{.ranks = 4, .micro_batches = 1}>;
#else
constexpr auto const& made = checked<catalogue::zb_h1, shape{.ranks = 4, .micro_batches = 0}>;
#endif
