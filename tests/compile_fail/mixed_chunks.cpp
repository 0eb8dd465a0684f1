// Of one kind, either every token names its chunk or none does.
// expect: invalid_schedule<chevron::law::description, 0, -1, .*"rank 0: tokens with and without a chunk are mixed for one kind, at token 1"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::vee, steady(F(0)) | steady(F(1)) | cooldown(B(1)) | cooldown(B(0)));
#else
inline constexpr auto mine = schedule(placement::vee, steady(F(0)) | steady(F) | cooldown(B(1)) | cooldown(B(0)));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
