#pragma once

#include <chevron/describe/limits.hpp>
#include <chevron/describe/order.hpp>
#include <chevron/describe/phase.hpp>
#include <chevron/plan/placement.hpp>

/// \file
/// A schedule: a placement of stages, the order in which plain tokens draw, phases of kinds. Three choices that do not know
/// of each other.

namespace chevron {

/// A schedule, described but not yet sized. Make one with `schedule(placement, phases)`.
///
/// ```cpp
/// using namespace chevron::letters;
/// inline constexpr auto one_f_one_b = chevron::schedule(chevron::placement::linear,
///     chevron::warmup(F * (ranks - 1 - rank)) | chevron::steady(F, B) | chevron::cooldown(B));
/// ```
template <class Placement, class Order, class Phases, class Limits = declared_limits<>, class AtLeast = undeclared>
struct description {
  Placement where;
  Order order;
  Phases how;
  Limits limits;
  AtLeast at_least;
  char const* name;
  bool forward_only;

  /// The name that pictures, reports and traces show.
  constexpr description named(char const* as) const { return {where, order, how, limits, at_least, as, forward_only}; }

  /// Declares the most chunks in flight on any rank; a plan above this limit does not pass the gate.
  template <expression::operand Count>
  constexpr auto at_most_in_flight(Count most) const {
    return limited(limits.with_in_flight(expression::as_node(most)));
  }
  /// Declares the most messages a step may send, over all ranks.
  template <expression::operand Count>
  constexpr auto at_most_messages(Count most) const {
    return limited(limits.with_messages(expression::as_node(most)));
  }
  /// Declares the most bytes in flight on any rank, for stages of the sizes `of` for each microbatch in flight:
  /// `sizes{.activation = …}` for all alike, or `stage_sizes<N>`.
  template <declarable_sizes Sizes>
  constexpr auto at_most_bytes_in_flight(std::int64_t most, Sizes const& of) const {
    return limited(limits.with_bytes(most, of));
  }

  /// Works the phases out for at least this many microbatches and leaves the surplus out: for patterns that only fit
  /// together once the pipeline is full.
  template <expression::operand Count>
  constexpr auto expand_for_at_least(Count fewest) const {
    using node = expression::node_of<Count>;
    return description<Placement, Order, Phases, Limits, node>{where, order, how, limits, expression::as_node(fewest), name,
                                                               forward_only};
  }

  /// A schedule of forwards alone, for evaluation: no gradients are asked for.
  constexpr description evaluation() const { return {where, order, how, limits, at_least, name, true}; }

  template <class NewLimits>
  constexpr description<Placement, Order, Phases, NewLimits, AtLeast> limited(NewLimits const& to) const {
    return {where, order, how, to, at_least, name, forward_only};
  }
};

template <class Value>
inline constexpr bool is_description = false;
template <class... Parts>
inline constexpr bool is_description<description<Parts...>> = true;

/// Describes a schedule, of which `checked<>`, `lowered<>` and `expand` make a plan at a shape.
/// \param where placement of stages on ranks: `placement::linear`, `loop`, `vee`, `wave<n>`, `of({…})`, `mapped(count, map)`
/// \param order how plain tokens draw chunks and microbatches: `depth_first(group)` (of ranks, if left out), `breadth_first`
/// \param how phases, `warmup(…) | steady(…) | cooldown(…)`, each of which may be left out or stand several times
template <placement_policy Placement, forward_order Order, phase_kind Last, class... Phases>
constexpr auto schedule(Placement where, Order order, phases<Last, Phases...> how) {
  return description<Placement, Order, phases<Last, Phases...>>{where, order, how, {}, {}, "", false};
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
