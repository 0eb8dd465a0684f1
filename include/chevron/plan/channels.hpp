#pragma once

#include <cstdint>

/// \file
/// The channels over which messages travel between ranks: how many messages share one, and whether a host waits for its own.

namespace chevron {

/// Which messages of a rank share a channel. A channel runs its messages one after another, in the order in which each member
/// enqueues them, and a message runs while both of its members have it in front.
enum class channel_model : std::uint8_t {
  edge,   ///< a channel for each directed pair of ranks: Chevron's transports, Gloo
  pair,   ///< a channel for each pair of ranks, for both directions: NCCL's unbatched messages in PyTorch
  group,  ///< one channel for all ranks: NCCL's messages in PyTorch, each in a batch of its own
  /// One channel for all ranks. Successive messages of a rank, without a computation or a WAIT_SEND between, run side by side.
  batched
};
/// The number of channel models.
inline constexpr int channel_models = 4;

/// The name of a model, as `chevron-plan check --channels` takes it.
constexpr char const* name_of(channel_model model) {
  constexpr char const* names[channel_models] = {"edge", "pair", "group", "batched"};
  return names[static_cast<int>(model)];
}

/// The rules by which a transport runs messages.
struct channel_rules {
  channel_model model = channel_model::edge;
  /// Whether a rank waits at each message until it has ended, as for blocking calls. Otherwise a message waits on its channel's
  /// stream, and the rank goes on to its next action.
  bool hosts_wait = false;

  /// Whether these are the rules of Chevron's transports.
  constexpr bool are_own() const { return model == channel_model::edge && !hosts_wait; }
};

}  // namespace chevron
