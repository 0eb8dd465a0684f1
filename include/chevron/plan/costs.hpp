#pragma once

#include <chevron/plan/action.hpp>
#include <chevron/plan/buffer.hpp>

/// \file
/// What actions and messages cost: the unit is the caller's (chunk units, seconds …), the same throughout.

namespace chevron {

/// What a transfer keeps occupied while it lasts. The sender, which then does not compute: directly after the action that made
/// the tensor. The receiver: directly before the action that needs it, from when both the tensor and the rank are there. The
/// wire: transfers from one rank to another go one after the other, in the order of the sends, beside the computations. A send
/// never waits for its receiver. Of a fused pair, the forward half's transfer goes first. With `nobody`, any number of
/// transfers run beside the computations.
enum class occupies : std::uint8_t { nobody, sender, receiver, both, wire };

constexpr char const* name_of(occupies which) {
  constexpr char const* names[] = {"nobody", "sender", "receiver", "both", "wire"};
  return names[static_cast<int>(which)];
}

inline constexpr double no_time = 0;

/// What microbatches of unequal length multiply costs by. Computations and transfers have factors of their own: attention takes
/// time with the square of a length, while what is sent grows with the length. Steps back to back repeat them: microbatch m has
/// entry m % count.
struct length_view {
  double const* computation = nullptr;  ///< above 0: what F, B, I, W and R of each microbatch are multiplied by
  double const* transfer = nullptr;     ///< 0 or above: the same of transfers; latencies stay
  int count = 0;                        ///< entries of both; 0: all microbatches are alike, each factor is 1
  /// The share of computations that is attention, with which their factors were made. A W has no part in it: its factor is that
  /// of transfers, and the I has all attention of the whole backward. 0: both have the factor of computations.
  double attention = 0;

  constexpr bool alike() const { return count == 0; }
  constexpr double of_computation(int micro_batch) const { return count == 0 ? 1 : computation[micro_batch % count]; }
  constexpr double of_transfer(int micro_batch) const { return count == 0 ? 1 : transfer[micro_batch % count]; }
};

/// Costs seen by the analyses: one entry a stage, or one for all (`stride` 0); microbatches of unequal length multiply them.
struct cost_view {
  double const* forward = nullptr;
  double const* backward_input = nullptr;
  double const* backward_weight = nullptr;
  int stride = 0;
  double const* communication = &no_time;  ///< a transfer between the ranks of stages s and s + 1, in entry s
  int communication_stride = 0;            ///< 0: one entry for all boundaries
  double hidden = 0;  ///< of a fused pair's shorter half, the share that the longer half hides: 0 none, 1 all
  occupies communication_occupies = occupies::nobody;
  bool first_input_gradient = true;    ///< false: stage 0 has no input gradient. Its I is free, its W is the whole backward
  double const* latency = &no_time;    ///< from a transfer's end until it has arrived, as `communication`; it occupies nothing
  int latency_stride = 0;              ///< 0: one entry for all boundaries
  length_view lengths{};               ///< by microbatch; none: all are alike
  double const* recompute = &no_time;  ///< of an R, with which a B or I costs no recomputation; 0: as much as an F
  int recompute_stride = 0;            ///< 0: one entry for all stages
  double own[own_kinds]{};             ///< of X, Y and Z, on any stage
  /// The gather of a stage's parameters over its replicas, before the stage's first computation of a step (UNSHARD). The gathers
  /// of a rank follow one another from the rank's begin on, in the order of its stages, beside its computations. Null: none.
  double const* unshard = nullptr;
  int unshard_stride = 0;  ///< 0: one entry for all stages

  /// Cost of one compute action of a microbatch with factor 1. A full backward costs input plus weight gradient.
  constexpr double of(kind what, int stage) const {
    int const i = stage * stride;
    switch (what) {
      case kind::forward:
        return forward[i];
      case kind::backward:
        return backward_input[i] + backward_weight[i];
      case kind::backward_input:
        return stage > 0 || first_input_gradient ? backward_input[i] : 0;
      case kind::backward_weight:
        return stage > 0 || first_input_gradient ? backward_weight[i] : backward_input[i] + backward_weight[i];
      default:
        return of_rest(what, stage);
    }
  }
  /// The same of R and own actions.
  constexpr double of_rest(kind what, int stage) const {
    if (is_own(what)) return own[own_number(what)];
    if (what != kind::recompute) return 0;
    double const again = recompute[stage * recompute_stride];
    return again > 0 ? again : forward[stage * stride];
  }

  /// Cost of a stage's I.
  constexpr double of_input(int stage) const { return of(kind::backward_input, stage); }

  /// The same of its own microbatch.
  constexpr double of_action(action a) const {
    double const one = of(a.kind, static_cast<int>(a.stage));
    if (lengths.count == 0) return one;
    bool const half = a.kind == kind::backward_input || a.kind == kind::backward_weight;
    if (half && lengths.attention > 0) return of_half(a.kind, static_cast<int>(a.stage), static_cast<int>(a.micro_batch));
    return one * lengths.of_computation(static_cast<int>(a.micro_batch));
  }
  /// An I or W of one microbatch, where the whole backward of a stage has a share of attention. Its W has as much of it as does
  /// not go into the I.
  constexpr double of_half(kind what, int stage, int micro_batch) const {
    double const input = of(kind::backward_input, stage), weight = of(kind::backward_weight, stage), both = input + weight;
    double const factor = lengths.of_computation(micro_batch), linear = lengths.of_transfer(micro_batch);
    double const beyond = lengths.attention * both - input;
    double const of_weight = weight * linear + (beyond > 0 ? beyond * (factor - linear) / lengths.attention : 0);
    return what == kind::backward_weight ? of_weight : both * factor - of_weight;
  }

  /// Cost of a fused pair.
  constexpr double of_pair(action forward_half, action backward_half) const {
    return of_halves(of_action(forward_half), of_action(backward_half));
  }
  /// The same of what its halves take alone.
  constexpr double of_halves(double f, double b) const { return f + b - hidden * (f < b ? f : b); }

  /// What a transfer takes between the ranks of stages `boundary` and `boundary + 1`, in either direction, for a microbatch with
  /// factor 1.
  constexpr double of_message(int boundary) const { return communication[boundary * communication_stride]; }
  /// The same of one microbatch.
  constexpr double of_message(int boundary, int micro_batch) const {
    return lengths.count == 0 ? of_message(boundary) : of_message(boundary) * lengths.of_transfer(micro_batch);
  }
  constexpr double of_latency(int boundary) const { return latency[boundary * latency_stride]; }
  /// From the end of what is sent to the earliest start of what needs it: transfer and latency, with factor 1. No message takes
  /// less.
  constexpr double of_delay(int boundary) const { return of_message(boundary) + of_latency(boundary); }
  /// The same of one microbatch.
  constexpr double of_delay(int boundary, int micro_batch) const {
    return of_message(boundary, micro_batch) + of_latency(boundary);
  }

  constexpr bool occupies_sender() const {
    return communication_occupies == occupies::sender || communication_occupies == occupies::both;
  }
  constexpr bool occupies_receiver() const {
    return communication_occupies == occupies::receiver || communication_occupies == occupies::both;
  }
  constexpr bool occupies_wire() const { return communication_occupies == occupies::wire; }
};

/// The same cost for every stage, as in the literature. Note that these are costs of *chunks*: a rank with two chunks of
/// cost 1 spends 2 on each microbatch's forward.
struct costs {
  double forward = 1;
  double backward_input = 1;
  double backward_weight = 1;
  double communication = 0;  ///< a transfer to another rank: bytes by bandwidth
  double hidden = 0;         ///< of a fused pair's shorter half, the share that the longer half hides: 0 none, 1 all
  occupies communication_occupies = occupies::nobody;
  bool first_input_gradient = true;  ///< false: stage 0 has no input gradient, as in a real model
  double latency = 0;                ///< from a transfer's end until it has arrived; any number are on their way at once
  double recompute = 0;              ///< of an R, with which a B or I costs no recomputation; 0: as much as an F
  double own[own_kinds]{};           ///< of X, Y and Z
  double unshard = 0;                ///< the gather of a stage's parameters before its first computation of a step

  constexpr cost_view view() const {
    return {.forward = &forward,
            .backward_input = &backward_input,
            .backward_weight = &backward_weight,
            .communication = &communication,
            .hidden = hidden,
            .communication_occupies = communication_occupies,
            .first_input_gradient = first_input_gradient,
            .latency = &latency,
            .recompute = &recompute,
            .own = {own[0], own[1], own[2]},
            .unshard = unshard > 0 ? &unshard : nullptr};
  }
  constexpr operator cost_view() const { return view(); }
};

/// A cost per stage and per boundary, of fixed size, so that it can be a compile-time value: profiles and uneven models.
template <int Stages>
struct stage_costs {
  double forward[array_size(Stages)]{};
  double backward_input[array_size(Stages)]{};
  double backward_weight[array_size(Stages)]{};
  double communication[array_size(Stages - 1)]{};  ///< entry s: between stages s and s + 1
  double hidden = 0;
  occupies communication_occupies = occupies::nobody;
  bool first_input_gradient = true;
  double latency[array_size(Stages - 1)]{};  ///< as `communication`
  double recompute[array_size(Stages)]{};    ///< of an R; 0: as much as an F
  double own[own_kinds]{};                   ///< of X, Y and Z

  constexpr cost_view view() const {
    return {.forward = forward,
            .backward_input = backward_input,
            .backward_weight = backward_weight,
            .stride = 1,
            .communication = communication,
            .communication_stride = 1,
            .hidden = hidden,
            .communication_occupies = communication_occupies,
            .first_input_gradient = first_input_gradient,
            .latency = latency,
            .latency_stride = 1,
            .recompute = recompute,
            .recompute_stride = 1,
            .own = {own[0], own[1], own[2]}};
  }
  constexpr operator cost_view() const { return view(); }
};

}  // namespace chevron
