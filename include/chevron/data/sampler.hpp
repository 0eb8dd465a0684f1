#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/data/samplers/base.h>
#include <torch/serialize/archive.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>

/// \file
/// Chooses the samples that each rank trains on. Not part of run.hpp: include this header beside LibTorch's data loader.

namespace chevron {

/// The options of a distributed_sampler, the same on all ranks.
struct sampler_options {
  std::size_t batch_size = 0;  ///< samples of one replica's batch, equal to the data loader's batch size
  std::uint64_t seed = 0;      ///< seed of the shuffled order
  bool shuffle = true;         ///< draw a new order for each epoch; false: keep the order of the data set
  bool drop_last = true;       ///< leave out samples that fill no batch on every replica; false: see `distributed_sampler`
};

/// A sampler for LibTorch's data loader, similar to PyTorch's `DistributedSampler`: all ranks of a pipeline get the same
/// samples; each replica gets different samples, and all replicas get equally many.
///
///     chevron::distributed_sampler sampler(set.size().value(), comm.topology(), {.batch_size = 16, .seed = 1});
///     sampler.start_at(trainer.next_step());  // 0, or the next step of a checkpoint
///     auto const loader = torch::data::make_data_loader(set, sampler, torch::data::DataLoaderOptions(16).workers(2));
///     for (std::size_t epoch = sampler.epoch(); epoch < epochs; ++epoch) {
///       for (auto& b : *loader) trainer.step(b.data, b.target);
///     }
///
/// The order depends on size, seed and epoch alone, not on process, machine, library or a generator. Batch k of all replicas
/// together has the same samples for any number of replicas, if the replicas' batches together have equally many samples.
///
/// Each pass of a loader over the data is an epoch. With `drop_last` all batches are full. Otherwise the last batch may be
/// smaller, and if the number of samples is no multiple of the number of replicas, the epoch's first samples are used twice.
class distributed_sampler : public torch::data::samplers::Sampler<> {
 public:
  /// \param size number of samples in the data set
  /// \param where `transport::topology()`
  /// \throws usage_error for a batch size of 0, and for a data set too small for a batch on each replica
  distributed_sampler(std::size_t size, topology const& where, sampler_options options)
      : options_(options),
        size_(size),
        replica_(static_cast<std::size_t>(where.replica())),
        replicas_(static_cast<std::size_t>(where.replicas)) {
    if (options_.batch_size == 0)
      throw usage_error("a sampler needs sampler_options::batch_size, the number of samples in a batch of one replica");
    check_size();
  }

  /// The number of batches of an epoch, the same on every rank.
  std::size_t batches() const {
    std::size_t const b = options_.batch_size;
    return options_.drop_last ? size_ / replicas_ / b : ((size_ + replicas_ - 1) / replicas_ + b - 1) / b;
  }

  /// The epoch of the next batch, from 0.
  std::size_t epoch() const { return epoch_; }

  /// Sets the next batch. Call it before creating a loader: a loader copies the sampler and reads ahead, so the loader's copy
  /// is ahead of the training.
  /// \param batch index over all epochs, from 0: the number of batches that training has used. If each step uses one batch,
  /// pass the trainer's `next_step()`, also after a resume from a checkpoint
  /// \throws usage_error for a number below 0
  void start_at(long batch) {
    if (batch < 0) throw usage_error("a sampler cannot start at batch " + std::to_string(batch) + ": they are counted from 0");
    epoch_ = static_cast<std::size_t>(batch) / batches();
    next_ = static_cast<std::size_t>(batch) % batches();
    in_pass_ = false;
    order_.clear();
  }

  /// Begins a pass; a loader calls it. The first pass begins at `start_at`'s batch, each later pass with a new epoch.
  /// \param new_size number of samples in the data set, if the number changed
  void reset(std::optional<std::size_t> new_size = std::nullopt) override {
    if (in_pass_) {
      ++epoch_;
      next_ = 0;
    }
    if (new_size && *new_size != size_) {
      size_ = *new_size;
      check_size();
      next_ = 0;
    }
    in_pass_ = true;
    put_in_order();
  }

  /// The indices of the samples in this replica's next batch, for a loader; empty at the end of an epoch.
  /// \throws usage_error if `batch_size` differs from `sampler_options::batch_size`
  std::optional<std::vector<std::size_t>> next(std::size_t batch_size) override {
    if (batch_size != options_.batch_size) {
      throw usage_error("the data loader asks for batches of " + std::to_string(batch_size) +
                        " samples, but its sampler has batches of " + std::to_string(options_.batch_size) +
                        ": give both the same batch_size, that of one replica");
    }
    if (!in_pass_) reset();
    if (next_ == batches()) return std::nullopt;
    std::size_t const first = next_++ * batch_size;
    auto const from = order_.begin() + static_cast<std::ptrdiff_t>(first);
    return std::vector<std::size_t>(from, from + static_cast<std::ptrdiff_t>(std::min(batch_size, order_.size() - first)));
  }

  /// Writes the next batch's index and the settings to an archive, for LibTorch's `save`. A loader's copy is ahead of the
  /// training, and so is the index it writes; to resume, call `start_at`. \param archive gets `next_batch` and `settings`
  void save(torch::serialize::OutputArchive& archive) const override {
    archive.write("next_batch", c10::IValue(static_cast<std::int64_t>(epoch_ * batches() + next_)));
    archive.write("settings", c10::IValue(settings()));
  }
  /// Reads the next batch's index from an archive. \param archive an archive that `save` wrote
  /// \throws usage_error if `save` wrote different `settings()`
  void load(torch::serialize::InputArchive& archive) override {
    c10::IValue next, saved;
    archive.read("next_batch", next);
    archive.read("settings", saved);
    if (saved.toStringRef() != settings()) {
      throw usage_error("a sampler was saved with " + saved.toStringRef() + ", this one has " + settings() +
                        ": their batches differ");
    }
    start_at(static_cast<long>(next.toInt()));
  }

  /// A text of the settings that decide which samples a batch of all replicas contains; must not change on resumption.
  std::string settings() const {
    return std::to_string(size_) + " samples, " + std::to_string(options_.batch_size * replicas_) +
           " in a batch of all replicas, " +
           (options_.shuffle ? "shuffled by seed " + std::to_string(options_.seed) : "in their order") +
           (options_.drop_last ? "" : ", the last ones too");
  }

 private:
  void check_size() const {
    if (batches() > 0) return;
    throw usage_error("a data set of " + std::to_string(size_) + " samples has no batch of " +
                      std::to_string(options_.batch_size) + " for each of " + std::to_string(replicas_) +
                      " replicas: smaller batches, or drop_last = false");
  }

  /// Lists this replica's samples of the epoch: each of R replicas gets every R-th sample.
  void put_in_order() {
    std::vector<std::size_t> all(size_);
    std::iota(all.begin(), all.end(), std::size_t{0});
    if (options_.shuffle) shuffle(all, options_.seed, epoch_);
    std::size_t const mine = options_.drop_last ? batches() * options_.batch_size : (size_ + replicas_ - 1) / replicas_;
    order_.resize(mine);
    for (std::size_t i = 0; i < mine; ++i) order_[i] = all[(i * replicas_ + replica_) % size_];
  }

  /// Shuffles by Fisher and Yates (Knuth, The Art of Computer Programming, volume 2, section 3.4.2, algorithm P). The C++
  /// standard specifies every bit of this engine and of its seeding, but not of std::shuffle and of distributions; ATen's
  /// permutations change from version to version.
  static void shuffle(std::vector<std::size_t>& all, std::uint64_t seed, std::uint64_t epoch) {
    std::seed_seq from{seed & 0xffffffffu, seed >> 32, epoch & 0xffffffffu, epoch >> 32};
    std::mt19937_64 engine(from);
    for (std::size_t count = all.size(); count > 1; --count) {
      std::uint64_t const whole = std::mt19937_64::max() / count * count;  // all remainders of smaller numbers are equally likely
      std::uint64_t drawn = engine();
      while (drawn >= whole) drawn = engine();
      std::swap(all[count - 1], all[drawn % count]);
    }
  }

  sampler_options options_;
  std::size_t size_, replica_, replicas_;
  std::size_t epoch_ = 0, next_ = 0;  // `next_`: index of the batch in its epoch
  bool in_pass_ = false;
  std::vector<std::size_t> order_;  // this replica's samples of this epoch
};

}  // namespace chevron
