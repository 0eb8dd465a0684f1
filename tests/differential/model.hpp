#pragma once

#include <cstdint>
#include <memory>
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

/// A block: takes the tensors that flow through the model (the first is what is computed with, the others go along) and
/// changes them.
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

/// What flows: how the first tensor is laid out, without its dimension of samples.
struct flow {
  enum class kind { tokens, vector, sequence, channels, image } what = kind::vector;
  int width = 1;   ///< features or channels
  int others = 0;  ///< tensors that go along
};

flow flow_of_input(program const& p);
/// What a block makes of it. \throws meaningless where it does not fit
flow flow_after(flow before, block const& b);

/// A stage's pieces: one, or for the form `parts` one for each block. Seeds ATen's default generator for each block.
std::vector<piece> build_stage(program const& p, int stage);

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
