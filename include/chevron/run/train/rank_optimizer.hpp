#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/train/call_factory.hpp>
#include <chevron/run/train/collective_numbers.hpp>
#include <chevron/run/train/master_parameters.hpp>
#include <chevron/run/train/optimizer_calls.hpp>
#include <chevron/run/train/optimizer_factory.hpp>
#include <chevron/run/train/optimizer_share.hpp>
#include <chevron/run/train/optimizer_snapshot.hpp>
#include <chevron/run/train/optimizer_state.hpp>
#include <chevron/run/train/rank_gradients.hpp>
#include <chevron/run/train/trainer_options.hpp>

/// \file
/// The optimizer of one rank, with masters, shares and snapshots of the parameters that the optimizer steps.

namespace chevron::detail {

/// The optimizer of one rank. Its groups contain parameters, float32 masters (`trainer_options::master_parameters`), or this
/// replica's pieces (`trainer_options::shard`). Callers name whole parameters, but for `stepped` and `each_stepped`, which give
/// tensors of the groups. A snapshot undoes a step. With post-validation a step is provisional until the verdict
/// (step_end.hpp).
class rank_optimizer {
 public:
  /// Calls the factory, and divides parameters into shares if the options say so. Collective.
  /// \param gradients of this rank \param collectives from which gathers of parameters over the replicas claim their numbers
  /// \param options these, `comm` and `gradients` must outlive this object
  /// \throws usage_error as `call_factory`
  rank_optimizer(transport& comm, rank_gradients& gradients, collective_numbers& collectives, optimizer_factory const& make,
                 trainer_options const& options)
      : comm_(&comm),
        gradients_(&gradients),
        options_(&options),
        parameters_(gradients.parameters()),
        masters_(options.master_parameters, parameters_),
        optimizer_(call_factory(make, parameters_, stepped(), options)) {
    warn_of_left_out(comm, optimizer_.get(), stepped());
    if (options.shard != sharding::nothing) {
      gradients.cut(optimizer_ && !make.steps_pieces() && kind_of(*optimizer_).empty());
      if (optimizer_) share_ = std::make_unique<optimizer_share>(*optimizer_, gradients, masters_, comm.topology(), collectives);
    }
    calls_ = optimizer_calls(optimizer_.get());
  }
  rank_optimizer(rank_optimizer const&) = delete;
  rank_optimizer& operator=(rank_optimizer const&) = delete;

  /// LibTorch's optimizer; null on a rank without trained parameters.
  torch::optim::Optimizer* get() const { return optimizer_.get(); }
  /// The whole parameters that this rank trains, in the order of stages and registration.
  std::vector<named_parameter> const& parameters() const { return parameters_; }
  /// The same list with masters in place of the parameters that have one.
  std::vector<named_parameter> stepped() const { return masters_.stepped(parameters_); }
  /// The tensor that an unsharded optimizer steps for a parameter.
  at::Tensor const& stepped(at::Tensor const& p) const { return masters_.stepped(p); }
  /// Whether this rank steps a share of its parameters.
  bool sharded() const { return share_ != nullptr; }
  /// Whether the gathers of a step's parameters end after the step.
  bool gathers_late() const { return share_ && (options_->overlap_gather || options_->post_validation); }
  /// The stage and name of the parameter that a tensor of the groups steps, for errors.
  std::string words_of(at::Tensor const& of_groups) const {
    at::Tensor const p = share_ ? share_->parameter_of(of_groups) : masters_.parameter_of(of_groups);
    return p.defined() ? words_for(parameters_, p) : "a parameter";
  }

  /// Copies the caller's writes to parameters since the last step into masters.
  void take_changes() {
    if (options_->master_parameters) masters_.take_changes();
  }
  /// Begins the end of a step: records the learning rates to which `undo` returns.
  void begin() {
    provisional_ = false;
    rates_ = group_rates(optimizer_.get());
  }
  /// Sets learning rate and `.grad` of all tensors of the groups. \param rate ignored without `trainer_options::learning_rate`
  void set_up(double rate) {
    if (!optimizer_) return;
    if (options_->learning_rate) set_group_rates(*optimizer_, rate);
    share_ ? share_->set_gradients() : gradients_->round([this](at::Tensor const& p) { return masters_.stepped(p); });
  }
  /// Steps with the gradients that `set_up` has set.
  void step() {
    if (!optimizer_) return;
    optimizer_->step();
    if (options_->master_parameters) masters_.round();
  }
  /// Takes a snapshot, and steps. The step stands unless `undo` follows.
  void step_provisionally(double rate) {
    if (!optimizer_) return;
    before_.take(*optimizer_);
    set_up(rate);
    step();
    provisional_ = true;
  }
  /// Whether a provisional step was taken since `begin`, and not undone.
  bool provisional() const { return provisional_; }
  /// Restores parameters, state and learning rates from before the provisional step, if one was taken; learning rates in any
  /// case. Waits for the gathers first. Collective over the replicas.
  void undo() {
    finish_gather();
    if (provisional_) before_.put_back(*optimizer_);
    if (options_->master_parameters) masters_.round();
    set_rates(rates_);
    provisional_ = false;
  }
  /// Learning rates by group.
  std::vector<double> rates() const { return group_rates(optimizer_.get()); }
  /// Sets learning rates by group.
  void set_rates(std::vector<double> const& rates) {
    if (optimizer_) set_group_rates(*optimizer_, rates);
  }

  /// Starts the gathers of the parameters that replicas stepped. Collective over the replicas. \param step number of the step
  void start_gather(long step) {
    if (share_) share_->start_gather(*comm_, step);
  }
  /// Waits for the gathers: of `stage`; if empty, of all stages. Collective over the replicas.
  void finish_gather(std::optional<int> stage = {}) {
    if (share_) share_->finish_gather(*comm_, stage);
  }

  /// Whether a gather is under way.
  bool gathering() const { return share_ && share_->gathers(); }

  /// Records the optimizer at the end of a step, for `check_unchanged`. \param pending whether the step's verdict is to come
  void note(bool pending) {
    if (pending && optimizer_) before_.note_versions(*optimizer_);
    calls_.note(optimizer_.get());
  }
  /// Checks the optimizer and its tensors for changes by the caller since `note`. To be called before anything else waits for
  /// the gathers.
  /// \param step number of the last step \param pending whether its verdict is to come
  /// \throws usage_error for parameters that were changed while their gather is under way; for parameters, or the optimizer's
  /// state, that were changed while the step is pending, since `undo` would overwrite the change; for a call of the optimizer's
  /// `step`; and for tensors that were added to the optimizer's groups
  void check_unchanged(long step, bool pending, error_context const& here) {
    calls_.check_groups(optimizer_.get(), here);
    calls_.check_not_stepped(optimizer_.get(), step, here);
    if (pending && optimizer_) {
      at::Tensor const rounded = masters_.changed(), in_groups = before_.changed(*optimizer_);
      if (rounded.defined() || in_groups.defined()) {
        throw usage_error((rounded.defined() ? words_for(parameters_, rounded) : words_of(in_groups)) +
                              ", or the optimizer's state for this parameter, was changed after step " + std::to_string(step) +
                              ". With post_validation that step may yet be undone, together with the change. Remedy: "
                              "trainer.synchronize() before the change",
                          here);
      }
    }
    at::Tensor const changed = share_ ? share_->changed() : at::Tensor();
    if (!changed.defined()) return;
    throw usage_error(words_for(parameters_, changed) + " was changed after step " + std::to_string(step) +
                          ", while the values that other replicas stepped are still being gathered (" +
                          (pending ? "post_validation" : "overlap_gather") +
                          "): the gather overwrites a part of the change. Remedy: trainer.synchronize() before the change",
                      here);
  }
  /// Checks the rates that the caller has set for the next step. \throws usage_error for a rate that no step can use
  void check_rates(error_context const& here) const {
    if (!options_->learning_rate) calls_.check_rates(optimizer_.get(), here);
  }

  /// The options that a parameter is stepped with, on this or another replica; null for a parameter that is in no group.
  torch::optim::OptimizerOptions const* options_of(at::Tensor const& p) const {
    if (share_) return share_->options_of(p);
    if (!optimizer_) return nullptr;
    for (auto const& group : std::as_const(*optimizer_).param_groups()) {
      for (at::Tensor const& one : group.params()) {
        if (one.is_same(masters_.stepped(p))) return &group.options();
      }
    }
    return nullptr;
  }
  /// Calls `see(tensor in a group, element of a parameter that the tensor is rounded into, state)` for each tensor of the groups.
  /// The second is undefined for a tensor that is no master; the third is null without state, and for an optimizer of an unknown
  /// class.
  template <class See>
  void each_stepped(See const& see) const {
    if (!optimizer_) return;
    bool const known = !kind_of(*optimizer_).empty();
    for (auto const& group : optimizer_->param_groups()) {
      for (at::Tensor const& t : group.params()) see(t, masters_.rounded(t), known ? state_of(t) : nullptr);
    }
  }
  /// Visits master and state of a parameter of an unsharded optimizer, which equal copies have in common.
  /// \param tensor, number as of `visit_state`
  template <class SeeTensor, class SeeNumber>
  void visit_copied(at::Tensor const& p, SeeTensor const& tensor, SeeNumber const& number) const {
    if (share_) return;
    at::Tensor const& stepped = masters_.stepped(p);
    if (masters_.has(p)) tensor(stepped);
    if (!optimizer_ || kind_of(*optimizer_).empty()) return;
    if (auto* const state = state_of(stepped)) {
      visit_state(*state, [&](char const*, at::Tensor& t) { tensor(t); }, [&](char const*, auto& value) { number(value); });
    }
  }
  /// Calls `see(tensor)` for a parameter's master and optimizer state on this rank, and for the snapshot's copies.
  /// \param p a parameter of this rank
  /// \returns false if the optimizer is of an unknown class, whose state cannot be listed
  template <class See>
  bool each_tensor_of(at::Tensor const& p, See const& see) const {
    if (!optimizer_) return true;
    if (kind_of(*optimizer_).empty()) return false;
    at::Tensor const piece = share_ ? share_->piece_of(p) : masters_.stepped(p);
    if (!piece.defined()) return true;
    if (masters_.has(p)) see(piece);
    if (auto* const state = state_of(piece)) {
      for (at::Tensor const& t : tensors_of(*state)) see(t);
    }
    before_.each_copy([&](void const* owner, at::Tensor const& copy) {
      if (owner == piece.unsafeGetTensorImpl()) see(copy);
    });
    return true;
  }

  /// The whole parameters of a group, those in other replicas' shares included.
  std::vector<at::Tensor> group(std::size_t number) const {
    if (share_) return share_->group(number);
    std::vector<at::Tensor> all = optimizer_->param_groups()[number].params();
    for (at::Tensor& p : all) p = masters_.parameter_of(p);
    return all;
  }
  /// Whether a parameter has a master, on this or another replica.
  bool has_master(at::Tensor const& p) const { return masters_.has(p); }
  /// The dtype in which a parameter is stepped, and of its optimizer state.
  at::ScalarType dtype_of(at::Tensor const& p) const { return masters_.dtype_of(p); }

  /// State and master of a whole parameter.
  struct kept {
    std::shared_ptr<torch::optim::OptimizerParamState> state;  ///< null: no state
    at::Tensor master;                                         ///< undefined: no master
  };
  /// Returns state and master of a whole parameter, on replica 0. Collective over the replicas if the optimizer is sharded.
  kept whole(at::Tensor const& p) const {
    kept out;
    if (share_) {
      out.state = share_->whole_state(*comm_, p);
      if (masters_.has(p)) out.master = share_->whole_of(*comm_, p, share_->piece_of(p));
      return out;
    }
    if (masters_.has(p)) out.master = masters_.stepped(p).detach();
    out.state = {state_of(masters_.stepped(p)), [](auto*) {}};  // owned by the optimizer
    return out;
  }
  /// Sets state and master of a parameter. Adagrad keeps the state that its constructor made where `whole` has none.
  /// \param whole of the whole parameter; its master undefined: the master becomes the parameter's values; its state null: the
  /// state is removed
  void set_whole(at::Tensor const& p, kept const& whole) {
    at::Tensor const& m = whole.master;
    if (masters_.has(p)) masters_.set(p, share_ && m.defined() ? share_->part_of(p, m) : m);
    if (whole.state == nullptr && kind_of(*optimizer_) == "Adagrad") return;
    if (share_) return share_->take_state(p, whole.state.get());
    auto* const key = masters_.stepped(p).unsafeGetTensorImpl();
    if (whole.state == nullptr) {
      optimizer_->state().erase(key);
    } else {
      optimizer_->state()[key] = whole.state->clone();  // shares the tensors
    }
  }

 private:
  /// The state of a tensor of the groups; null if it has none.
  torch::optim::OptimizerParamState* state_of(at::Tensor const& of_groups) const {
    auto const found = optimizer_->state().find(of_groups.unsafeGetTensorImpl());
    return found == optimizer_->state().end() ? nullptr : found->second.get();
  }

  transport* comm_;
  rank_gradients* gradients_;
  trainer_options const* options_;
  std::vector<named_parameter> parameters_;
  master_parameters masters_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<optimizer_share> share_;  // null unless the optimizer is sharded
  optimizer_calls calls_;
  optimizer_snapshot before_;
  bool provisional_ = false;
  std::vector<double> rates_;  // by group, at `begin`
};

}  // namespace chevron::detail
