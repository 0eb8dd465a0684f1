// An action in a table with a stage that no plan can have is not silently another one.
// expect: an_action_has_stage_0_to_1023_and_microbatch_0_to_65534
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline constexpr auto mine = table(row(F(0, 0), B(0, 0)));
#else
inline constexpr auto mine = table(row(F(1024, 0), B(1024, 0)));
#endif
