#pragma once

#include <cstdint>

#include <chevron/plan/footprint.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/memory.hpp>

/// \file
/// The memory of a plan's ranks, in bytes: static memory, and the peak of activations in flight.

namespace chevron {

/// Bytes that a rank's stages take all the time.
constexpr std::int64_t static_bytes(plan_view const& plan, footprint_view const& of, int rank) {
  std::int64_t sum = 0;
  for (int s = 0; s < plan.stages; ++s) sum += plan.rank_of[s] == rank ? of.fixed[s] : 0;
  return sum;
}

/// Changes of a footprint by actions, in bytes. A recomputed stage holds its input from F on, all activations while its B or I
/// runs, or from its R on, and from then on the part that W needs.
struct footprint_changes {
  footprint_view of;
  bool forward_only = false;
  recomputed_chunks again{};

  constexpr std::int64_t operator()(action a, std::int64_t& held) const {
    int const s = static_cast<int>(a.stage);
    bool const gives_back = makes_input_gradient(a.kind), by_action = again.hold(a);
    std::int64_t const left = by_action ? of.input[s] : of.after_forward(s);
    if (makes_output(a.kind)) held += left;
    if (a.kind == kind::recompute || (gives_back && !by_action)) held += of.activation[s] - left;
    std::int64_t const most = held;
    if (forward_only) held -= of.after_forward(s);
    if (gives_back) held -= of.activation[s] - (ends_cell(a.kind) ? 0 : of.kept[s]);
    if (!gives_back && ends_cell(a.kind)) held -= of.kept[s];
    return most;
  }
};

/// The most bytes that a rank holds at any time. Where no stage is recomputed and W needs all activations of F, the sum is
/// `static_bytes` and `peak_bytes`.
constexpr std::int64_t peak_memory(plan_view const& plan, footprint_view const& of, int rank) {
  footprint_changes const changes{of, plan.forward_only, recomputed_chunks(plan)};
  return peak(plan, rank, changes, static_bytes(plan, of, rank)).most;
}

}  // namespace chevron
