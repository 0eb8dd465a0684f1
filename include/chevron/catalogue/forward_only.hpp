#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_forward_only {
using namespace letters;

/// Forwards only, for evaluation (PyTorch's _ScheduleForwardOnly): makespan M·T_F + (P-1)(T_F + c), if a message takes time c.
/// The schedule stores no activations for backwards and cannot train. `forward_part` makes a plan of forwards from any training
/// schedule's plan, with the same placement.
inline constexpr auto forward_only = schedule(placement::linear, steady(F)).evaluation().named("ForwardOnly");

}  // namespace spelled_forward_only
using spelled_forward_only::forward_only;
}  // namespace chevron::catalogue
