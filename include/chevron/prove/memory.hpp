#pragma once

#include <cstdint>
#include <limits>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/sizes.hpp>

/// \file
/// The peak memory of ranks and the messages of a step. Memory is the number of chunks in flight on a rank, where a chunk
/// counts from its F until its B or, if the backward is split, its W. If stages declare sizes, memory and messages are counted
/// in bytes, too. A chunk with an R counts only its inputs' bytes from F to R.

namespace chevron {

/// The largest amount (of chunks or bytes) that a rank holds at any time, and the action that first reaches it.
template <class Amount>
struct held_peak {
  Amount most{};
  int position = -1;  ///< index of the action in the rank's list; -1: the amount before the first action is the largest
};

/// Returns the largest amount that a rank holds while its list runs. Stops at the first amount above `enough`.
/// \param changes changes(action, held): updates the rank's amount `held`, and returns the largest amount during the action
/// \param held    the rank's amount before its first action
/// \param enough the largest amount that the caller accepts
template <class Amount, class Changes>
constexpr held_peak<Amount> peak(plan_view const& plan, int rank, Changes const& changes, Amount held = {},
                                 Amount enough = std::numeric_limits<Amount>::max()) {
  Amount most = held;
  int const first = plan.begin[rank];
  int const stop = plan.begin[rank + 1];
  action const* const actions = plan.actions;
  int at = first - 1;
  for (int i = first; i < stop; ++i) {
    Amount const now = changes(actions[i], held);
    if (now <= most) continue;
    most = now;
    at = i;
    if (now > enough) break;
  }
  return {most, at - first};
}
/// Returns the largest amount on any rank of a plan. \param changes changes(action, held), as for one rank
template <class Amount, class Changes>
constexpr Amount peak(plan_view const& plan, Changes const& changes) {
  Amount most{};
  for (int r = 0; r < plan.size.ranks; ++r) {
    Amount const one = peak<Amount>(plan, r, changes).most;
    most = one > most ? one : most;
  }
  return most;
}

/// The set of chunks that an R recomputes: from F to R a rank stores only the inputs of such a chunk.
class recomputed_chunks {
 public:
  constexpr recomputed_chunks() = default;  ///< no chunks
  /// The chunks for which a plan has an R.
  constexpr explicit recomputed_chunks(plan_view const& plan)
      : micro_batches_(plan.size.units()), is_(plan.holds(kind::recompute) ? plan.stages * micro_batches_ : 0, zeroed) {
    for (int i = 0; i < plan.total() && is_.count > 0; ++i) {
      if (plan.actions[i].kind == kind::recompute) is_.data[cell_of(plan.actions[i])] = true;
    }
  }
  /// Whether an action's chunk is recomputed.
  constexpr bool hold(action a) const { return is_.count > 0 && is_.data[cell_of(a)]; }

 private:
  constexpr int cell_of(action a) const { return static_cast<int>(a.stage) * micro_batches_ + static_cast<int>(a.micro_batch); }

  int micro_batches_ = 0;
  buffer<bool> is_;  // by (stage, microbatch); empty: none
};

/// For `peak`: the change of a rank's number of chunks in flight by each action. A chunk is one stage's activations for one
/// microbatch.
struct chunk_changes {
  bool forward_only = false;
  /// Adds the action's change to `held`, and returns the sum.
  constexpr int operator()(action const& a, int& held) const { return held += in_flight_change(a.kind, forward_only); }
};
/// For `peak`: the change of a rank's chunks in flight by each action, where a slice counts as its share of its microbatch's
/// tokens.
struct share_changes {
  length_view lengths;
  bool forward_only = false;
  /// Adds the action's change to `held`, and returns the sum.
  constexpr double operator()(action const& a, double& held) const {
    return held += in_flight_change(a.kind, forward_only) * lengths.of_transfer(static_cast<int>(a.micro_batch));
  }
};

/// Returns the factors of a plan's slices, whose transfer factors, proportional to tokens, are the slices' shares of a
/// microbatch's memory. No factors if microbatches are not sliced.
constexpr length_view slice_factors(plan_view const& plan, cost_view const& costs) {
  return plan.size.slices > 1 ? costs.lengths : length_view{};
}
/// Returns the bytes of an action's unit, a part of `whole`, the bytes of its microbatch.
/// \param slices for a plan with slices, the factors of its units' transfers; without factors a unit is a microbatch
constexpr std::int64_t unit_bytes(action a, std::int64_t whole, length_view const& slices) {
  if (slices.alike()) return whole;
  return static_cast<std::int64_t>(slices.of_transfer(static_cast<int>(a.micro_batch)) * static_cast<double>(whole) + 0.5);
}

/// For `peak`: the change of a rank's bytes of activations by each action.
struct byte_changes {
  size_view sizes;
  bool forward_only = false;
  recomputed_chunks again{};
  length_view slices{};  ///< if sequences are sliced: each slice's share of its microbatch's bytes
  /// Adds the action's change to `held`, and returns the sum.
  constexpr std::int64_t operator()(action const& a, std::int64_t& held) const {
    int const stage = static_cast<int>(a.stage);
    if (a.kind == kind::recompute) return held += part(a, sizes.activation_of(stage)) - part(a, sizes.input_of(stage));
    if (makes_output(a.kind) && again.hold(a)) return held += part(a, sizes.input_of(stage));
    return held += in_flight_change(a.kind, forward_only) * part(a, sizes.activation_of(stage));
  }

 private:
  constexpr std::int64_t part(action a, std::int64_t whole) const { return unit_bytes(a, whole, slices); }
};

/// The most chunks in flight on a rank at any time.
constexpr int peak_in_flight(plan_view const& plan, int rank) {
  return peak<int>(plan, rank, chunk_changes{plan.forward_only}).most;
}
/// The most chunks in flight on any rank of a plan.
constexpr int peak_in_flight(plan_view const& plan) { return peak<int>(plan, chunk_changes{plan.forward_only}); }

/// The most chunks in flight on a rank at any time, where a slice counts as its share of its microbatch's tokens. With slices
/// of equal length, the result is `peak_in_flight` divided by the number of slices. Of slices that take equal time, the first
/// are the longest, and a rank stores their activations longest.
/// \param lengths factors of the units' transfers, which are proportional to tokens (plan/slices.hpp)
constexpr double peak_share(plan_view const& plan, length_view const& lengths, int rank) {
  return peak<double>(plan, rank, share_changes{lengths, plan.forward_only}).most;
}
/// The largest `peak_share` of any rank of a plan. \param lengths factors of the units' transfers
constexpr double peak_share(plan_view const& plan, length_view const& lengths) {
  return peak<double>(plan, share_changes{lengths, plan.forward_only});
}

/// The most bytes of activations on a rank at any time.
/// \param slices for a plan with slices, the factors of its units' transfers; `sizes` are always those of a microbatch
constexpr std::int64_t peak_bytes(plan_view const& plan, size_view const& sizes, int rank, length_view const& slices = {}) {
  return peak<std::int64_t>(plan, rank, byte_changes{sizes, plan.forward_only, recomputed_chunks(plan), slices}).most;
}
/// The most bytes of activations on any rank of a plan whose stages have these sizes.
constexpr std::int64_t peak_bytes(plan_view const& plan, size_view const& sizes) {
  return peak<std::int64_t>(plan, byte_changes{sizes, plan.forward_only, recomputed_chunks(plan)});
}

/// The number of messages that a step of a plan sends: one for each activation and each gradient that crosses between ranks.
constexpr int messages(plan_view const& plan) {
  int crossings = 0;
  for (int s = 0; s + 1 < plan.stages; ++s) crossings += plan.rank_of[s] != plan.rank_of[s + 1] ? 1 : 0;
  return crossings * plan.size.units() * (plan.forward_only ? 1 : 2);
}

/// The bytes of all messages of a step, for stages of these sizes. The slices of a microbatch together send as many bytes as
/// the whole microbatch.
constexpr std::int64_t message_bytes(plan_view const& plan, size_view const& sizes) {
  std::int64_t sum = 0;
  for (int s = 0; s + 1 < plan.stages; ++s) sum += plan.rank_of[s] != plan.rank_of[s + 1] ? sizes.message_of(s) : 0;
  return sum * plan.size.micro_batches * (plan.forward_only ? 1 : 2);
}

}  // namespace chevron
