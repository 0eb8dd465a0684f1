// On a V the last chunk's forward must not wait behind a backward that needs it.
// expect: invalid_schedule<chevron::law::deadlock, [0-9]+, [0-9]+, .*"rank [0-9], step [0-9]+: [0-9]+[FBI][0-9]+ waits for [0-9]+[FBI][0-9]+, which is queued on rank [0-9] behind [0-9]+[FBI][0-9]+
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::vee, warmup(F(0) * micro_batches) | warmup(F(1) * micro_batches) | cooldown(B(1)) | cooldown(B(0)));
#else
inline constexpr auto mine = schedule(placement::vee, steady(F(0), B(0), F(1), B(1)));
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
