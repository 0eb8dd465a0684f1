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
#include <chevron/run/core/scalar_reader.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/execute/gradient_store.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/gradient_buckets.hpp>
#include <chevron/run/train/gradient_norm.hpp>
#include <chevron/run/train/optimizer_factory.hpp>
#include <chevron/run/train/shard_agreement.hpp>
#include <chevron/run/train/step_parts.hpp>

/// \file
/// The gradients of all stages of a rank.

namespace chevron::detail {

/// The gradients of one rank: a `gradient_buckets` for each of its stages, in the order of stages.
class rank_gradients final : public gradient_store {
 public:
  /// \param stages all stages by number; stages of other ranks are empty
  /// \param comm must outlive this object \param collectives from which sums over replicas claim their numbers
  /// \param bucket_bytes largest size of a piece that is summed over the replicas
  /// \param over_replicas other than `nothing`: each replica steps its share, and `cut` must be called before the first sum
  /// Collective.
  rank_gradients(std::vector<stage> const& stages, transport& comm, collective_numbers& collectives, std::size_t bucket_bytes,
                 sharding over_replicas = sharding::nothing)
      : comm_(&comm) {
    by_stage_.resize(stages.size());
    for (std::size_t s = 0; s < stages.size(); ++s) {
      if (!stages[s]) continue;
      by_stage_[s] = std::make_unique<gradient_buckets>(stages[s], collectives, bucket_bytes, over_replicas,
                                                        comm.topology().expert_replicas > 1);
    }
    half_here_ = any_in_float();
    double const mine = half_here_ ? 1 : 0;
    std::vector<double> all(static_cast<std::size_t>(comm.topology().world()));
    comm.all_gather(std::span(&mine, 1), all);
    half_on_any_ = std::any_of(all.begin(), all.end(), [](double one) { return one != 0; });
  }

  /// The number of the model's stages.
  std::size_t stages() const { return by_stage_.size(); }
  /// The gradients of a stage; null for a stage of another rank.
  gradient_buckets* operator[](std::size_t stage) const { return by_stage_[stage].get(); }

  /// The parameters to train, in the order of stages and registration. A parameter that two stages of this rank share appears
  /// once, since the optimizer must step it once.
  std::vector<named_parameter> parameters() const {
    std::vector<named_parameter> out;
    for (std::size_t s = 0; s < by_stage_.size(); ++s) {
      if (!by_stage_[s]) continue;
      for (parameter const& p : by_stage_[s]->trained()) {
        bool const known =
            std::any_of(out.begin(), out.end(), [&](named_parameter const& q) { return q.value.is_same(p.value); });
        if (!known)
          out.push_back({static_cast<int>(s), p.name, p.value, is_piece(p, comm_->topology()), p.cut_along, p.cut_over});
      }
    }
    return out;
  }

  /// Sets the `.grad` of shared parameters to this stage's gradients. If the stage's buffers are freed, first waits for the
  /// sums of finished stages, whose buffers are then freed, and allocates this stage's buffers.
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
    if (guard_ != nullptr) guard_->before_sum(*by_stage_[s], s);
    by_stage_[s]->start_sums(*comm_);
  }
  /// Starts the sums of all stages.
  void start_sums() {
    each([this](gradient_buckets& g) { g.start_sums(*comm_); });
  }
  /// Waits for the sums of all stages over the replicas.
  void wait_sums() { sum_wait_ = std::exchange(early_wait_, 0) + seconds_of_wait(); }
  /// Seconds that the last `wait_sums`, and the calls of `attach` before it, waited.
  double sum_wait() const { return sum_wait_; }

  /// Makes the comparison of gradients over the shards a part of the step, if there are several shards.
  /// \param every, exact as of `shard_agreement`
  void guard_shards(step_parts& parts, int every, bool exact) {
    if (comm_->topology().shards > 1) guard_ = &parts.make<shard_agreement>(*comm_, by_stage_, every, exact);
  }

  /// Sets all gradients to zero. Called once per step, before the first B or W.
  void zero() {
    each([](gradient_buckets& g) { g.zero(); });
  }
  /// Called between two runs of one step: applies the caller's changes of `.grad` to the gradients accumulated so far. If
  /// `.grad` was emptied (`zero_grad()`), the gradient becomes zero; if `.grad` was replaced, the gradient gets the new
  /// tensor's values, as in a training loop without a pipeline.
  /// \throws usage_error for a gradient that does not fit its parameter; and if all gradients of this rank that are in `.grad`
  /// were emptied, or filled with zeros, while any rank has half-precision parameters, whose float32 sums no `zero_grad`
  /// reaches
  void take_over_changes() {
    check_not_half_dropped();
    struct change {
      std::size_t stage, index;
      at::Tensor given;
    };
    std::vector<change> changes;
    each_detached([&](std::size_t s, std::size_t i, at::Tensor const& now) { changes.push_back({s, i, now}); });
    for (change const& c : changes) {
      // If two stages share a parameter, the first stage takes the tensor over and sets `.grad`; the second stage's gradient
      // becomes zero.
      at::Tensor const& now = by_stage_[c.stage]->trained()[c.index].value.grad();
      bool const taken = c.given.defined() && !now.is_same(c.given);
      by_stage_[c.stage]->take_over(c.index, taken ? at::Tensor() : c.given, static_cast<int>(c.stage));
    }
  }
  /// Notes that a run of a step is over, which another run of the same step will follow.
  void end_of_pass() { changes_ = changes(); }

  /// Refuses gradients that the backwards did not add to this rank's buffers. To be called before a step's gradients are read.
  /// \throws usage_error if `.grad` was emptied or replaced while the step's backwards ran
  void check_attached() const {
    each_detached([&](std::size_t s, std::size_t i, at::Tensor const& now) {
      throw usage_error("the gradient of stage " + std::to_string(s) + "'s " + by_stage_[s]->trained()[i].name + " was " +
                        (now.defined() ? "replaced" : "emptied") +
                        " while the step ran, by a hook or within a stage. Remedy: change gradients in place, or in "
                        "trainer_options::before_optimizer_step; zero_grad() before a step");
    });
  }

  /// The number of in-place operations on the gradients of this rank.
  std::int64_t changes() const {
    std::int64_t sum = 0;
    each([&](gradient_buckets const& g) { sum += g.changes(); });
    return sum;
  }

  /// Divides the parameters of each stage into one share per replica.
  /// \param whole true: each parameter is whole in one share
  void cut(bool whole) {
    topology const& where = comm_->topology();
    each([&](gradient_buckets& g) { g.cut(where.replicas, where.replica(), whole); });
  }

  /// Multiplies all gradients by a factor; with a sharded optimizer, only this replica's share.
  void scale(double factor) {
    each([factor](gradient_buckets& g) { g.scale(factor); });
  }
  /// Sets the `.grad` of the tensors that the optimizer steps for half-precision parameters to the gradients in the tensors' own
  /// dtype, until the next `zero`. \param stepped returns the tensor that is stepped for a parameter
  template <class Stepped>
  void round(Stepped const& stepped) {
    if (!half_here_) return;
    at::NoGradGuard const off;
    each([&](gradient_buckets const& g) {
      g.each_in_float([&](at::Tensor const& p, at::Tensor const& gradient) {
        at::Tensor const& to = stepped(p);
        to.mutable_grad() = gradient.to(to.scalar_type());
      });
    });
  }

  /// Refuses a change of `requires_grad`.
  /// \throws usage_error for a parameter that was frozen or unfrozen after the trainer was constructed
  void check_frozen() const {
    for (std::size_t s = 0; s < by_stage_.size(); ++s) {
      if (by_stage_[s]) by_stage_[s]->check_frozen(static_cast<int>(s));
    }
  }
  /// Refuses another dtype, shape or device of a trained parameter.
  /// \throws usage_error for a parameter that has another one than when the trainer was constructed
  void check_forms() const {
    for (std::size_t s = 0; s < by_stage_.size(); ++s) {
      if (by_stage_[s]) by_stage_[s]->check_forms(static_cast<int>(s));
    }
  }

  /// Computes the squared norm of each gradient, by stage and parameter, as `gradient_buckets::norm_numbers` numbers. Does not
  /// write numbers of a tied parameter whose norm another stage counts, nor of other replicas' shares.
  /// \param out receives the squared norms; complete once `numbers` was read, and must live until then, like this object
  /// \param clip largest norm, to which larger gradients are scaled; 0: no clipping
  /// \param numbers receives the requests for norms on an accelerator
  /// \param rounds whether the optimizer reads rounded gradients of half-precision parameters; false with masters
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
    bool const notes = rounds && half_here_;
    if (on_device.empty() && !notes) return;
    numbers.ask(norms_of(on_device), [this, out, clip, places, notes](std::span<double const> norms) {
      for (std::size_t k = 0; k < places.size(); ++k) out[places[k]] = norms[k] * norms[k];
      if (notes) note_roundings(out, clip);
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

  /// Calls `see(stage, index, .grad)` for each parameter whose `.grad` is detached, and is not one of this rank's gradients.
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
  bool any_in_float() const {
    bool found = false;
    each([&](gradient_buckets const& g) { g.each_in_float([&](auto const&...) { found = true; }); });
    return found;
  }
  void check_not_half_dropped() const {
    if (!half_on_any_) return;
    bool emptied = true, zero = changes() != changes_;
    std::string name;
    for (std::size_t s = 0; s < by_stage_.size(); ++s) {
      for (std::size_t i = 0; by_stage_[s] && i < by_stage_[s]->trained().size(); ++i) {
        parameter const& p = by_stage_[s]->trained()[i];
        if (detail::in_float(p.value)) continue;
        if (name.empty()) name = "stage " + std::to_string(s) + "'s " + p.name;
        emptied = emptied && !p.value.grad().defined();
        zero = zero && p.value.grad().defined() && !p.value.grad().any().item<bool>();
      }
    }
    if (name.empty() || (!emptied && !zero)) return;
    throw usage_error("zero_grad() after accumulate() dropped the gradients of " + name +
                          " and of all parameters in single precision, and keeps those in half precision, which are summed in "
                          "float32 outside of .grad. Remedy: trainer.drop_accumulated() on all ranks, in place of zero_grad()",
                      {.rank = comm_->topology().global_rank});
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

  /// Calls `see(stage's gradients, gradient, index, place)` for each gradient or block that this rank contributes to the norm.
  template <class See>
  void each_counted(See const& see) const {
    std::size_t first = 0;
    each([&](gradient_buckets const& g) {
      for (std::size_t i = 0; i < g.views().size(); first += g.norm_numbers(i++))
        g.each_counted(i, [&](counted_gradient const& one) { see(g, one, i, first + one.number); });
    });
  }

  /// Sets the norm of a gradient to infinity if the gradient is finite in single precision and overflows in half precision, in
  /// which the optimizer reads the gradient. If clipping limits norms to the largest half-precision number, no gradient
  /// overflows.
  void note_roundings(std::span<double> norms, double clip) const {
    each_counted([&](gradient_buckets const& g, counted_gradient const& of, std::size_t i, std::size_t place) {
      double const largest = largest_of(g.trained()[i].value.scalar_type());
      bool const clipped = clip > 0 && clip <= largest;
      // No element exceeds the norm, so only gradients with a large norm are searched.
      if (clipped || !(norms[place] > largest * largest)) return;
      if (of.values.to(g.trained()[i].value.scalar_type()).isinf().any().item<bool>())
        norms[place] = std::numeric_limits<double>::infinity();
    });
  }

  transport* comm_;
  std::vector<std::unique_ptr<gradient_buckets>> by_stage_;
  shard_agreement* guard_ = nullptr;  // a part of the step; null: one shard
  bool half_here_ = false;            // this rank has half-precision parameters
  bool half_on_any_ = false;          // a rank of the job has
  std::int64_t changes_ = 0;          // of gradients, at the end of a run that another one follows
  double sum_wait_ = 0, early_wait_ = 0;
};

}  // namespace chevron::detail
