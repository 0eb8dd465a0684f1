#pragma once

#include <cstdint>
#include <limits>

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/sizes.hpp>

/// \file
/// Chunks in flight on a rank, from a chunk's F until its B, or its W when the backward is split; the number of messages
/// a step sends; and both in bytes where stages declare sizes, of a chunk with
/// an R the inputs alone until the R, everything from then on.

namespace chevron {

/// The most that a rank holds at any time.
template <class Amount>
struct held_peak {
  Amount most{};
  int position = -1;  ///< in the rank's list: the first action after which it holds that; -1: never more than at first
};

/// The most that a rank holds while its list runs. The search ends at a peak above `enough`, a limit.
/// \param changes changes(action, held): updates the rank's amount, and gives the most of it meanwhile
/// \param held    the rank's amount before its first action
/// \param enough  the list is read up to the first action with which the rank holds more
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
/// The peak of a plan: the most on any of its ranks, by these changes.
template <class Amount, class Changes>
constexpr Amount peak(plan_view const& plan, Changes const& changes) {
  Amount most{};
  for (int r = 0; r < plan.size.ranks; ++r) {
    Amount const one = peak<Amount>(plan, r, changes).most;
    most = one > most ? one : most;
  }
  return most;
}

/// The chunks that an R runs forward again: from F to R such a chunk holds its inputs alone.
class recomputed_chunks {
 public:
  constexpr recomputed_chunks() = default;  ///< none
  /// The chunks of a plan's R.
  constexpr explicit recomputed_chunks(plan_view const& plan)
      : micro_batches_(plan.size.units()), is_(plan.holds(kind::recompute) ? plan.stages * micro_batches_ : 0, zeroed) {
    for (int i = 0; i < plan.total() && is_.count > 0; ++i) {
      if (plan.actions[i].kind == kind::recompute) is_.data[cell_of(plan.actions[i])] = true;
    }
  }
  /// Whether the chunk of this action is one of them.
  constexpr bool hold(action a) const { return is_.count > 0 && is_.data[cell_of(a)]; }

 private:
  constexpr int cell_of(action a) const { return static_cast<int>(a.stage) * micro_batches_ + static_cast<int>(a.micro_batch); }

  int micro_batches_ = 0;
  buffer<bool> is_;  // by (stage, microbatch); empty: none
};

/// Changes of the chunks in flight by actions; each chunk holds one stage's activations for one microbatch.
struct chunk_changes {
  bool forward_only = false;
  /// Adds an action's change to `held`, and returns the sum.
  constexpr int operator()(action const& a, int& held) const { return held += in_flight_change(a.kind, forward_only); }
};
/// Changes of the microbatches held, by actions: a slice is held as the share of its microbatch's tokens that it has.
struct share_changes {
  length_view lengths;
  bool forward_only = false;
  /// Adds an action's change to `held`, and returns the sum.
  constexpr double operator()(action const& a, double& held) const {
    return held += in_flight_change(a.kind, forward_only) * lengths.of_transfer(static_cast<int>(a.micro_batch));
  }
};

/// The factors by which the slices of a plan divide a microbatch's memory: those of their transfers, which go with their tokens;
/// none where microbatches are whole.
constexpr length_view slice_factors(plan_view const& plan, cost_view const& costs) {
  return plan.size.slices > 1 ? costs.lengths : length_view{};
}
/// The bytes of `whole`, those of a microbatch, that belong to the unit of an action.
/// \param slices of a plan of slices, the factors of its units' transfers; without factors a unit is a microbatch
constexpr std::int64_t unit_bytes(action a, std::int64_t whole, length_view const& slices) {
  if (slices.alike()) return whole;
  return static_cast<std::int64_t>(slices.of_transfer(static_cast<int>(a.micro_batch)) * static_cast<double>(whole) + 0.5);
}

/// Changes of the bytes of activations that are held, by actions.
struct byte_changes {
  size_view sizes;
  bool forward_only = false;
  recomputed_chunks again{};
  length_view slices{};  ///< of slices, whose sizes are those of a microbatch: the shares that they have of it
  /// Adds an action's change to `held`, and returns the sum.
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

/// The most microbatches that a rank holds of its chunks at any time, slices by their share of a microbatch's tokens. With
/// slices of equal length that is `peak_in_flight` by their number; where slices take equal time the first ones are longer, and
/// are kept longest.
/// \param lengths factors of the units' transfers, which go with their tokens (plan/slices.hpp)
constexpr double peak_share(plan_view const& plan, length_view const& lengths, int rank) {
  return peak<double>(plan, rank, share_changes{lengths, plan.forward_only}).most;
}
/// The most microbatches that any rank holds of its chunks, by the factors `lengths` of the units' transfers.
constexpr double peak_share(plan_view const& plan, length_view const& lengths) {
  return peak<double>(plan, share_changes{lengths, plan.forward_only});
}

/// The most bytes of activations that a rank holds at any time.
/// \param slices of a plan of slices, the factors of its units' transfers; sizes are then those of a microbatch
constexpr std::int64_t peak_bytes(plan_view const& plan, size_view const& sizes, int rank, length_view const& slices = {}) {
  return peak<std::int64_t>(plan, rank, byte_changes{sizes, plan.forward_only, recomputed_chunks(plan), slices}).most;
}
/// The most bytes of activations on any rank of a plan, of stages of these sizes.
constexpr std::int64_t peak_bytes(plan_view const& plan, size_view const& sizes) {
  return peak<std::int64_t>(plan, byte_changes{sizes, plan.forward_only, recomputed_chunks(plan)});
}

/// The number of messages that a step of a plan sends: one for each activation and each gradient that crosses between ranks.
constexpr int messages(plan_view const& plan) {
  int crossings = 0;
  for (int s = 0; s + 1 < plan.stages; ++s) crossings += plan.rank_of[s] != plan.rank_of[s + 1] ? 1 : 0;
  return crossings * plan.size.units() * (plan.forward_only ? 1 : 2);
}

/// The bytes of all messages of a step of a plan, of stages of these sizes; slices of a microbatch send its bytes together.
constexpr std::int64_t message_bytes(plan_view const& plan, size_view const& sizes) {
  std::int64_t sum = 0;
  for (int s = 0; s + 1 < plan.stages; ++s) sum += plan.rank_of[s] != plan.rank_of[s + 1] ? sizes.message_of(s) : 0;
  return sum * plan.size.micro_batches * (plan.forward_only ? 1 : 2);
}

}  // namespace chevron
