#pragma once

#include <cstdint>

#include <chevron/plan/footprint.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// What a plan takes of its ranks' memory, in bytes: what is always there, and what is in flight at the worst moment.

namespace chevron {

/// Bytes that a rank's stages take all the time.
constexpr std::int64_t static_bytes(plan_view const& plan, footprint_view const& of, int rank) {
  std::int64_t sum = 0;
  for (int s = 0; s < plan.stages; ++s) sum += plan.rank_of[s] == rank ? of.fixed[s] : 0;
  return sum;
}

/// The most bytes that a rank holds at any time. A recomputed stage holds its input from F on, all activations while its B or I
/// runs, and what W needs from then on. Where nothing is recomputed and W needs all that F left, it is `static_bytes` and
/// `peak_bytes`.
constexpr std::int64_t peak_memory(plan_view const& plan, footprint_view const& of, int rank) {
  std::int64_t now = static_bytes(plan, of, rank);
  std::int64_t most = now;
  for (int i = plan.begin[rank]; i < plan.begin[rank + 1]; ++i) {
    kind const what = plan.actions[i].kind;
    int const s = static_cast<int>(plan.actions[i].stage);
    bool const gives_back = what == kind::backward || what == kind::backward_input;
    if (what == kind::forward) now += of.after_forward(s);
    if (gives_back) now += of.activation[s] - of.after_forward(s);
    most = now > most ? now : most;
    if (plan.forward_only) now -= of.after_forward(s);
    if (gives_back) now -= of.activation[s] - (what == kind::backward ? 0 : of.kept[s]);
    if (what == kind::backward_weight) now -= of.kept[s];
  }
  return most;
}

}  // namespace chevron
