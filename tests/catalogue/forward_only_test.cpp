#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::forward_only;

// All laws; forwards and nothing else; nothing stays in flight; M·T_F + (P-1)(T_F + c).
LAW(forward_only, [](plan_view const& plan) {
  int const p = plan.size.ranks;
  int const m = plan.size.micro_batches;
  costs const slow{2, 1, 1, 3};
  return plan.forward_only && lawful(plan) && plan.total() == p * m && peak_in_flight(plan) == 0 &&
         messages(plan) == (p - 1) * m && makespan(plan, slow) == m * 2 + (p - 1) * (2 + 3);
});

// It goes by name like the others, but is not among those that train.
static_assert(catalogue::contains("forwardonly") && !catalogue::trains("ForwardOnly"));
static_assert(catalogue::contains("Hanayo") && catalogue::trains("hanayo"));
static_assert(!catalogue::contains("Forward") && !catalogue::trains(""));
static_assert(catalogue::make_plan("ForwardOnly", {4, 8}).forward_only);
constexpr bool all_train() {
  bool train = true;
  catalogue::for_each([&](auto const& one) { train = train && !expand(one, shape{2, 4}).forward_only; });
  return train;
}
static_assert(all_train());

// The program: receives and sends of activations, no gradients to sum and no optimizer.
constexpr auto lowered_three = lowered<forward_only, shape{.ranks = 3, .micro_batches = 4}>;
static_assert(check(lowered_three.view()).broken == law::none && lowered_three.view().total() == 12 + 3 * 8);
constexpr bool only_forward() {
  for (int i = 0; i < lowered_three.view().total(); ++i) {
    kind const k = lowered_three.view().instructions[i].op.kind;
    if (k != kind::forward && k != kind::send_forward && k != kind::receive_forward && k != kind::wait_send_forward) return false;
  }
  return true;
}
static_assert(only_forward());
