#pragma once

#include <chevron/describe/limits.hpp>
#include <chevron/describe/order.hpp>
#include <chevron/describe/phase.hpp>
#include <chevron/plan/placement.hpp>

/// \file
/// A schedule as three independent choices: a placement of stages, an order (which chunk and microbatch a token without a chunk
/// takes next), and phases of kinds.

namespace chevron {

/// A schedule for any size. Created by `schedule(placement, phases)`.
template <class Placement, class Order, class Phases, class Limits = declared_limits<>, class AtLeast = undeclared>
struct description : declares_limits<description<Placement, Order, Phases, Limits, AtLeast>> {
  Placement where;
  Order order;
  Phases how;
  Limits limits;
  AtLeast at_least;
  char const* name;
  bool forward_only;

  /// The same description with the name `as`, which pictures, reports and traces show.
  constexpr description named(char const* as) const { return {{}, where, order, how, limits, at_least, as, forward_only}; }

  /// The same description with phases that are played for at least `fewest` microbatches; actions of microbatches that the
  /// shape does not have are left out. For patterns that end correctly only after the pipeline was full.
  template <expression::operand Count>
  constexpr auto expand_for_at_least(Count fewest) const {
    using node = expression::node_of<Count>;
    return description<Placement, Order, Phases, Limits, node>{{},   where,       order, how, limits, expression::as_node(fewest),
                                                               name, forward_only};
  }

  /// The same description for plans of forwards only, for evaluation: `check` requires no gradients.
  constexpr description evaluation() const { return {{}, where, order, how, limits, at_least, name, true}; }

  template <class NewLimits>
  constexpr description<Placement, Order, Phases, NewLimits, AtLeast> limited(NewLimits const& to) const {
    return {{}, where, order, how, to, at_least, name, forward_only};
  }
};

/// Describes a schedule, from which `checked<>` and `expand` make a plan at a shape and `lowered<>` a program.
/// \param where placement of stages on ranks: `placement::linear`, `loop`, `vee`, `wave<n>`, `of({…})`, `mapped(count, map)`
/// \param order which chunk and microbatch a token without a chunk takes next: `depth_first(group)` (default:
/// `depth_first(ranks)`), `breadth_first`
/// \param how phases, `warmup(…) | steady(…) | cooldown(…)`, each of which may be missing or occur several times
template <placement_policy Placement, forward_order Order, phase_kind Last, class... Phases>
constexpr auto schedule(Placement where, Order order, phases<Last, Phases...> how) {
  return description<Placement, Order, phases<Last, Phases...>>{{}, where, order, how, {}, {}, "", false};
}
template <placement_policy Placement, phase_kind Last, class... Phases>
constexpr auto schedule(Placement where, phases<Last, Phases...> how) {
  return schedule(where, depth_first(terms::ranks), how);
}
template <placement_policy Placement, forward_order Order, phase_kind Role, class... Items>
constexpr auto schedule(Placement where, Order order, phase<Role, Items...> how) {
  return schedule(where, order, as_phases(how));
}
template <placement_policy Placement, phase_kind Role, class... Items>
constexpr auto schedule(Placement where, phase<Role, Items...> how) {
  return schedule(where, as_phases(how));
}

}  // namespace chevron
