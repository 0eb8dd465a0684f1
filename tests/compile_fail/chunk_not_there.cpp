// A V has chunks 0 and 1 on each rank, no chunk 2.
// expect: invalid_schedule<chevron::law::description, 0, -1, .*"rank 0: a token names a chunk this rank does not have, chunk 2"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::vee, steady(F(0)) | steady(F(1)) | cooldown(B(1)) | cooldown(B(0)));
#else
inline constexpr auto mine = schedule(placement::vee, steady(F(0)) | steady(F(2)) | cooldown(B(1)) | cooldown(B(0)));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
