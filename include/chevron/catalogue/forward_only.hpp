#pragma once

#include <chevron/describe/expand.hpp>

namespace chevron::catalogue {
namespace spelled_forward_only {
using namespace letters;

/// Forwards only, for evaluation (PyTorch's _ScheduleForwardOnly): makespan M·T_F + (P-1)(T_F + c), if a message takes c. It
/// keeps no activations and cannot train. `forward_part` makes such a plan of any training schedule, with that schedule's
/// placement.
inline constexpr auto forward_only = schedule(placement::linear, steady(F)).evaluation().named("ForwardOnly");

}  // namespace spelled_forward_only
using spelled_forward_only::forward_only;
}  // namespace chevron::catalogue
