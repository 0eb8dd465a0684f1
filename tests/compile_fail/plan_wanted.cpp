// A schedule has no size yet: a function of plans names the steps from a schedule to a plan.
// expect: static assertion failed.*a schedule is checked at a shape: check\(expand\(schedule, shape\{.ranks = 4, .micro_batches = 8\}\)\)
// expect: static assertion failed.*a schedule is proved at a shape: prove\(expand\(schedule, shape\{.ranks = 4, .micro_batches = 8\}\)\)
// expect: static assertion failed.*a schedule is proved at a shape before it is lowered: lower\(prove\(expand\(schedule
#include <chevron/schedule.hpp>

using namespace chevron;

#ifdef LEGAL
auto const found = check(expand(catalogue::gpipe, shape{.ranks = 4, .micro_batches = 8}));
auto const proof = prove(expand(catalogue::gpipe, shape{.ranks = 4, .micro_batches = 8}));
auto const made = lower(prove(expand(catalogue::gpipe, shape{.ranks = 4, .micro_batches = 8})));
#else
auto const found = check(catalogue::gpipe);
auto const proof = prove(catalogue::gpipe);
auto const made = lower(catalogue::gpipe);
#endif
