#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/topology.hpp>

/// \file
/// Tensors, parameters and side inputs of stages.

namespace chevron {

/// The inputs or outputs of a stage; entries may be undefined.
using tensors = std::vector<at::Tensor>;

/// How the shards of a stage hold one of its parameters or buffers.
enum class over_shards {
  replicated,  ///< each shard holds all of it, and computes its whole gradient: nothing is summed
  partial,     ///< each shard holds all of it, and computes the gradient of its part of the input; these gradients are summed
  cut          ///< each shard holds a piece along one dimension
};

/// One parameter (a leaf tensor), with its name within its stage.
struct parameter {
  std::string name;
  at::Tensor value;
  std::string tied_as = {};  ///< name of its tie: equal on stages that share the parameter; empty: not tied
  over_shards held = over_shards::replicated;
  std::int64_t cut_along = 0;                ///< the dimension, if it is cut
  rank_group cut_over = rank_group::shards;  ///< the ranks that hold its pieces: shards, or experts
};

namespace detail {

/// The piece of a cut parameter that a rank holds, in words: ` of shard 1`, ` of expert rank 3`.
inline std::string piece_in_words(parameter const& p, topology const& where) {
  rank_group const among = where.plain(p.cut_over);
  return (among == rank_group::experts ? " of expert rank " : " of shard ") + std::to_string(where.number_in(among));
}

}  // namespace detail

/// A tensor of the batch that stages on any rank ask for by name, such as masks and positions. Does not go through the pipeline
/// and gets no gradient.
struct side_input {
  std::string name;
  at::Tensor value;
  bool whole = false;  ///< each microbatch gets all of it; otherwise it is cut along dimension 0, like samples
};

}  // namespace chevron
