#pragma once

#include <cstdint>
#include <type_traits>

#include <chevron/plan/finding.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/memory.hpp>

/// \file
/// The limits that a plan declares, as laws.

namespace chevron::detail {

/// A program numbers its slots in 16 bits and needs at most three for each chunk in flight.
inline constexpr int most_in_flight = 0xffff / 3;

constexpr finding check_in_flight(plan_view const& plan) {
  bool const declared = plan.in_flight_limit > 0 && plan.in_flight_limit < most_in_flight;
  int const limit = declared ? plan.in_flight_limit : most_in_flight;
  for (int r = 0; r < plan.size.ranks; ++r) {
    if (plan.length(r) / 2 <= limit) continue;  // no more forwards than that, since each has its backward
    int now = 0;
    for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
      now += in_flight_change(plan.actions[i].kind, plan.forward_only);
      if (now <= limit) continue;
      finding f;
      f.broken = law::in_flight;
      f.rank = r;
      f.position = i - plan.begin[r];
      f.what = plan.actions[i];
      f.number = now;
      f.limit = limit;
      f.words = declared ? "the declared limit is " : "the most that a program has slots for is ";
      return f;
    }
  }
  return {};
}

/// Never more bytes in flight on a rank than declared. A plan that declares no sizes has no such limit.
constexpr finding check_bytes(plan_view const& plan) {
  if (plan.byte_limit <= 0) return {};
  // Not asked while compiling: under -fsanitize=undefined GCC takes no address beside nullptr for a constant.
  if (!std::is_constant_evaluated() && plan.stage_bytes == nullptr) return {};
  for (int s = 0; s < plan.stages; ++s) {
    if (plan.stage_bytes[s] >= 0) continue;
    finding f;
    f.broken = law::description;
    f.words = "a stage declares a negative size, stage ";
    f.number = s;
    return f;
  }
  size_view const sizes{plan.stage_bytes, nullptr, 1, plan.input_bytes, 1};
  for (int r = 0; r < plan.size.ranks; ++r) {
    recomputed_chunks const again(plan, r);
    std::int64_t now = 0;
    for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
      action const a = plan.actions[i];
      now += bytes_change(plan, sizes, again, a);
      if (now <= plan.byte_limit) continue;
      finding f;
      f.broken = law::bytes;
      f.rank = r;
      f.position = i - plan.begin[r];
      f.what = a;
      f.number = now;
      f.limit = plan.byte_limit;
      return f;
    }
  }
  return {};
}

/// No more messages in a step than declared.
constexpr finding check_message_count(plan_view const& plan) {
  if (plan.message_limit <= 0) return {};
  finding f;
  f.number = messages(plan);
  if (f.number <= plan.message_limit) return {};
  f.broken = law::messages;
  f.limit = plan.message_limit;
  return f;
}

}  // namespace chevron::detail
