#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/error.hpp>
#include <chevron/run/stage.hpp>

/// \file
/// One step's batch, cut into microbatches.

namespace chevron {

/// Which samples of a batch a microbatch holds.
struct sample_range {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

/// Parts that differ by at most one sample, the larger ones first: 10 samples in 4 parts are 3, 3, 2, 2.
constexpr sample_range samples_of(std::int64_t samples, int micro_batches, int micro_batch) {
  std::int64_t const small = samples / micro_batches;
  std::int64_t const larger = samples % micro_batches;
  std::int64_t const before = micro_batch < larger ? micro_batch : larger;
  return {micro_batch * small + before, small + (micro_batch < larger ? 1 : 0)};
}

/// One step's data, of one replica. Dimension 0 of inputs and targets is that of samples.
struct batch {
  tensors inputs;               ///< of stage 0
  tensors targets;              ///< of the loss
  std::vector<extra> extras = {};  ///< for stages that ask for them by name (`stage::takes`)
};

/// A batch (of one replica) in M parts along dimension 0. The parts are views: nothing is copied.
///
/// Each microbatch weighs its share of the samples of *all* replicas. The mean loss of a microbatch times its weight, added up,
/// is the mean loss over all samples, and gradients of it need no scaling afterwards, whatever the sizes.
class split_batch {
 public:
  /// \param all_samples samples of this step over all replicas
  /// \throws usage_error when the tensors disagree about the number of samples, or there are fewer samples than microbatches
  void split(batch const& whole, int count, std::int64_t all_samples) {
    samples_ = samples_in(whole);
    if (samples_ < count) {
      throw usage_error("a batch of " + std::to_string(samples_) + " samples cannot be cut into " + std::to_string(count) +
                        " microbatches: give at least one sample per microbatch, or fewer microbatches");
    }
    parts_.resize(static_cast<std::size_t>(count));
    for (int m = 0; m < count; ++m) {
      sample_range const range = samples_of(samples_, count, m);
      part& p = parts_[static_cast<std::size_t>(m)];
      cut(whole.inputs, range, p.inputs);
      cut(whole.targets, range, p.targets);
      p.extras.clear();
      for (extra const& e : whole.extras) p.extras.push_back({e.name, e.whole ? e.value : e.value.narrow(0, range.first, range.count), true});
      p.weight = static_cast<double>(range.count) / static_cast<double>(all_samples);
    }
  }

  /// How many samples these tensors hold, the same in each.
  static std::int64_t samples_in(batch const& whole) {
    if (whole.inputs.empty() && whole.targets.empty()) throw usage_error("a step needs at least one input or target tensor");
    std::int64_t samples = -1;
    std::string first;
    auto const look = [&](at::Tensor const& t, std::string const& name) {
      if (!t.defined() || t.dim() == 0) throw usage_error(name + " has no dimension of samples (dimension 0)");
      if (samples < 0) {
        samples = t.size(0);
        first = name;
      } else if (t.size(0) != samples) {
        throw usage_error(name + " has " + std::to_string(t.size(0)) + " samples (dimension 0) but " + first + " has " + std::to_string(samples));
      }
    };
    for (std::size_t i = 0; i < whole.inputs.size(); ++i) look(whole.inputs[i], "input " + std::to_string(i));
    for (std::size_t i = 0; i < whole.targets.size(); ++i) look(whole.targets[i], "target " + std::to_string(i));
    for (extra const& e : whole.extras) {
      if (!e.whole) look(e.value, "extra `" + e.name + "`");
    }
    return samples;
  }

  int count() const { return static_cast<int>(parts_.size()); }
  std::int64_t samples() const { return samples_; }
  tensors const& inputs(int m) const { return parts_[static_cast<std::size_t>(m)].inputs; }
  tensors const& targets(int m) const { return parts_[static_cast<std::size_t>(m)].targets; }
  std::span<extra const> extras(int m) const { return parts_[static_cast<std::size_t>(m)].extras; }
  double weight(int m) const { return parts_[static_cast<std::size_t>(m)].weight; }

 private:
  struct part {
    tensors inputs;
    tensors targets;
    std::vector<extra> extras;
    double weight = 0;
  };

  static void cut(std::span<at::Tensor const> all, sample_range range, tensors& out) {
    out.clear();
    for (at::Tensor const& t : all) out.push_back(t.narrow(0, range.first, range.count));
  }

  std::vector<part> parts_;
  std::int64_t samples_ = 0;
};

}  // namespace chevron
