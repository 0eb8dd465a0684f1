#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/optim/optimizer.h>

#include <nlohmann/json.hpp>

#include <chevron/base/format.hpp>
#include <chevron/checkpoint/checkpoint_index.hpp>
#include <chevron/checkpoint/checkpoint_manifest.hpp>
#include <chevron/checkpoint/checkpoint_ranks.hpp>
#include <chevron/checkpoint/frozen_base.hpp>
#include <chevron/checkpoint/optimizer_file.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/checkpoint/shard_cuts.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/buffers.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/trainer.hpp>

/// \file
/// Loads a checkpoint's tensors into a trainer: finds and checks all of them, then copies them.

namespace chevron::detail {

/// The tensors of a checkpoint for the parameters, buffers and optimizer of one rank's trainer.
class checkpoint_loader {
 public:
  /// \param about the checkpoint's manifest; outlives the loader
  checkpoint_loader(trainer& train, std::filesystem::path folder, manifest const& about)
      : train_(train),
        optimizer_(trainer_access::optimizer(train)),
        folder_(std::move(folder)),
        about_(about) {}

  /// Finds the tensors, checks the fingerprint of each file used, and compares names, shapes, dtypes, ties, trained and frozen
  /// parameters, and the optimizer. Changes nothing. Collective. \throws checkpoint_error, on every rank, for a difference
  void find(load_options const& options) {
    transport& comm = train_.comm();
    std::map<std::string, std::set<saved_name>> same;
    for (std::string const& text : comm.all_gather_text(to_json(same_parameters(train_.stages())).dump()))
      add_from_json(same, nlohmann::json::parse(text));
    auto taken = nlohmann::json::array();
    together(comm, [&] {
      cuts_.emplace(comm, train_.stages());
      std::string const kind = compared_kind();
      index_.emplace(folder_, about_, train_.stages().size());
      index_->compare_ties(same);
      std::map<void const*, double> rate_of;
      auto const rates_here = rates_of(optimizer_);
      groups_ = groups_of(optimizer_);
      for (std::size_t s = 0; s < train_.stages().size(); ++s) {
        if (!train_.stages()[s]) continue;
        for (parameter const& p : kept_of(train_.stages()[s])) {
          found_tensor const& one = found_.emplace_back(find_tensor(p, s, same, kind, rates_here, rate_of));
          if (comm.topology().replica() == 0) taken.push_back({one.from.stage, one.from.name});
        }
      }
      if (train_.optimizer() != nullptr) rates_ = rates_by_group(optimizer_, rate_of, folder_);
      compare_rates();
    });
    compare_with_other_ranks(taken, options);
  }

  /// Sentences about settings of the saved run with which this run does not go on, or goes on in place of its own: a rate that
  /// differs, momentum that begins anew. Of this rank.
  std::set<std::string> const& notes() const { return notes_; }

  /// Copies the tensors that `find` has found, and sets the groups' learning rates. Collective.
  void copy() {
    together(train_.comm(), [&] {
      at::NoGradGuard const off;
      for (found_tensor const& one : found_) {
        at::Tensor to = one.to.value;
        if (one.base == nullptr) copy_into(to, index_->model(one.from.stage).read(one.from.name, cuts_->part(to)));
        if (train_.optimizer() != nullptr && to.requires_grad()) copy_state(one);
      }
      optimizer_.set_rates(rates_);
    });
  }

 private:
  struct found_tensor {
    parameter to;
    saved_name here, from;
    std::string const* base;          // fingerprint of a frozen parameter that no file holds; null: a file does
    std::optional<saved_name> state;  // name of its optimizer state; empty: not trained now, or not then
  };

  /// Returns the kind of this trainer's optimizer. \throws checkpoint_error if the checkpoint has another kind
  std::string compared_kind() const {
    std::string kind = kind_to_save(train_.optimizer());
    if (train_.optimizer() != nullptr && kind != about_.optimizer) {
      throw checkpoint_error(folder_.string() + ": was trained with " +
                             (about_.optimizer.empty() ? "no optimizer" : about_.optimizer) + ", this job steps " + kind +
                             ". Remedy: the same optimizer");
    }
    return kind;
  }

  /// Finds and checks one tensor. \param same names of each tied parameter, by a key \param rates learning rates here, by
  /// parameter \param saved_rates receives the saved learning rate of the parameter
  found_tensor find_tensor(parameter const& p, std::size_t stage, std::map<std::string, std::set<saved_name>> const& same,
                           std::string const& kind, std::map<void const*, double> const& rates,
                           std::map<void const*, double>& saved_rates) {
    std::set<saved_name> also;
    for (auto const& [word, all] : same) {
      if (all.count({stage, p.name}) != 0) also = all;
    }
    saved_name const there = index_->find(stage, p.name, also);
    saved_name const here{stage, p.name};
    index_->compare_form(there, p.value, *cuts_);
    index_->compare_cut(there, p, *cuts_);
    void const* const key = p.value.unsafeGetTensorImpl();
    auto state = index_->trained_as(there);
    if (bool const trained = rates.count(key) != 0; trained != state.has_value()) {
      (trained ? differences_.only_now : differences_.only_then).insert(words_for(here));
      state.reset();
    }
    if (state) {
      safetensors_file const& states = index_->optimizer(state->stage);
      check_optimizer_state(states, kind, state->name, p.value, optimizer_, *cuts_);
      saved_rates[key] = states.read("lr/" + state->name).item<double>();
      check_options(states, state->name, p.value, here);
    }
    return {p, here, there, index_->base_mark_of(there), state};
  }

  /// Compares the options of a trained parameter's group with the saved state. LibTorch's SGD, and Chevron's optimizers, begin
  /// with an empty state in place of the missing one.
  /// \throws checkpoint_error if the optimizer cannot step without the missing state
  void check_options(safetensors_file const& states, std::string const& saved, at::Tensor const& p, saved_name const& here) {
    torch::optim::Optimizer const& of = *train_.optimizer();
    std::size_t const group = groups_.at(p.unsafeGetTensorImpl());
    missing_state const missing = missing_state_of(states, saved, of.param_groups()[group].options());
    if (missing.option.empty() || about_.next_step == 0) return;
    std::string const fault = "group " + std::to_string(group) + " of the optimizer has the option " + missing.option + " " +
                              missing.value + ", and the checkpoint has no " + missing.tensor;
    std::string const of_class = class_name_of(of);
    if (of_class == "SGD" || of_class.starts_with("fused")) {
      notes_.insert(fault + " of its parameters, which begins anew");
      return;
    }
    refuse_file(states.path(), fault + " of " + words_for(here) +
                                   ": the saved run trained without the option. Remedy: the option as in the saved run; or "
                                   "load_weights, and a new optimizer");
  }

  /// Compares the learning rates of this run with those of the checkpoint: of groups or, with a schedule, of the last step.
  void compare_rates() {
    if (auto const& schedule = trainer_access::context(train_).options().learning_rate; schedule) {
      if (!about_.learning_rate || about_.next_step == 0) return;
      double const here = schedule(about_.next_step - 1);
      if (here == *about_.learning_rate) return;
      auto const [now, saved] = texts_apart(here, *about_.learning_rate);
      notes_.insert("trainer_options::learning_rate gives " + now + " for step " + std::to_string(about_.next_step - 1) +
                    ", which was trained with " + saved +
                    ": training goes on with the rates of learning_rate, not with those of the saved run");
      return;
    }
    for (std::size_t g = 0; g < rates_.size(); ++g) {
      double const here = train_.optimizer()->param_groups()[g].options().get_lr();
      if (here == rates_[g]) continue;
      auto const [saved, option] = texts_apart(rates_[g], here);
      notes_.insert("group " + std::to_string(g) + " of the optimizer goes on with the checkpoint's learning rate, " + saved +
                    ", and not with its option, " + option +
                    ". For another rate: set_lr() after loading, or trainer_options::learning_rate");
    }
  }

  /// Checks over all ranks that no tensor of the checkpoint is left, and that differences are allowed.
  /// \param taken names of the tensors that this rank loads
  void compare_with_other_ranks(nlohmann::json const& taken, load_options const& options) {
    for (found_tensor const& one : found_) {
      if (one.base != nullptr && *one.base != base_mark(cuts_->whole(one.to.value, one.to.value)))
        differences_.other_base.insert(words_for(one.here));
    }
    std::set<saved_name> all_taken;
    for (std::string const& text : train_.comm().all_gather_text(nlohmann::json::array({taken, differences_.to_json()}).dump())) {
      auto const of_rank = nlohmann::json::parse(text);
      for (auto const& one : of_rank[0]) all_taken.insert({one[0].get<std::size_t>(), one[1].get<std::string>()});
      differences_.add_from_json(of_rank[1]);
    }
    index_->check_taken(all_taken);
    differences_.refuse(folder_, options);
  }

  /// Sets a trained parameter's optimizer state and master.
  void copy_state(found_tensor const& one) {
    at::Tensor const& to = one.to.value;
    rank_optimizer::kept saved;
    if (one.state)
      saved = kept_in(index_->optimizer(one.state->stage), about_.optimizer, one.state->name, to, optimizer_, *cuts_);
    optimizer_.set_whole(to, saved);
  }

  trainer& train_;
  rank_optimizer& optimizer_;
  std::filesystem::path const folder_;
  manifest const& about_;
  std::optional<checkpoint_index> index_;
  std::optional<shard_cuts> cuts_;
  std::vector<found_tensor> found_;
  std::vector<double> rates_;                  // by group of the optimizer
  std::map<void const*, std::size_t> groups_;  // of parameters
  std::set<std::string> notes_;
  trained_differences differences_;
};

}  // namespace chevron::detail
