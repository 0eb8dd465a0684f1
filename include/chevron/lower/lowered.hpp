#pragma once

#include <chevron/lower/lower.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/prove/gate.hpp>

/// \file
/// Lowers a schedule in the compiler: the program is a constant.

namespace chevron {

/// Does not compile for a schedule that is not proved; the message names the remedy.
template <plan_source Source>
constexpr proved_program lower(Source const&) {
  static_assert(!plan_source<Source>,
                "a schedule is proved at a shape before it is lowered: lower(prove(expand(schedule, shape{.ranks = 4, "
                ".micro_batches = 8}))), or while compiling lowered<schedule, shape{.ranks = 4, .micro_batches = 8}>");
  return lower(prove(plan()));
}

namespace detail {

template <auto const& Source, shape Size>
struct lowering {
  using proved = gate<Source, Size>;
  static constexpr int instructions = proved::holds ? instructions_needed(proved::result.view()) : 0;

  static constexpr static_program<proved::ranks, proved::stages, proved::actions, instructions> work_out() {
    if constexpr (!proved::holds) return {};
    static_program<proved::ranks, proved::stages, proved::actions, instructions> to;
    owned_program const from = lower_lawful(copy_of(proved::result.view()));
    if (instructions == 0) to.instructions[0] = {};
    to.source = proved::result;
    for (int i = 0; i < instructions; ++i) to.instructions[i] = from.instructions.data[i];
    for (int r = 0; r <= proved::ranks; ++r) to.begin[r] = from.begin.data[r];
    for (int r = 0; r < proved::ranks; ++r) to.slots[r] = from.slots.data[r];
    return to;
  }
  static constexpr auto result = work_out();
  static constexpr proved_program handle() { return proved_program(result.view()); }
};

}  // namespace detail

/// The program of a schedule, proved and lowered in the compiler: a handle that may be copied. Compiles only if every law
/// holds.
///
///     constexpr auto program = chevron::lowered<chevron::catalogue::zb_h1, chevron::shape{.ranks = 2, .micro_batches = 4}>;
template <auto const& Source, shape Size>
inline constexpr proved_program lowered = detail::lowering<Source, Size>::handle();

}  // namespace chevron
