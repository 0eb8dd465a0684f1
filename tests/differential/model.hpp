#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "program.hpp"

/// \file
/// The model of a program, made of LibTorch's modules only. Both sides build it anew from the program's seed.

namespace differential {

using tensors = std::vector<at::Tensor>;

/// The ranks that divide layers among them, as one rank sees them.
struct shard_ranks {
  int member = 0, members = 1;
  std::function<at::Tensor(at::Tensor const&)> copy;  ///< unchanged; gradients are summed
  std::function<at::Tensor(at::Tensor const&)> sum;   ///< summed; gradients are unchanged
};

/// The ranks that divide the experts of a block among them, as one rank sees them. Each side has its own.
struct expert_ranks {
  int member = 0, members = 1;
  /// Numbers of all members, in their order, from the same count of each.
  std::function<std::vector<std::int64_t>(std::vector<std::int64_t> const&)> counts;
  /// Sends rows to the members, those for member 0 first, and gives the rows that came, by sender; gradients go back.
  std::function<at::Tensor(at::Tensor const&, std::vector<std::int64_t> const&)> rows;
};

/// A block: changes the tensors that flow through the model; computes with the first, and passes the others on.
struct block_module : torch::nn::Module {
  virtual void run(tensors& values) = 0;
  tensors carried = {};  ///< from the slice before, or undefined; `run` leaves its own
};

/// Several blocks in a row, as one module whose `forward` takes as many tensors as there are, and then the blocks' carries, which
/// it gives behind its results.
class pieceImpl : public torch::nn::Module {
 public:
  void add(std::shared_ptr<block_module> const& one, block const& of = {});
  tensors run(tensors values);

  tensors forward(at::Tensor a) { return run({a}); }
  tensors forward(at::Tensor a, at::Tensor b) { return run({a, b}); }
  tensors forward(at::Tensor a, at::Tensor b, at::Tensor c) { return run({a, b, c}); }
  tensors forward(at::Tensor a, at::Tensor b, at::Tensor c, at::Tensor d) { return run({a, b, c, d}); }
  tensors forward(at::Tensor a, at::Tensor b, at::Tensor c, at::Tensor d, at::Tensor e) { return run({a, b, c, d, e}); }
  tensors forward(at::Tensor a, at::Tensor b, at::Tensor c, at::Tensor d, at::Tensor e, at::Tensor f) {
    return run({a, b, c, d, e, f});
  }
  tensors forward(at::Tensor a, at::Tensor b, at::Tensor c, at::Tensor d, at::Tensor e, at::Tensor f, at::Tensor g) {
    return run({a, b, c, d, e, f, g});
  }
  tensors forward(at::Tensor a, at::Tensor b, at::Tensor c, at::Tensor d, at::Tensor e, at::Tensor f, at::Tensor g,
                  at::Tensor h) {
    return run({a, b, c, d, e, f, g, h});
  }

  std::vector<std::shared_ptr<block_module>> const& blocks() const { return blocks_; }
  /// Of each carry, whether it is detached.
  std::vector<bool> const& carries() const { return carries_; }

 private:
  std::vector<std::shared_ptr<block_module>> blocks_;
  std::vector<bool> carries_;
};
using piece = std::shared_ptr<pieceImpl>;

/// One block that takes and gives one tensor, as torch::nn::Sequential wants it.
struct one_tensorImpl : torch::nn::Module {
  explicit one_tensorImpl(std::shared_ptr<block_module> only);
  at::Tensor forward(at::Tensor x);
  std::shared_ptr<block_module> block;
};

/// The kind and sizes of the tensors between blocks: of the first, without its dimension of samples.
struct flow {
  enum class kind { tokens, vector, sequence, channels, image } what = kind::vector;
  int width = 1;   ///< features or channels
  int others = 0;  ///< tensors that go along
};

flow flow_of_input(program const& p);
/// The flow after a block. \throws meaningless where the block does not fit
flow flow_after(flow before, block const& b);

/// The groups in which a rank builds its stages; null: it has no others.
struct rank_groups {
  expert_ranks const* experts = nullptr;
  shard_ranks const* shards = nullptr;
};

/// A parameter of which each shard has a piece: along `dimension` each of `blocks` equal blocks is cut.
struct cut_parameter {
  at::Tensor value;
  std::string name;
  int dimension = 0, blocks = 1;
  std::set<std::string> flags;
};

/// A stage's pieces: one, or for the form `parts` one for each block. Seeds ATen's default generator for each block.
/// \param groups must outlive the pieces
std::vector<piece> build_stage(program const& p, int stage, rank_groups groups = {});

/// Parameters of a stage's blocks `tp`: those that are cut, and their biases, which are whole (0 blocks).
std::vector<cut_parameter> cut_of(program const& p, int stage, std::vector<piece> const& pieces);

/// Parameters and buffers of a stage's blocks `moe` that belong to this rank's experts.
tensors of_experts(program const& p, int stage, std::vector<piece> const& pieces);
/// Buffers of a stage's blocks `tally`, whose changes are summed over the replicas.
tensors summed_of(program const& p, int stage, std::vector<piece> const& pieces);

/// Parameters of a stage with the flag `tieN`, by word.
std::vector<std::pair<std::string, at::Tensor>> tied_of(program const& p, int stage, std::vector<piece> const& pieces);

/// The loss of one microbatch: outputs of the last stage, then the target.
/// \param factor with `side`: one for each sample, or by `factor_of`
at::Tensor loss_of(program const& p, tensors const& outputs, at::Tensor const& target, at::Tensor const& factor);
/// Undefined without `side`.
at::Tensor factor_of(program const& p, at::Tensor const& target);

at::ScalarType dtype_of(program const& p);

/// The optimizer. \param apart parameters in a group of their own: no weight decay and, unless a schedule gives all groups one
/// rate, half the rate
std::unique_ptr<torch::optim::Optimizer> optimizer_of(program const& p, tensors const& apart, tensors const& others);
/// Does `groups=` put this parameter into the group of its own? `tied`: tied ones; `part`: those of the first stage that has one.
bool stands_apart(program const& p, int stage, bool tied);

}  // namespace differential
