#pragma once

#include <chevron/plan/buffer.hpp>

/// \file
/// What activations weigh: how much each action of a stage takes or gives back, and how much a rank has. The unit is the caller's
/// (chunks, bytes, bytes of one layer …), the same throughout.

namespace chevron::search {

/// A memory model seen by a search: one entry a stage, or one for all (`stride` 0). What F takes, I and W give back: the
/// three add up to 0.
struct memory_view {
  double const* forward = nullptr;
  double const* backward_input = nullptr;
  double const* backward_weight = nullptr;
  double const* limit = nullptr;  ///< what a rank has, by rank or one for all as above; 0: no limit
  int stride = 0;

  /// The limit of a rank that is not without one.
  constexpr bool limited(int rank) const { return limit[rank * stride] > 0; }
};

/// The same model for every stage.
struct memory_model {
  double forward = 1;           ///< what F of a microbatch takes
  double backward_input = 0;    ///< its I: 0 or below, since it gives back
  double backward_weight = -1;  ///< its W
  double limit = 0;             ///< what a rank has; 0: no limit

  constexpr memory_view view() const { return {&forward, &backward_input, &backward_weight, &limit, 0}; }
  constexpr operator memory_view() const { return view(); }
};

/// A model per stage of a pipeline with one stage a rank.
template <int Stages>
struct stage_memory {
  double forward[array_size(Stages)]{};
  double backward_input[array_size(Stages)]{};
  double backward_weight[array_size(Stages)]{};
  double limit[array_size(Stages)]{};

  constexpr memory_view view() const { return {forward, backward_input, backward_weight, limit, 1}; }
  constexpr operator memory_view() const { return view(); }
};

/// Counts chunks from F until W, as `peak_in_flight` does; `most` 0: no limit.
constexpr memory_model chunks_in_flight(int most) { return {1, 0, -1, static_cast<double>(most)}; }

/// A transformer layer in fp16 (Qi et al., arXiv 2401.10241, table 1): bytes per token of one layer, F taking 34h + 5as, of which
/// I gives back all but the 32h that W needs. The limit is `pending` times what F takes: P for ZB-1p, 2P for ZB-2p.
constexpr memory_model transformer_layer(int hidden, int heads, int sequence, int pending) {
  double const forward = 34.0 * hidden + 5.0 * heads * sequence;
  double const weight = -32.0 * hidden;
  return {forward, -forward - weight, weight, pending * forward};
}

}  // namespace chevron::search
