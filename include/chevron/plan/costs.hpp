#pragma once

#include <chevron/plan/action.hpp>
#include <chevron/plan/buffer.hpp>

/// \file
/// The costs of actions and messages, all in one unit of the caller's choice (chunk units, seconds …).

namespace chevron {

/// What a transfer occupies while it runs. `sender`: the sending rank, which computes nothing meanwhile, directly after the
/// action that computed the tensor. `receiver`: the receiving rank, directly before the action that needs the tensor, once the
/// tensor is available and the rank is free. `both`: both ranks. `wire`: only the connection from one rank to another, on which
/// transfers run one after another in the order of the sends, while both ranks compute. `nobody`: nothing; any number of
/// transfers run while ranks compute. A send never waits for its receiver. Of a fused pair's two transfers, the forward half's
/// runs first.
enum class occupies : std::uint8_t { nobody, sender, receiver, both, wire };

constexpr char const* name_of(occupies which) {
  constexpr char const* names[] = {"nobody", "sender", "receiver", "both", "wire"};
  return names[static_cast<int>(which)];
}

inline constexpr double no_time = 0;

/// The factors by which microbatches of unequal length multiply costs. Computations and transfers have separate factors: the
/// time of attention grows with the square of a sequence's length, the bytes of messages with the length. If steps run back to
/// back, their factors repeat: microbatch m has entry m % count.
struct length_view {
  double const* computation = nullptr;  ///< by microbatch, above 0: factor of its computations' costs
  double const* transfer = nullptr;     ///< by microbatch, 0 or above: factor of its transfers' times, but not of latencies
  int count = 0;                        ///< entries of each list; 0: microbatches are of equal length, all factors are 1
  /// The share of attention in the computations' time, from which `computation` was calculated. A W contains no attention, so
  /// its factor is that of transfers; all attention of a backward is in the I. 0: I and W have the factor of computations.
  double attention = 0;

  constexpr bool alike() const { return count == 0; }
  constexpr double of_computation(int micro_batch) const { return count == 0 ? 1 : computation[micro_batch % count]; }
  constexpr double of_transfer(int micro_batch) const { return count == 0 ? 1 : transfer[micro_batch % count]; }
};

/// Costs as analyses read them: one entry per stage, or one entry for all stages (`stride` 0). If microbatches have unequal
/// lengths, the factors in `lengths` multiply the costs.
struct cost_view {
  double const* forward = nullptr;
  double const* backward_input = nullptr;
  double const* backward_weight = nullptr;
  int stride = 0;
  double const* communication = &no_time;  ///< entry s: time of a transfer between the ranks of stages s and s + 1
  int communication_stride = 0;            ///< 0: one entry for all boundaries
  double hidden = 0;  ///< share of a fused pair's shorter half that the longer half hides: 0 none, 1 all
  occupies communication_occupies = occupies::nobody;
  bool first_input_gradient = true;    ///< false: stage 0 computes no input gradient. Its I costs 0, its W the whole backward
  double const* latency = &no_time;    ///< entry s: time from a transfer's end to its arrival, in which it occupies nothing
  int latency_stride = 0;              ///< 0: one entry for all boundaries
  length_view lengths{};               ///< factors by microbatch; none: microbatches are of equal length
  double const* recompute = &no_time;  ///< cost of an R, after which B or I costs no recomputation; 0: an F's cost
  int recompute_stride = 0;            ///< 0: one entry for all stages
  double own[own_kinds]{};             ///< costs of X, Y and Z, equal on all stages
  /// Time to gather a stage's parameters from its replicas before the stage's first computation of a step (UNSHARD). A rank
  /// runs its stages' gathers one after another, in the order of stages, from the start of its step on and while it computes.
  /// Null: no gathers.
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
  /// Cost of an R or an own action of a microbatch with factor 1; 0 for other kinds.
  constexpr double of_rest(kind what, int stage) const {
    if (is_own(what)) return own[own_number(what)];
    if (what != kind::recompute) return 0;
    double const again = recompute[stage * recompute_stride];
    return again > 0 ? again : forward[stage * stride];
  }

  /// Cost of a stage's I.
  constexpr double of_input(int stage) const { return of(kind::backward_input, stage); }

  /// Cost of an action, with its microbatch's factor.
  constexpr double of_action(action a) const {
    double const one = of(a.kind, static_cast<int>(a.stage));
    if (lengths.count == 0) return one;
    bool const half = a.kind == kind::backward_input || a.kind == kind::backward_weight;
    if (half && lengths.attention > 0) return of_half(a.kind, static_cast<int>(a.stage), static_cast<int>(a.micro_batch));
    return one * lengths.of_computation(static_cast<int>(a.micro_batch));
  }
  /// Cost of an I or W of one microbatch, if attention is a share of the backward. The I contains the attention; if attention
  /// takes longer than the I, the W contains the rest.
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
  /// Cost of a fused pair whose halves, run alone, cost `f` and `b`.
  constexpr double of_halves(double f, double b) const { return f + b - hidden * (f < b ? f : b); }

  /// Time of a transfer between the ranks of stages `boundary` and `boundary + 1`, in either direction, for a microbatch with
  /// factor 1.
  constexpr double of_message(int boundary) const { return communication[boundary * communication_stride]; }
  /// Time of a transfer of one microbatch.
  constexpr double of_message(int boundary, int micro_batch) const {
    return lengths.count == 0 ? of_message(boundary) : of_message(boundary) * lengths.of_transfer(micro_batch);
  }
  constexpr double of_latency(int boundary) const { return latency[boundary * latency_stride]; }
  /// Time from the end of the action that sends to the earliest start of the action that needs the message: transfer and
  /// latency, for a microbatch with factor 1. Waits for ranks and wires add to this time.
  constexpr double of_delay(int boundary) const { return of_message(boundary) + of_latency(boundary); }
  /// Transfer and latency of one microbatch.
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
  double communication = 0;  ///< time of a transfer to another rank: bytes / bandwidth
  double hidden = 0;         ///< share of a fused pair's shorter half that the longer half hides: 0 none, 1 all
  occupies communication_occupies = occupies::nobody;
  bool first_input_gradient = true;  ///< false: stage 0 computes no input gradient, as in a real model
  double latency = 0;                ///< time from a transfer's end to its arrival; latencies of several messages overlap
  double recompute = 0;              ///< cost of an R, after which B or I costs no recomputation; 0: an F's cost
  double own[own_kinds]{};           ///< costs of X, Y and Z
  double unshard = 0;                ///< time to gather a stage's parameters before its first computation of a step; 0: none

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

/// Costs by stage and by boundary, in arrays, so that they can be a compile-time value: for profiles and models of unequal
/// stages.
template <int Stages>
struct stage_costs {
  double forward[array_size(Stages)]{};
  double backward_input[array_size(Stages)]{};
  double backward_weight[array_size(Stages)]{};
  double communication[array_size(Stages - 1)]{};  ///< entry s: time of a transfer between stages s and s + 1
  double hidden = 0;
  occupies communication_occupies = occupies::nobody;
  bool first_input_gradient = true;
  double latency[array_size(Stages - 1)]{};  ///< entry s, as in `communication`
  double recompute[array_size(Stages)]{};    ///< costs of R; 0: as much as an F
  double own[own_kinds]{};                   ///< costs of X, Y and Z

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
