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

/// How a parameter or buffer of a stage is divided over the stage's shards.
enum class over_shards {
  replicated,  ///< each shard has the whole tensor and computes the whole gradient: nothing is summed
  partial,     ///< each shard has the whole tensor, and the gradient for a part of the input: shards' gradients are summed
  cut          ///< each shard has a piece of the tensor, cut along one dimension
};

/// The layout of a tensor along the dimension in which it is cut (`stage::cut`, `stage::experts`).
struct cut_options {
  /// The number of equal blocks that the whole tensor consists of, such as 2 for `[gate; up]`. Each block is cut over the ranks,
  /// so each rank's piece has a part of every block, in the order of blocks.
  std::int64_t blocks = 1;
  /// The sizes of the blocks' parts in this rank's piece, in place of `blocks`, for blocks of unequal size, such as `[q; k; v]`
  /// with fewer heads of keys than of queries. As many on all ranks; a part may be empty.
  std::vector<std::int64_t> sizes = {};
  /// The size of the whole tensor, which the trainer's constructor compares with the sum over all pieces; 0: not compared.
  std::int64_t whole = 0;
};

/// One parameter (a leaf tensor), with its name within its stage.
struct parameter {
  std::string name;
  at::Tensor value;
  std::string tied_as = {};  ///< name of its tie: equal on stages that share the parameter; empty: not tied
  over_shards held = over_shards::replicated;
  std::int64_t cut_along = 0;                 ///< the dimension along which a cut parameter is cut
  rank_group cut_over = rank_group::shards;   ///< the ranks that have the pieces of a cut parameter: shards, or experts
  std::vector<std::int64_t> cut_blocks = {};  ///< sizes of the blocks' parts in this rank's piece of a cut parameter
  std::int64_t cut_whole = 0;                 ///< `cut_options::whole`
  bool summed = false;                        ///< of a buffer: its changes in a step are summed over the replicas
};

namespace detail {

/// Whether a parameter is cut and this rank has only a piece of it: false if the parameter's group has one member.
inline bool is_piece(parameter const& p, topology const& where) {
  return p.held == over_shards::cut && where.members(where.plain(p.cut_over)) > 1;
}

/// Words for the piece of a cut parameter on a rank: ` of shard 1`, ` of expert rank 3`.
inline std::string piece_in_words(parameter const& p, topology const& where) {
  rank_group const among = where.plain(p.cut_over);
  return (among == rank_group::experts ? " of expert rank " : " of shard ") + std::to_string(where.number_in(among));
}

}  // namespace detail

/// A tensor of the batch, such as a mask or positions, that stages on any rank request by name. It is not sent between stages
/// and has no gradient.
struct side_input {
  std::string name;
  at::Tensor value;
  bool whole = false;  ///< each microbatch gets the whole tensor; otherwise a part, cut along dimension 0 like samples
};

}  // namespace chevron
