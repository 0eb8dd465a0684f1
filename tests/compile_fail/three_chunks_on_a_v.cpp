// A V gives every rank exactly two chunks.
// expect: invalid_schedule<chevron::law::shape, -1, -1, .*"with this placement chunks can be 2, not 3"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;

#ifdef LEGAL
constexpr auto const& made = checked<catalogue::zb_v, shape{.ranks = 4, .micro_batches = 8, .chunks = 2}>;
#else
constexpr auto const& made = checked<catalogue::zb_v, shape{.ranks = 4, .micro_batches = 8, .chunks = 3}>;
#endif
