#include "support/plan_claims.hpp"

using namespace chevron;
using namespace chevron::tests;

// The program laws while compiling: channels matched in order, slots, no deadlock with rendezvous sends. The whole grid is
// walked at run time (tests/unit/lower/lower_test.cpp); here each schedule at a small, an odd and a larger shape.
template <auto const& Schedule, shape Size>
constexpr bool program_is_lawful() {
  return check(lowered<Schedule, Size>.view()).broken == law::none;
}
template <auto const& Schedule>
constexpr bool programs_are_lawful() {
  return program_is_lawful<Schedule, shape{1, 3}>() && program_is_lawful<Schedule, shape{4, 5}>() &&
         program_is_lawful<Schedule, shape{8, 16}>();
}
static_assert(programs_are_lawful<catalogue::gpipe>());
static_assert(programs_are_lawful<catalogue::one_f_one_b>());
static_assert(programs_are_lawful<catalogue::interleaved_1f1b>());
static_assert(programs_are_lawful<catalogue::zb_h1>());
static_assert(programs_are_lawful<catalogue::zb_v>());

// Slots are as static as the program: 1F1B keeps as many activations as its peak in flight.
constexpr auto program_of_1f1b = lowered<catalogue::one_f_one_b, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(program_of_1f1b.view().slots[0].activation == 4 && program_of_1f1b.view().slots[3].activation == 1);
