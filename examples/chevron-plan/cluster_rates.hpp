#pragma once

#include <algorithm>

#include "cluster.hpp"

/// \file
/// Rates of links that ranks share, times of messages between stages, and times after the pipeline for each parameter: one place
/// for timelines and bounds.

namespace plan_program {

/// Whether a message between two pipeline ranks leaves its machine, in any replica.
inline bool crosses(way const& of, cluster const& on, int a, int b) {
  for (int r = 0; r < of.replicas; ++r) {
    if (on.node_of((r * of.ranks + a) * of.shards) != on.node_of((r * of.ranks + b) * of.shards)) return true;
  }
  return false;
}

/// Bytes a millisecond that a rank sends to another machine while so many ranks of its machine do. A rank uses one card at a
/// time, or its share of them where a machine has more cards than devices.
inline double rate_between(cluster const& on, int sending) {
  if (on.cards == 0) return on.between;
  return on.between * std::min(std::max(1.0, static_cast<double>(on.cards) / on.gpus), static_cast<double>(on.cards) / sending);
}

/// The largest count of one machine. Ranks have to be given in their order, so those of a machine follow each other.
class most_of_machine {
 public:
  void add(int machine, int count) {
    if (machine != last_) here_ = 0;
    last_ = machine;
    here_ += count;
    most_ = std::max(most_, here_);
  }
  int most() const { return most_; }

 private:
  int last_ = -1, here_ = 0, most_ = 1;
};

/// Ranks of one machine, of all stages, that at most send to other machines in rings over each `stride`-th replica.
inline int sending_sums(way const& of, cluster const& on, int stride) {
  most_of_machine out;
  for (int r = 0; r < of.replicas; ++r) {
    int const next = (r + stride) % of.replicas;
    for (int p = 0; p < of.ranks; ++p) {
      int const from = on.node_of((r * of.ranks + p) * of.shards);
      if (from != on.node_of((next * of.ranks + p) * of.shards)) out.add(from, of.shards);
    }
  }
  return out.most();
}

/// Milliseconds of a message between two pipeline ranks. Ranks of a replica follow each other, so of a machine's replicas at most
/// one sends a message to another machine: all its shards do. \param bytes that each shard sends
inline double message_time(way const& of, cluster const& on, double bytes, int a, int b) {
  return a == b ? 0 : bytes / (crosses(of, on, a, b) ? rate_between(on, of.shards) : on.inside);
}

/// Milliseconds from the end of a message's transfer to its arrival.
inline double message_latency(way const& of, cluster const& on, int a, int b) {
  return a == b ? 0 : crosses(of, on, a, b) ? on.latency_between : on.latency_inside;
}

/// Bytes of each parameter that post-validation copies before the optimizer steps: its state, and the parameter itself unless a
/// master has its value.
inline std::int64_t copied_item(training_setup const& setup) {
  return setup.state_item() + (setup.masters && setup.item < 4 ? 0 : setup.item);
}

/// Milliseconds for each parameter of a rank behind its last backward.
struct parameter_times {
  double sum = 0;         ///< of gradients over replicas
  double expert_sum = 0;  ///< of experts' gradients over the replicas that have copies of the experts
  double step = 0;        ///< of the optimizer, and of post-validation's copies
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
  bool const leaves = on.nodes > 1 && of.replicas > 1;
  auto const rate_of = [&](int stride) {
    if (!leaves) return on.inside;
    return on.cards == 0 ? on.between : rate_between(on, sending_sums(of, on, stride));
  };
  double const rate = rate_of(1), expert_rate = of.expert_replicas() > 1 ? rate_of(of.expert_replicas()) : rate;
  double const latency = (of.replicas - 1) * (on.nodes > 1 ? on.latency_between : on.latency_inside);
  // A ring of N ranks sends (N - 1) / N of the bytes that it sums.
  auto const ring = [](int ranks) { return static_cast<double>(ranks - 1) / ranks; };
  double const part = ring(of.replicas);
  // The optimizer reads gradients, reads and writes its state and the parameters.
  auto const moved = static_cast<double>(setup.gradient_item() + 2 * setup.state_item() + 2 * setup.item +
                                         (of.post_validated ? 2 * copied_item(setup) : 0));
  parameter_times out;
  out.sum = (of.sharded ? 1 : 2) * static_cast<double>(setup.gradient_item()) * part / rate;
  out.expert_sum = (of.sharded ? 1 : 2) * static_cast<double>(setup.gradient_item()) * ring(of.expert_copies()) / expert_rate;
  out.step = moved / (of.sharded ? of.replicas : 1) / model.device.memory * 1e3;
  out.gather = of.sharded ? static_cast<double>(setup.item) * part / rate : 0;
  out.sum_latency = (of.sharded ? 1 : 2) * latency;
  // Experts that replicas divide are summed in a ring of their own.
  if (of.expert_replicas() > 1) out.sum_latency += out.sum_latency * (of.expert_copies() - 1) / std::max(of.replicas - 1, 1);
  out.gather_latency = of.sharded ? latency : 0;
  return out;
}

}  // namespace plan_program
