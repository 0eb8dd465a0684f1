#pragma once

#include "cluster.hpp"

/// \file
/// Times of messages between stages, and times after the pipeline for each parameter: one place for timelines and bounds.

namespace plan_program {

/// Whether a message between two pipeline ranks leaves its machine, in any replica.
inline bool crosses(way const& of, cluster const& on, int a, int b) {
  for (int r = 0; r < of.replicas; ++r) {
    if (on.node_of((r * of.ranks + a) * of.shards) != on.node_of((r * of.ranks + b) * of.shards)) return true;
  }
  return false;
}

/// Milliseconds of a message between two pipeline ranks.
inline double message_time(way const& of, cluster const& on, sharded_costs const& given, int a, int b) {
  return a == b ? 0 : given.message / (crosses(of, on, a, b) ? on.between : on.inside);
}

/// Milliseconds from the end of a message's transfer to its arrival.
inline double message_latency(way const& of, cluster const& on, int a, int b) {
  return a == b ? 0 : crosses(of, on, a, b) ? on.latency_between : on.latency_inside;
}

/// Milliseconds for each parameter of a rank behind its last backward.
struct parameter_times {
  double sum = 0;         ///< of gradients over replicas
  double expert_sum = 0;  ///< of experts' gradients over the replicas that have copies of the experts
  double step = 0;        ///< of the optimizer
  double gather = 0;      ///< of a sharded optimizer's parameters
  // Of each stage, whatever its parameters: a ring of R ranks passes R - 1 messages to sum into shares, and as many to gather.
  double sum_latency = 0, gather_latency = 0;

  /// Milliseconds in which a piece's gradients are summed, without latencies.
  double sum_of(sharded_costs const& given, std::size_t piece) const {
    auto const experts = static_cast<double>(given.of_experts[piece]);
    return (static_cast<double>(given.parameters[piece]) - experts) * sum + experts * expert_sum;
  }
};

inline parameter_times parameter_times_of(way const& of, described_model const& model, cluster const& on) {
  training_setup const& setup = model.setup;
  // The group of a stage's replicas leaves a machine unless all ranks are in one.
  double const rate = on.nodes > 1 && of.replicas > 1 ? on.between : on.inside;
  double const latency = (of.replicas - 1) * (on.nodes > 1 ? on.latency_between : on.latency_inside);
  // A ring of N ranks sends (N - 1) / N of the bytes that it sums.
  auto const ring = [](int ranks) { return static_cast<double>(ranks - 1) / ranks; };
  double const part = ring(of.replicas);
  // The optimizer reads gradients, reads and writes its state and the parameters.
  auto const moved = static_cast<double>(setup.gradient_item() + 2 * setup.state_item() + 2 * setup.item);
  parameter_times out;
  out.sum = (of.sharded ? 1 : 2) * static_cast<double>(setup.gradient_item()) * part / rate;
  out.expert_sum = (of.sharded ? 1 : 2) * static_cast<double>(setup.gradient_item()) * ring(of.expert_copies()) / rate;
  out.step = moved / (of.sharded ? of.replicas : 1) / model.device.memory * 1e3;
  out.gather = of.sharded ? static_cast<double>(setup.item) * part / rate : 0;
  out.sum_latency = (of.sharded ? 1 : 2) * latency;
  // Experts that replicas divide are summed in a ring of their own.
  if (of.expert_replicas() > 1) out.sum_latency += out.sum_latency * (of.expert_copies() - 1) / std::max(of.replicas - 1, 1);
  out.gather_latency = of.sharded ? latency : 0;
  return out;
}

}  // namespace plan_program
