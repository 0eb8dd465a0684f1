#pragma once

#include <concepts>
#include <cstdint>
#include <iterator>

#include <chevron/describe/expression.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/sizes.hpp>

/// \file
/// Limits that a schedule declares, and that `check` enforces.

namespace chevron {

/// The default for a limit that a schedule does not declare.
struct undeclared : expression::node {
  constexpr int operator()(rank_parameters const&) const { return 0; }
};

namespace detail {

inline constexpr int any_stages = 0;
/// The number of stages for which a type declares sizes; `any_stages`: one size for all stages.
template <class Sizes>
inline constexpr int stages_sized = any_stages;
template <int Stages>
inline constexpr int stages_sized<stage_sizes<Stages>> = Stages;

}  // namespace detail

/// Declares a limit of a plan: at most `most` bytes of activations on any rank. `of` contains the bytes of each stage for one
/// microbatch in flight, or one entry for all stages. For plans that are known only at run time, such as plans read from files;
/// descriptions declare this limit by `at_most_bytes_in_flight`. \returns a finding if `most` is below 1
template <class Plan>
constexpr finding declare_bytes(Plan& p, std::int64_t most, size_view of) {
  if (most < 1) return detail::fault(law::description, "a limit of bytes in flight must be at least 1, not ", most);
  p.byte_limit = most;
  if constexpr (std::same_as<Plan, plan>) p.stage_bytes = p.input_bytes = buffer<std::int64_t>(p.stages, 0);
  for (int s = 0; s < p.stages; ++s) {
    std::begin(p.stage_bytes)[s] = of.activation_of(s);
    std::begin(p.input_bytes)[s] = of.input_of(s);
  }
  return {};
}

/// The limits of a schedule: rank expressions for chunks in flight and for messages, and bytes if stages declare sizes.
template <class InFlight = undeclared, class Messages = undeclared, class Sizes = undeclared>
struct declared_limits {
  InFlight in_flight{};
  Messages messages{};
  std::int64_t bytes = 0;
  Sizes sizes{};

  template <class Count>
  constexpr declared_limits<Count, Messages, Sizes> with_in_flight(Count most) const {
    return {most, messages, bytes, sizes};
  }
  template <class Count>
  constexpr declared_limits<InFlight, Count, Sizes> with_messages(Count most) const {
    return {in_flight, most, bytes, sizes};
  }
  template <class StageSizes>
  constexpr declared_limits<InFlight, Messages, StageSizes> with_bytes(std::int64_t most, StageSizes const& of) const {
    return {in_flight, messages, most, of};
  }

  /// Writes the limits into a plan whose number of stages is set. \returns a finding for a limit below 1, or for sizes of a
  /// wrong number of stages
  template <class Plan>
  constexpr finding declare(Plan& p, rank_parameters const& anywhere) const {
    if constexpr (!std::same_as<InFlight, undeclared>) {
      p.in_flight_limit = in_flight(anywhere);
      if (p.in_flight_limit < 1)
        return detail::fault(law::description, "a limit of chunks in flight must be at least 1, not ", p.in_flight_limit);
    }
    if constexpr (!std::same_as<Messages, undeclared>) {
      p.message_limit = messages(anywhere);
      if (p.message_limit < 1)
        return detail::fault(law::description, "a limit of messages must be at least 1, not ", p.message_limit);
    }
    if constexpr (!std::same_as<Sizes, undeclared>) {
      constexpr int sized = detail::stages_sized<Sizes>;
      if (sized != detail::any_stages && sized != p.stages)
        return detail::fault(law::description, "sizes must be declared for each stage, and the stages are ", p.stages, sized);
      return declare_bytes(p, bytes, sizes);
    }
    return {};
  }
};

/// Sizes that a description can declare: `sizes` for all stages, or `stage_sizes<N>`.
template <class Sizes>
concept declarable_sizes = std::convertible_to<Sizes const&, size_view>;

/// The members by which descriptions of type `Self` declare limits, which `check` enforces. List scheduling also observes
/// limits of chunks and bytes while it makes the plan, a building block a limit of chunks above its own need.
template <class Self>
struct declares_limits {
  /// The same description with a limit of `most` chunks in flight on any rank. List scheduling needs at least as many as a rank
  /// has stages. If the limit exceeds the chunks that a building block needs in the steady state, the block's forwards run
  /// further ahead.
  template <expression::operand Count>
  constexpr auto at_most_in_flight(Count most) const {
    return self().limited(self().limits.with_in_flight(expression::as_node(most)));
  }
  /// The same description with a limit of `most` messages in a step, over all ranks.
  template <expression::operand Count>
  constexpr auto at_most_messages(Count most) const {
    return self().limited(self().limits.with_messages(expression::as_node(most)));
  }
  /// The same description with a limit of `most` bytes in flight on any rank; `of` contains a stage's bytes for each microbatch
  /// in flight: `sizes{.activation = …}` for all stages, or `stage_sizes<N>`.
  template <declarable_sizes Sizes>
  constexpr auto at_most_bytes_in_flight(std::int64_t most, Sizes const& of) const {
    return self().limited(self().limits.with_bytes(most, of));
  }

 private:
  constexpr Self const& self() const { return static_cast<Self const&>(*this); }
};

}  // namespace chevron
