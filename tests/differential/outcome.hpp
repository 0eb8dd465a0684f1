#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "model.hpp"

/// \file
/// The results of a run, by name, as bytes: loss, norm, gradients, parameters, buffers, optimizer state, modes.

namespace differential {

struct value {
  std::string shape;  ///< dtype and sizes
  std::string bytes;
  bool operator==(value const&) const = default;
};

/// Keys are sorted by step, then by the order in which results are to be compared.
class outcome {
 public:
  void put(std::string const& key, at::Tensor const& t);
  void put(std::string const& key, double number);
  void put(std::string const& key, std::string const& words);
  void put_as(std::string const& key, value const& v) { values_[key] = v; }

  std::map<std::string, value> const& values() const { return values_; }
  /// Of another rank. Shards must have the same values; one that differs is kept beside the first.
  void add(outcome const& other) {
    for (auto const& [key, v] : other.values_) {
      auto const [known, is_new] = values_.emplace(key, v);
      if (!is_new && !(known->second == v)) values_.emplace(key + " of another shard", v);
    }
  }

  void write(std::string const& file) const;
  static outcome read(std::string const& file);

 private:
  std::map<std::string, value> values_;
};

/// The first difference in words; empty where there is none.
std::string first_difference(outcome const& expected, outcome const& found);

/// The same of losses and norms alone, which may differ by this much relative to their size.
std::string first_difference(outcome const& expected, outcome const& found, double within);

std::string key_of(int step, char const* what, int stage = -1, int replica = -1, std::string const& name = "");

/// An optimizer's state of a parameter, and its float32 master; either may be missing.
struct kept_state {
  std::shared_ptr<torch::optim::OptimizerParamState> state;
  at::Tensor master;
};
/// States by the tensor that the optimizer steps, or by parameter.
using states = std::map<void const*, kept_state>;
/// The optimizer's own, which must outlive the result; none for null.
states states_of(torch::optim::Optimizer* optimizer);

/// A stage's gradients, parameters, buffers, modes and optimizer state, after a step.
void put_stage(outcome& out, program const& p, int step, int stage, int replica, std::vector<piece> const& pieces,
               states const& kept);

}  // namespace differential
