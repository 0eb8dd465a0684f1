#pragma once

#include <cstdint>

#include <chevron/plan/footprint.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/memory.hpp>

/// \file
/// The memory of a plan's ranks, in bytes: static memory, and the peak of activations in flight.

namespace chevron {

/// Bytes of a rank's stages that are allocated all the time.
constexpr std::int64_t static_bytes(plan_view const& plan, footprint_view const& of, int rank) {
  std::int64_t sum = 0;
  for (int s = 0; s < plan.stages; ++s) sum += plan.rank_of[s] == rank ? of.fixed[s] : 0;
  return sum;
}

/// For `peak`: the change of a rank's bytes by each action. A recomputed stage stores its input from F on, all activations from
/// R to B or I (without R: during B or I), and then, until W, the part that W needs.
struct footprint_changes {
  footprint_view of;
  bool forward_only = false;
  recomputed_chunks again{};
  length_view slices{};  ///< if sequences are sliced: each slice's share of its microbatch's bytes

  constexpr std::int64_t operator()(action a, std::int64_t& held) const {
    int const s = static_cast<int>(a.stage);
    bool const gives_back = makes_input_gradient(a.kind), by_action = again.hold(a);
    auto const part = [&](std::int64_t whole) { return unit_bytes(a, whole, slices); };
    std::int64_t const all = part(of.activation[s]), kept = part(of.kept[s]);
    std::int64_t const left = part(by_action ? of.input[s] : of.after_forward(s));
    if (makes_output(a.kind)) held += left;
    if (a.kind == kind::recompute || (gives_back && !by_action)) held += all - left;
    std::int64_t const most = held;
    if (forward_only) held -= part(of.after_forward(s));
    if (gives_back) held -= all - (ends_cell(a.kind) ? 0 : kept);
    if (!gives_back && ends_cell(a.kind)) held -= kept;
    return most;
  }
};

/// The largest number of bytes that a rank has allocated at any time. If no stage is recomputed and W needs all activations of
/// F, the result is `static_bytes` plus `peak_bytes`.
/// \param slices for a plan with slices, the factors of its units' transfers (plan/slices.hpp)
constexpr std::int64_t peak_memory(plan_view const& plan, footprint_view const& of, int rank, length_view const& slices = {}) {
  footprint_changes const changes{of, plan.forward_only, recomputed_chunks(plan), slices};
  return peak(plan, rank, changes, static_bytes(plan, of, rank)).most;
}

}  // namespace chevron
