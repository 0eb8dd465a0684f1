#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::eager_1f1b;
using catalogue::one_f_one_b;

LAW(eager_1f1b, lawful);

// 1F1B's makespan without communication, for any M, with min(M, 2(P-r)-1) chunks in flight on rank r.
LAW(eager_1f1b, [](plan_view const& plan) {
  return makespans_are(plan,
                       [&](costs const& c) {
                         return ideal(plan, c) + (plan.size.ranks - 1) * (c.forward + c.backward_input + c.backward_weight);
                       }) &&
         peaks_are(plan, [&](int rank) { return smaller_of(plan.size.micro_batches, 2 * (plan.size.ranks - rank) - 1); });
});

// With communication c a message, 2c at most T_F + T_B: only the first trip down and up is seen. 1F1B sees 2c more for every
// P-1 of P further microbatches, whatever c is.
inline constexpr costs slight{1, 1, 1, 0.5};
inline constexpr costs half{2, 0.5, 0.5, 1};
inline constexpr costs longest{1, 1, 1, 1.5};
inline constexpr costs too_long{1, 1, 1, 4};

constexpr double first_trip(plan_view const& plan, costs const& c) {
  return ideal(plan, c) + (plan.size.ranks - 1) * (c.forward + c.backward_input + c.backward_weight + 2 * c.communication);
}
LAW(eager_1f1b, [](plan_view const& plan) {
  return makespan(plan, slight) == first_trip(plan, slight) && makespan(plan, half) == first_trip(plan, half) &&
         makespan(plan, longest) == first_trip(plan, longest);
});
constexpr double late_again(plan_view const& plan, costs const& c) {
  int const p = plan.size.ranks;
  return first_trip(plan, c) + 2 * c.communication * ((plan.size.micro_batches - 1) * (p - 1) / p);
}
LAW(one_f_one_b, [](plan_view const& plan) {
  return makespan(plan, slight) == late_again(plan, slight) && makespan(plan, half) == late_again(plan, half) &&
         makespan(plan, too_long) == late_again(plan, too_long);
});

// With communication it is never slower than 1F1B, faster from three microbatches on; also where not all of it can be hidden.
LAW(eager_1f1b, [](plan_view const& plan) {
  double const eager = makespan(plan, too_long), lazy = late_again(plan, too_long);
  return plan.size.ranks > 1 && plan.size.micro_batches > 2 ? eager < lazy : eager == lazy;
});

constexpr auto reference = checked<eager_1f1b, shape{.ranks = 4, .micro_batches = 8}>;
static_assert(makespan(reference, equal_costs) == 33 && makespan(reference, costs{1, 1, 1, 1}) == 39 &&
              makespan(checked<one_f_one_b, shape{.ranks = 4, .micro_batches = 8}>, costs{1, 1, 1, 1}) == 49);
static_assert(peak_in_flight(reference, 0) == 7 && peak_in_flight(reference, 1) == 5 && peak_in_flight(reference, 2) == 3 &&
              peak_in_flight(reference, 3) == 1);
