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
  double sum = 0;     ///< of gradients over replicas
  double step = 0;    ///< of the optimizer
  double gather = 0;  ///< of a sharded optimizer's parameters
  // Of each stage, whatever its parameters: a ring of R ranks passes R - 1 messages to sum into shares, and as many to gather.
  double sum_latency = 0, gather_latency = 0;
};

inline parameter_times parameter_times_of(way const& of, described_model const& model, cluster const& on) {
  training_setup const& setup = model.setup;
  // The group of a stage's replicas leaves a machine unless all ranks are in one.
  double const rate = on.nodes > 1 && of.replicas > 1 ? on.between : on.inside;
  double const latency = (of.replicas - 1) * (on.nodes > 1 ? on.latency_between : on.latency_inside);
  double const part = static_cast<double>(of.replicas - 1) / of.replicas;
  // The optimizer reads gradients, reads and writes its state and the parameters.
  auto const moved = static_cast<double>(setup.gradient_item() + 2 * setup.state_item() + 2 * setup.item);
  parameter_times out;
  out.sum = (of.sharded ? 1 : 2) * static_cast<double>(setup.gradient_item()) * part / rate;
  out.step = moved / (of.sharded ? of.replicas : 1) / model.device.memory * 1e3;
  out.gather = of.sharded ? static_cast<double>(setup.item) * part / rate : 0;
  out.sum_latency = (of.sharded ? 1 : 2) * latency;
  out.gather_latency = of.sharded ? latency : 0;
  return out;
}

}  // namespace plan_program
