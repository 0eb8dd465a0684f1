#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <chevron/plan/footprint.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/tools/search/layer_bytes.hpp>

#include "common/freed_gradients.hpp"
#include "request.hpp"

/// \file
/// What a rank has and what a model takes of it, in bytes: `--memory` and the flags or the profile that go with it.

namespace plan_program {

using chevron::train::freed_gradients;

/// What a step takes of its ranks' memory, for any number of stages: from a profile, or from what flags say of a rank's whole
/// share.
class memory_model {
 public:
  /// \throws usage where something is not given, or is no number of bytes
  memory_model(request const& asked, std::optional<chevron::profile> const& measured);

  /// Whether the bytes of a recomputed stage are known.
  bool recomputes() const { return profile_ || input_ >= 0; }
  /// Whether gradients are freed between their sum and the stage's next backward, but a share of each replica.
  bool frees_gradients() const { return frees_; }
  /// Replicas that share the optimizer's state and gradients.
  int shard() const { return shard_; }
  /// Bytes by stage; `problem` where a profile does not serve so many.
  chevron::stage_bytes of_stages(int stages, int chunks) const;
  /// Bytes by stage of a model whose stages have so many layers; `problem` where only flags give bytes.
  chevron::stage_bytes of_layers(std::vector<int> const& layers) const;

  /// Bytes by stage for each slice of a microbatch; empty where the profile does not have those of so many slices.
  /// \param layers of each stage; empty: the profile's stages are united
  std::vector<chevron::stage_bytes> of_slices(int slices, int stages, std::vector<int> const& layers) const;

  std::int64_t memory = 0;  ///< that a rank has

 private:
  std::optional<chevron::profile> profile_;  ///< whose bytes count
  chevron::search::layer_bytes by_layer_;    ///< of this profile
  int shard_ = 0;                            ///< replicas that share the optimizer's state; 0: as the profile has it
  bool frees_ = false;
  std::int64_t fixed_ = 0, activation_ = 0, kept_ = 0, gradient_ = 0;
  std::int64_t input_ = -1;  ///< of a stage, however many there are; -1: not known
};

/// Costs where every backward begins with its F again.
inline void recompute_all(owned_costs& costs) {
  for (int s = 0; s < costs.stages(); ++s) costs.backward_input[s] += costs.forward[s];
}

/// A word as a shell takes it.
std::string shell_word(std::string const& word);
/// `chevron-plan COMMAND` with the flags that say what schedules are judged by: shape, costs, links, bytes and effort.
/// \param chunks costs of a rank's whole share are typed as those of a chunk, one of so many; 1: as they are
std::string command_text(request const& asked, std::string const& command, chevron::shape size, int chunks);

}  // namespace plan_program
