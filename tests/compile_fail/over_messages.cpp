// A limit of messages below the number that crosses between four ranks, both ways, eight times.
// expect: invalid_schedule<chevron::law::messages, -1, -1, .*"a step sends 48 messages, the declared limit is 47"
// expect: static assertion failed.*this schedule breaks a law
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B)).at_most_messages(48);
#else
inline constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B)).at_most_messages(47);
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
