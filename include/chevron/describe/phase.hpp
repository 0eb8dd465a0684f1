#pragma once

#include <boost/hana/basic_tuple.hpp>
#include <boost/hana/unpack.hpp>

#include <chevron/describe/token.hpp>

/// \file
/// Phases: warm-up, steady state, cool-down, joined left to right with `|`.

namespace chevron {

enum class phase_kind : int { warmup, steady, cooldown };

/// One phase. If its only item has a count, the item runs `count` times. Otherwise the items repeat while one of the phase's
/// forward streams has an action left or, if the phase has no forward, while the stream of its first token has one left.
template <phase_kind Role, class... Items>
struct phase {
  static_assert(sizeof...(Items) > 0, "a phase needs at least one token, as in steady(F, B)");
  hana::basic_tuple<Items...> items;
};

template <phase_item... Items>
constexpr phase<phase_kind::warmup, Items...> warmup(Items... items) {
  return {hana::basic_tuple<Items...>{items...}};
}
template <phase_item... Items>
constexpr phase<phase_kind::steady, Items...> steady(Items... items) {
  return {hana::basic_tuple<Items...>{items...}};
}
template <phase_item... Items>
constexpr phase<phase_kind::cooldown, Items...> cooldown(Items... items) {
  return {hana::basic_tuple<Items...>{items...}};
}

/// Several phases in order; `Last` is the role of the last phase.
template <phase_kind Last, class... Phases>
struct phases {
  hana::basic_tuple<Phases...> list;
};

/// Instantiated for each `|`, so that the error about a wrong order names both phases.
template <phase_kind Before, phase_kind After>
struct phase_after {
  static_assert(After >= Before, "phases read warmup | steady | cooldown, left to right: move the earlier phase to the left");
  static constexpr bool value = true;
};

template <phase_kind Role, class... Items>
constexpr phases<Role, phase<Role, Items...>> as_phases(phase<Role, Items...> one) {
  return {hana::basic_tuple<phase<Role, Items...>>{one}};
}
template <phase_kind Last, class... Phases>
constexpr phases<Last, Phases...> as_phases(phases<Last, Phases...> several) {
  return several;
}

template <phase_kind Left, class... LeftItems, phase_kind Right, class... RightItems>
constexpr auto operator|(phase<Left, LeftItems...> left, phase<Right, RightItems...> right) {
  return as_phases(left) | right;
}
template <phase_kind Last, class... Before, phase_kind Role, class... Items>
constexpr phases<Role, Before..., phase<Role, Items...>> operator|(phases<Last, Before...> before, phase<Role, Items...> next) {
  static_assert(phase_after<Last, Role>::value);
  using longer = hana::basic_tuple<Before..., phase<Role, Items...>>;
  return {hana::unpack(before.list, [&](Before const&... earlier) { return longer{earlier..., next}; })};
}

}  // namespace chevron
