#pragma once

#include <cstdint>

#include <chevron/plan/footprint.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/memory.hpp>

/// \file
/// What a plan takes of its ranks' memory, in bytes: what is always there, and what is in flight at the worst moment.

namespace chevron {

/// Bytes that a rank's stages take all the time.
constexpr std::int64_t static_bytes(plan_view const& plan, footprint_view const& of, int rank) {
  std::int64_t sum = 0;
  for (int s = 0; s < plan.stages; ++s) sum += plan.rank_of[s] == rank ? of.fixed[s] : 0;
  return sum;
}

/// Bytes that a rank holds while its actions run one after the other. A recomputed stage holds its input from F on, all
/// activations while its B or I runs, or from its R on, and what W needs from then on.
class running_memory {
 public:
  /// \param from bytes that the rank holds before its first action
  constexpr running_memory(footprint_view const& of, std::int64_t from, bool forward_only)
      : of_(of), now_(from), most_(from), forward_only_(forward_only) {}

  /// \param by_action an R runs the action's chunk forward again
  constexpr void run(action a, bool by_action = false) {
    kind const what = a.kind;
    int const s = static_cast<int>(a.stage);
    bool const gives_back = makes_input_gradient(what);
    std::int64_t const left = by_action ? of_.input[s] : of_.after_forward(s);
    if (what == kind::forward) now_ += left;
    if (what == kind::recompute || (gives_back && !by_action)) now_ += of_.activation[s] - left;
    most_ = now_ > most_ ? now_ : most_;
    if (forward_only_) now_ -= of_.after_forward(s);
    if (gives_back) now_ -= of_.activation[s] - (what == kind::backward ? 0 : of_.kept[s]);
    if (what == kind::backward_weight) now_ -= of_.kept[s];
  }
  /// The most bytes held so far.
  constexpr std::int64_t most() const { return most_; }

 private:
  footprint_view of_;
  std::int64_t now_, most_;
  bool forward_only_;
};

/// The most bytes that a rank holds at any time. Where nothing is recomputed and W needs all that F left, it is `static_bytes`
/// and `peak_bytes`.
constexpr std::int64_t peak_memory(plan_view const& plan, footprint_view const& of, int rank) {
  recomputed_chunks const again(plan, rank);
  running_memory held(of, static_bytes(plan, of, rank), plan.forward_only);
  for (int i = plan.begin[rank]; i < plan.begin[rank + 1]; ++i) held.run(plan.actions[i], again.hold(plan.actions[i]));
  return held.most();
}

}  // namespace chevron
