#pragma once

#include <type_traits>

#include <chevron/plan/plan.hpp>
#include <chevron/prove/memory.hpp>

/// \file
/// Checks the limits that a plan declares, and the limit of a program's activation slots.

namespace chevron::detail {

/// Finds the first action with which a rank exceeds a limit. \returns a finding of the law `which`, or none
template <class Amount, class Changes>
constexpr finding above(plan_view const& plan, law which, int rank, Changes const& changes, Amount limit) {
  held_peak<Amount> const held = peak<Amount>(plan, rank, changes, {}, limit);
  if (held.most <= limit) return {};
  return {.broken = which,
          .rank = rank,
          .position = held.position,
          .what = plan.at(rank, held.position),
          .number = held.most,
          .limit = limit};
}

/// The most chunks in flight that a program has slots for: programs number slots in 16 bits and need at most three for each
/// chunk.
inline constexpr int most_in_flight = 0xffff / 3;

/// Checks that no rank has more chunks in flight than the plan declares, or than a program has slots for.
constexpr finding check_in_flight(plan_view const& plan) {
  bool const declared = plan.in_flight_limit > 0 && plan.in_flight_limit < most_in_flight;
  int const limit = declared ? plan.in_flight_limit : most_in_flight;
  for (int r = 0; r < plan.size.ranks; ++r) {
    // At most half of a rank's actions are forwards, since each has a backward.
    if (plan.length(r) / 2 <= limit) continue;
    finding f = above(plan, law::in_flight, r, chunk_changes{plan.forward_only}, limit);
    f.words = declared ? "the declared limit is " : "the most that a program has slots for is ";
    if (f) return f;
  }
  return {};
}

/// Checks that no rank has more bytes in flight than the plan declares. A plan without sizes has no such limit.
constexpr finding check_bytes(plan_view const& plan) {
  if (plan.byte_limit <= 0) return {};
  // Not checked while compiling: under -fsanitize=undefined GCC does not accept a comparison of an address with nullptr as a
  // constant.
  if (!std::is_constant_evaluated() && plan.stage_bytes == nullptr) return {};
  for (int s = 0; s < plan.stages; ++s) {
    if (plan.stage_bytes[s] < 0) return fault(law::description, "a stage declares a negative size, stage ", s);
  }
  byte_changes const changes{{plan.stage_bytes, nullptr, 1, plan.input_bytes, 1}, plan.forward_only, recomputed_chunks(plan)};
  for (int r = 0; r < plan.size.ranks; ++r) {
    if (finding const f = above(plan, law::bytes, r, changes, plan.byte_limit)) return f;
  }
  return {};
}

/// Checks that a step has no more messages than the plan declares.
constexpr finding check_message_count(plan_view const& plan) {
  int const sent = messages(plan);
  if (plan.message_limit <= 0 || sent <= plan.message_limit) return {};
  return fault(law::messages, "", sent, plan.message_limit);
}

}  // namespace chevron::detail
