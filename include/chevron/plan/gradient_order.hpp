#pragma once

#include <chevron/plan/plan.hpp>

/// \file
/// The order in which a plan sums the gradients of microbatches. A floating-point sum depends on the order of its terms, and a
/// schedule influences nothing else of it: two plans with equal orders compute equal bits.

namespace chevron {

/// Whether both plans run the W's (or B's) of each stage in the same order of microbatches. False for plans of different sizes.
constexpr bool same_gradient_order(plan_view const& a, plan_view const& b) {
  if (a.stages != b.stages || a.size.units() != b.size.units()) return false;
  int const cells = a.stages * a.size.units();
  buffer<int> order[2] = {buffer<int>(cells, zeroed), buffer<int>(cells, zeroed)};
  plan_view const* const plans[2] = {&a, &b};
  for (int k = 0; k < 2; ++k) {
    buffer<int> next(a.stages, zeroed);
    for (int i = 0; i < plans[k]->total(); ++i) {
      action const one = plans[k]->actions[i];
      if (one.kind != kind::backward && one.kind != kind::backward_weight) continue;
      int const stage = static_cast<int>(one.stage);
      order[k].data[stage * a.size.units() + next.data[stage]++] = static_cast<int>(one.micro_batch) + 1;
    }
  }
  for (int i = 0; i < cells; ++i) {
    if (order[0].data[i] != order[1].data[i]) return false;
  }
  return true;
}

/// Renumbers a plan's actions so that each stage runs each kind in ascending order of microbatches; the kind and stage at each
/// position of a list are unchanged. The slices of a microbatch ascend too, but descend for B or I. The result of a lawful plan
/// is lawful and has as many chunks in flight. If microbatches are of equal length, the result takes no longer: if for every
/// microbatch the actions of two stages are a minimum time apart, so are, for every k, the k-th actions of the two stages. If
/// each stage has only B's or only I's and W's, any two resulting plans sum gradients in the same order.
constexpr plan in_ascending_order(plan_view const& from) {
  plan to = copy_of(from);
  int const micro_batches = from.size.units();
  buffer<int> forwards(from.stages, zeroed), backwards(from.stages, zeroed), weights(from.stages, zeroed);
  buffer<int> split(from.stages, zeroed);             // number of I's so far
  buffer<int> of_split(from.stages * micro_batches);  // by stage: the microbatches of its I's
  for (int i = 0; i < from.total(); ++i) {
    action& one = to.actions.data[i];
    int const stage = static_cast<int>(one.stage);
    int const number = one.kind == kind::forward           ? forwards.data[stage]++
                       : one.kind == kind::backward_weight ? of_split.data[stage * micro_batches + weights.data[stage]++]
                                                           : mirrored(backwards.data[stage]++, from.size.slices);
    if (leaves_weight(one.kind)) of_split.data[stage * micro_batches + split.data[stage]++] = number;
    one.micro_batch = make_action(one.kind, stage, number).micro_batch;
  }
  return to;
}

}  // namespace chevron
