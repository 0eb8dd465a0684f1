#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_forward_only {
using namespace letters;

/// Forwards alone, for evaluation (PyTorch's _ScheduleForwardOnly): makespan M·T_F + (P-1)(T_F + c) with communication c a
/// message. It keeps no activations and cannot train; `forward_part` makes the like of any training schedule, whose placement it
/// then shares.
inline constexpr auto forward_only = schedule(placement::linear, steady(F)).evaluation().named("ForwardOnly");

}  // namespace spelled_forward_only
using spelled_forward_only::forward_only;
}  // namespace chevron::catalogue
