#include "support/plan_claims.hpp"

using namespace chevron;
using namespace chevron::letters;
using namespace chevron::tests;

// Schedules found by list scheduling under a limit. They keep all laws, the declared limit included.
inline constexpr auto on_a_v =
    schedule_of(work_graph::split_backward).place(placement::vee).prefer(I, F, W).at_most_in_flight(2 * ranks).named("listed V");
inline constexpr auto half_memory = on_a_v.at_most_in_flight(ranks + 2);
inline constexpr auto in_a_line = schedule_of(work_graph::split_backward).prefer(I, F, W).at_most_in_flight(2 * ranks - 1);
inline constexpr auto whole = schedule_of(work_graph::full_backward).prefer(B, F).at_most_in_flight(ranks);
inline constexpr auto looped =
    schedule_of(work_graph::split_backward).place(placement::loop).prefer(I, F, W).at_most_in_flight(3 * ranks);

template <class Listing>
constexpr bool lawful_up_to(Listing const& one, int most_ranks, int most_micro_batches) {
  for (int p = 1; p <= most_ranks; ++p) {
    for (int m = 1; m <= most_micro_batches; ++m) {
      if (check(expand(one, shape{p, m})).broken != law::none) return false;
    }
  }
  return true;
}
static_assert(lawful_up_to(on_a_v, 4, 10) && lawful_up_to(half_memory, 4, 10));
static_assert(lawful_up_to(in_a_line, 4, 10) && lawful_up_to(whole, 4, 10) && lawful_up_to(looped, 3, 8));

// Through the gate, and as good as the published schedule of the same kind at equal costs: ZB-V's makespan on a V with ZB-V's
// memory, ZB-H2's makespan and span in a line with ZB-H2's memory, 1F1B's makespan with 1F1B's memory.
constexpr shape reference{.ranks = 4, .micro_batches = 8};
static_assert(makespan(checked<on_a_v, reference>, equal_costs) == makespan(checked<catalogue::zb_v, reference>, equal_costs));
static_assert(peak_in_flight(checked<on_a_v, reference>) == 8);
static_assert(makespan(checked<in_a_line, reference>, equal_costs) == 27 &&
              span(checked<in_a_line, reference>, equal_costs) == 24);
static_assert(makespan(checked<whole, reference>, equal_costs) == 33 && peak_in_flight(checked<whole, reference>) == 4);

// Less memory costs time, and only as much as is declared is used.
static_assert(peak_in_flight(checked<half_memory, reference>) == 6);
static_assert(makespan(checked<half_memory, reference>, equal_costs) == 57);

// A program as any other.
static_assert(check(lowered<on_a_v, reference>.view()).broken == law::none);
