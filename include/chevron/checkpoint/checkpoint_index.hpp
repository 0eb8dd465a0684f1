#pragma once

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <chevron/checkpoint/checkpoint_folder.hpp>
#include <chevron/checkpoint/checkpoint_manifest.hpp>
#include <chevron/checkpoint/optimizer_file.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/checkpoint/shard_cuts.hpp>
#include <chevron/run/core/error.hpp>

/// \file
/// Finds each tensor of a model in a checkpoint.

namespace chevron::detail {

/// Finds a model's tensors in a checkpoint: by name, and if several stages have a tensor of that name also by the stage's
/// number. Reads only the headers of files until a file's tensors are used.
class checkpoint_index {
 public:
  checkpoint_index(std::filesystem::path folder, manifest const& about, std::size_t stages_here)
      : folder_(std::move(folder)), about_(&about), same_stages_(about.stages == stages_here), stages_here_(stages_here) {
    for (std::size_t s = 0; s < about.stages; ++s) {
      models_.emplace_back(stage_file(folder_, "model", s));
      for (std::string const& name : models_.back().names()) where_[name].push_back(s);
    }
    for (auto const& [one, mark] : about.base) where_[one.name].push_back(one.stage);
    for (auto const& [word, all] : about.same) {
      for (saved_name const& one : all) word_of_[one] = word;
    }
  }

  /// Returns the checkpoint's file of a stage's parameters and buffers, after checking its fingerprint.
  safetensors_file const& model(std::size_t s) {
    be_whole(models_[s].path());
    return models_[s];
  }
  /// Returns the checkpoint's file of a stage's optimizer state, after checking its fingerprint.
  safetensors_file const& optimizer(std::size_t s) {
    auto found = optimizers_.find(s);
    if (found == optimizers_.end()) {
      auto const file = stage_file(folder_, "optimizer", s);
      found = optimizers_.emplace(s, safetensors_file(file)).first;
      be_whole(file);
    }
    return found->second;
  }

  /// Returns stage and name of a parameter in the checkpoint.
  /// \param s stage of this model \param also names of the same parameter in other stages of this model
  /// \throws checkpoint_error if the checkpoint lacks the parameter, or several of its stages have different parameters of that
  /// name
  saved_name find(std::size_t s, std::string const& name, std::set<saved_name> const& also) {
    if (auto const there = held(s, name)) return *there;
    for (saved_name const& other : also) {
      if (auto const there = held(other.stage, other.name)) return *there;
    }
    all_be_whole();
    throw checkpoint_error(folder_.string() + ": stage " + std::to_string(s) + " needs " + name +
                           ", which the checkpoint does not hold. Remedy: the model that was saved");
  }

  /// Returns the fingerprint of a frozen parameter that is in no file; null if the parameter is in a file.
  std::string const* base_mark_of(saved_name const& one) const {
    auto const found = about_->base.find(one);
    return found == about_->base.end() ? nullptr : &found->second;
  }

  /// Returns the name under which an optimizer file stores a parameter's state: the parameter's name, or another name of the
  /// same tied parameter. Empty if the parameter was not trained.
  std::optional<saved_name> trained_as(saved_name const& one) {
    auto const has = [&](saved_name const& at) { return optimizer(at.stage).holds("lr/" + at.name); };
    if (has(one)) return one;
    if (auto const word = word_of_.find(one); word != word_of_.end()) {
      for (saved_name const& other : about_->same.at(word->second)) {
        if (has(other)) return other;
      }
    }
    return {};
  }

  /// Whether two names of the checkpoint belong to one parameter.
  bool are_one(saved_name const& a, saved_name const& b) const {
    if (a == b) return true;
    auto const of_a = word_of_.find(a), of_b = word_of_.find(b);
    return of_a != word_of_.end() && of_b != word_of_.end() && of_a->second == of_b->second;
  }

  /// Checks that each tied parameter of this model is one parameter in the checkpoint. \param same names of each tied
  /// parameter, by a key
  /// \throws checkpoint_error if the names belong to several parameters of the checkpoint
  void compare_ties(std::map<std::string, std::set<saved_name>> const& same) {
    for (auto const& [word, all] : same) {
      saved_name const& named = *all.begin();
      saved_name const first = find(named.stage, named.name, all);
      for (saved_name const& one : all) {
        if (are_one(first, find(one.stage, one.name, all))) continue;
        throw checkpoint_error(folder_.string() + ": stage " + std::to_string(named.stage) + "'s " + named.name + " and stage " +
                               std::to_string(one.stage) + "'s " + one.name +
                               " are one parameter of this model, and two of the saved one. Remedy: the model that was saved");
      }
    }
  }
  /// Compares the cut of a tensor that shards saved in pieces with its cut here: a fused weight whose blocks were not declared
  /// was saved with the pieces in a row, in another order than its blocks. \throws checkpoint_error for other blocks in the same
  /// dimension
  void compare_cut(saved_name const& there, parameter const& p, shard_cuts const& cuts) const {
    auto const saved = about_->cuts.find(there);
    if (saved == about_->cuts.end() || p.held != over_shards::cut || p.cut_over != rank_group::shards) return;
    tensor_cut const* const cut = cuts.of(p.value);
    saved_cut const here{p.cut_along, cut == nullptr ? p.cut_blocks : cut->blocks()};
    if (saved->second.along != here.along || saved->second.blocks == here.blocks) return;
    auto const in_words = [](saved_cut const& of) {
      std::string out;
      for (std::int64_t const size : of.blocks) out += (out.empty() ? "" : " + ") + std::to_string(size);
      return out + " along dimension " + std::to_string(of.along);
    };
    throw checkpoint_error(folder_.string() + ": " + there.name + " was saved by shards that cut blocks of " +
                           in_words(saved->second) + ", and is declared as blocks of " + in_words(here) +
                           " in this job: loading would put elements into wrong places. Remedy: stage.cut as in the saved run");
  }
  /// Compares the shape and dtype of a tensor in the files with this model's.
  /// \param here this model's tensor, or this shard's piece of it \throws checkpoint_error if shape or dtype differ
  void compare_form(saved_name const& there, at::Tensor const& here, shard_cuts const& cuts) {
    safetensors_file const& file = model(there.stage);
    if (base_mark_of(there) != nullptr) return;
    auto const dtype = file.dtype(there.name);
    if (file.shape(there.name) == cuts.shape(here) && dtype == here.scalar_type()) return;
    auto const saved = about_->cuts.find(there);
    std::string const joined =
        saved == about_->cuts.end() ? "" : ", joined from shards' pieces along dimension " + std::to_string(saved->second.along);
    throw checkpoint_error(file.path().string() + ": " + there.name + " is " + c10::toString(dtype) + " " +
                           plain_shape(file.shape(there.name)) + joined + ", the model's is " + cuts.words(here) +
                           ". Remedy: the model that was saved" +
                           (joined.empty() ? "" : "; stage.cut with the dimension in which shards hold pieces"));
  }

  /// Checks that this model has all tensors of the checkpoint. \throws checkpoint_error naming a tensor that the model lacks
  void check_taken(std::set<saved_name> const& taken) {
    std::set<std::string> words;
    for (saved_name const& one : taken) {
      if (auto const word = word_of_.find(one); word != word_of_.end()) words.insert(word->second);
    }
    std::size_t held = 0;
    std::optional<saved_name> left;
    for (auto const& [name, places] : where_) {
      held += places.size();
      for (std::size_t const s : places) {
        saved_name const one{s, name};
        auto const word = word_of_.find(one);
        if (taken.count(one) == 0 && (word == word_of_.end() || words.count(word->second) == 0) && !left) left = one;
      }
    }
    if (!left) return;
    all_be_whole();
    throw checkpoint_error(folder_.string() + ": has " + std::to_string(held) + " tensors, and this model " +
                           std::to_string(taken.size()) + ": the model lacks " + left->name + " of the saved stage " +
                           std::to_string(left->stage) + ". Remedy: the model that was saved");
  }

 private:
  std::optional<saved_name> held(std::size_t s, std::string const& name) const {
    auto const found = where_.find(name);
    if (found == where_.end()) return {};
    auto const& places = found->second;
    if (same_stages_ && std::count(places.begin(), places.end(), s) == 1) return saved_name{s, name};
    for (std::size_t const other : places) {
      if (are_one({places[0], name}, {other, name})) continue;
      throw checkpoint_error(folder_.string() + ": stage " + std::to_string(s) + " needs " + name + ", which " +
                             std::to_string(places.size()) + " of the checkpoint's " + std::to_string(about_->stages) +
                             " stages have, with different values: this job of " + std::to_string(stages_here_) +
                             " stages cannot choose one by the stage's number. Remedy: as many stages as were saved, or modules "
                             "registered under names that differ between stages");
    }
    return saved_name{places[0], name};
  }

  /// Checks the fingerprints of all model files before a name is refused: the name may come from a file of another checkpoint.
  void all_be_whole() {
    for (safetensors_file const& one : models_) be_whole(one.path());
  }

  void be_whole(std::filesystem::path const& file) {
    if (!whole_.insert(file).second) return;
    check_whole(file, *about_, folder_);
  }

  std::filesystem::path folder_;
  manifest const* about_;
  bool same_stages_;
  std::size_t stages_here_;
  std::vector<safetensors_file> models_;
  std::map<std::size_t, safetensors_file> optimizers_;
  std::map<std::string, std::vector<std::size_t>> where_;  // by name: stages with a tensor of that name
  std::map<saved_name, std::string> word_of_;
  std::set<std::filesystem::path> whole_;
};

}  // namespace chevron::detail
