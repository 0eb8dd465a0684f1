#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/device/scalar_reader.hpp>
#include <chevron/run/execution/executor_settings.hpp>
#include <chevron/run/execution/gradient_store.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/optimizer/gradient_buckets.hpp>
#include <chevron/run/optimizer/gradient_norm.hpp>
#include <chevron/run/optimizer/master_parameters.hpp>
#include <chevron/run/optimizer/optimizer_factory.hpp>
#include <chevron/run/optimizer/shard_agreement.hpp>

/// \file
/// The gradients of all stages of a rank.

namespace chevron::detail {

/// The gradients of one rank: a `gradient_buckets` for each of its stages, in the order of stages.
class rank_gradients final : public gradient_store {
 public:
  /// \param stages all stages by number; stages of other ranks are empty
  /// \param comm must outlive this object \param bucket_bytes largest size of a piece that is summed over the replicas
  /// \param over_replicas other than `nothing`: each replica steps its share; then `cut` comes before the first sum
  rank_gradients(std::vector<stage> const& stages, transport& comm, std::size_t bucket_bytes,
                 sharding over_replicas = sharding::nothing)
      : comm_(&comm) {
    by_stage_.resize(stages.size());
    for (std::size_t s = 0; s < stages.size(); ++s) {
      if (!stages[s]) continue;
      by_stage_[s] = std::make_unique<gradient_buckets>(stages[s], buckets_, bucket_bytes, over_replicas,
                                                        comm.topology().expert_replicas > 1);
      buckets_ += by_stage_[s]->buckets();
    }
  }

  /// The number of the model's stages.
  std::size_t stages() const { return by_stage_.size(); }
  /// The gradients of a stage; null for a stage of another rank.
  gradient_buckets* operator[](std::size_t stage) const { return by_stage_[stage].get(); }
  /// The number of buckets of all stages: sums over the replicas are numbered from 0 to one below.
  int buckets() const { return buckets_; }

  /// The parameters to train, in the order of stages and registration. A parameter that two stages of this rank share appears
  /// once, as the optimizer steps it once.
  std::vector<named_parameter> parameters() const {
    std::vector<named_parameter> out;
    for (std::size_t s = 0; s < by_stage_.size(); ++s) {
      if (!by_stage_[s]) continue;
      for (parameter const& p : by_stage_[s]->trained()) {
        bool const known =
            std::any_of(out.begin(), out.end(), [&](named_parameter const& q) { return q.value.is_same(p.value); });
        if (!known) out.push_back({static_cast<int>(s), p.name, p.value});
      }
    }
    return out;
  }

  /// Where the stage's buffers do not exist, waits for the sums of finished stages, whose buffers are freed then, and makes the
  /// stage's own.
  void attach(int stage) override {
    gradient_buckets& of = *by_stage_[static_cast<std::size_t>(stage)];
    if (!of.is_there()) {
      early_wait_ += seconds_of_wait();
      of.make();
    }
    of.attach();
  }
  void attach_all() override {
    each([](gradient_buckets& g) { g.attach_all(); });
  }
  void start_sums(int stage) override {
    auto const s = static_cast<std::size_t>(stage);
    shards_.before_sum(*by_stage_[s], s, *comm_);
    by_stage_[s]->start_sums(*comm_);
  }
  /// Starts the sums of all stages.
  void start_sums() {
    each([this](gradient_buckets& g) { g.start_sums(*comm_); });
  }
  /// Waits for the replicas' sums of all stages.
  void wait_sums() { sum_wait_ = std::exchange(early_wait_, 0) + seconds_of_wait(); }
  /// Seconds of the last `wait_sums`, and of the waits of `attach` before it.
  double sum_wait() const { return sum_wait_; }

  /// Turns on the comparison of gradients over the shards, in the first step and in every n-th.
  /// \param every n, in steps; 0: the first step alone \param exact whether equal computations give equal bits
  void guard_shards(int every, bool exact) { shards_ = detail::shard_agreement(comm_->topology(), every, exact); }
  /// Compares gradients over the shards, after `wait_sums`. Collective.
  /// \throws preflight_error, the same on every rank, where shards disagree
  void check_shards(error_context const& here) { shards_.check(by_stage_, *comm_, here); }

  /// Sets all gradients to zero: once a step, before its first B or W.
  void zero() {
    shards_.begin();
    each([](gradient_buckets& g) { g.zero(); });
  }
  /// Between two runs of one step: applies to the gradients added up so far the changes that the caller made to `.grad` since.
  /// Where `.grad` was emptied (`zero_grad()`) the gradient becomes zeros, where `.grad` was replaced the new tensor's values, as
  /// in a loop without a pipeline.
  /// \throws usage_error for a gradient that does not fit its parameter
  void take_over_changes() {
    struct change {
      std::size_t stage, index;
      at::Tensor given;
    };
    std::vector<change> changes;
    each_detached([&](std::size_t s, std::size_t i, at::Tensor const& now) { changes.push_back({s, i, now}); });
    for (change const& c : changes) {
      // Of a parameter that two stages share the first stage takes the gradient over, and `.grad` is that stage's afterwards.
      at::Tensor const& now = by_stage_[c.stage]->trained()[c.index].value.grad();
      bool const taken = c.given.defined() && !now.is_same(c.given);
      by_stage_[c.stage]->take_over(c.index, taken ? at::Tensor() : c.given, static_cast<int>(c.stage));
    }
  }
  /// Refuses gradients that the backwards did not add up in this rank's buffers. To be called before a step's gradients are read.
  /// \throws usage_error where `.grad` was emptied or replaced while the step's backwards ran
  void check_attached() const {
    each_detached([&](std::size_t s, std::size_t i, at::Tensor const& now) {
      throw usage_error("the gradient of stage " + std::to_string(s) + "'s " + by_stage_[s]->trained()[i].name + " was " +
                        (now.defined() ? "replaced" : "emptied") +
                        " while the step ran, by a hook or within a stage. Remedy: change gradients in place, or in "
                        "trainer_options::before_optimizer_step; zero_grad() before a step");
    });
  }

  /// The number of changes in place to the gradients of this rank.
  std::int64_t changes() const {
    std::int64_t sum = 0;
    each([&](gradient_buckets const& g) { sum += g.changes(); });
    return sum;
  }

  /// Cuts the parameters of each stage into shares, one for each replica.
  /// \param whole parameters are not cut
  void cut(bool whole) {
    topology const& where = comm_->topology();
    each([&](gradient_buckets& g) { g.cut(where.replicas, where.replica(), whole); });
  }

  /// Multiplies all gradients by a factor; of a sharded optimizer, this replica's share alone.
  void scale(double factor) {
    each([factor](gradient_buckets& g) { g.scale(factor); });
  }
  /// Sets the `.grad` of half-precision parameters to their rounded gradients, for the optimizer: until the next `zero`. Where
  /// they have masters, sets the `.grad` of these to the gradients themselves.
  void round(master_parameters const& masters) {
    at::NoGradGuard const off;
    each([&](gradient_buckets const& g) {
      g.each_in_float([&](at::Tensor const& p, at::Tensor const& gradient) {
        at::Tensor const& stepped = masters.stepped(p);
        stepped.mutable_grad() = gradient.to(stepped.scalar_type());
      });
    });
  }

  /// Refuses a change of `requires_grad`.
  /// \throws usage_error for a parameter that was frozen, or needs a gradient, only since the trainer was made
  void check_frozen() const {
    for (std::size_t s = 0; s < by_stage_.size(); ++s) {
      if (by_stage_[s]) by_stage_[s]->check_frozen(static_cast<int>(s));
    }
  }

  /// Computes the squared norm of each gradient, by stage and parameter, `gradient_buckets::norm_numbers` numbers of each.
  /// Numbers of a tied parameter that counts on another stage, and of another replica's share, are left as they are.
  /// \param out complete once `numbers` was read; must last until then, as this object must
  /// \param clip the norm to which gradients are scaled; 0: no clipping
  /// \param numbers asks for the norms on an accelerator
  /// \param rounds whether the optimizer reads gradients of half-precision parameters rounded, as it does without masters
  void squared_norms(std::span<double> out, double clip, scalar_reader& numbers, bool rounds = true) const {
    tensors on_device;
    std::vector<std::size_t> places;
    each_counted([&](gradient_buckets const&, counted_gradient const& of, std::size_t, std::size_t place) {
      at::Tensor const& gradient = of.values;
      if (gradient.is_cpu()) {
        out[place] = of.is_block ? squares_of_block(gradient, 0, gradient.numel()) : chevron::sum_of_squares(gradient);
      } else {
        on_device.push_back(gradient);
        places.push_back(place);
      }
    });
    numbers.ask(norms_of(on_device), [this, out, clip, places, rounds](std::span<double const> norms) {
      for (std::size_t k = 0; k < places.size(); ++k) out[places[k]] = norms[k] * norms[k];
      if (rounds) note_roundings(out, clip);
    });
  }

 private:
  double seconds_of_wait() {
    auto const from = std::chrono::steady_clock::now();
    each([this](gradient_buckets& g) { g.wait_sums(*comm_); });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
  }

  template <class See>
  void each(See const& see) const {
    for (auto const& g : by_stage_) {
      if (g) see(*g);
    }
  }

  /// Calls `see(stage, index, .grad)` for each parameter whose `.grad` is none of the gradients that this rank has for it.
  template <class See>
  void each_detached(See const& see) const {
    for (std::size_t s = 0; s < by_stage_.size(); ++s) {
      for (std::size_t i = 0; by_stage_[s] && i < by_stage_[s]->views().size(); ++i) {
        if (!by_stage_[s]->is_detached(i)) continue;
        at::Tensor const& now = by_stage_[s]->trained()[i].value.grad();
        if (!is_any_view(now)) see(s, i, now);
      }
    }
  }
  /// Whether a tensor is one of this rank's gradients, of any stage: stages may share a parameter.
  bool is_any_view(at::Tensor const& gradient) const {
    bool found = false;
    each([&](gradient_buckets const& g) {
      found = found || std::any_of(g.views().begin(), g.views().end(),
                                   [&](at::Tensor const& v) { return v.defined() && v.is_same(gradient); });
    });
    return found;
  }

  /// Calls `see(stage's gradients, gradient, index, place)` for all that this rank counts in the norm.
  template <class See>
  void each_counted(See const& see) const {
    std::size_t first = 0;
    each([&](gradient_buckets const& g) {
      for (std::size_t i = 0; i < g.views().size(); first += g.norm_numbers(i++))
        g.each_counted(i, [&](counted_gradient const& one) { see(g, one, i, first + one.number); });
    });
  }

  /// Makes the norm infinite for a gradient that fits single precision and overflows in half precision, in which the optimizer
  /// reads it. Where clipping bounds the norm by the largest half-precision number, no gradient overflows.
  void note_roundings(std::span<double> norms, double clip) const {
    each_counted([&](gradient_buckets const& g, counted_gradient const& of, std::size_t i, std::size_t place) {
      double const largest = largest_of(g.trained()[i].value.scalar_type());
      bool const clipped = clip > 0 && clip <= largest;
      // No element is larger than the norm, so few gradients are searched.
      if (clipped || !(norms[place] > largest * largest)) return;
      if (of.values.to(g.trained()[i].value.scalar_type()).isinf().any().item<bool>())
        norms[place] = std::numeric_limits<double>::infinity();
    });
  }

  transport* comm_;
  std::vector<std::unique_ptr<gradient_buckets>> by_stage_;
  detail::shard_agreement shards_;
  int buckets_ = 0;
  double sum_wait_ = 0, early_wait_ = 0;
};

}  // namespace chevron::detail
