// The phases of 1F1B with the cool-down in front.
// expect: phase_after<chevron::phase_kind::cooldown, chevron::phase_kind::steady>
// expect: static assertion failed.*phases read warmup \| steady \| cooldown, left to right
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B));
#else
constexpr auto mine = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | cooldown(B) | steady(F, B));
#endif
