#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>

#include <chevron/checkpoint/checkpoint_manifest.hpp>
#include <chevron/checkpoint/checkpoint_session.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/train/preflight.hpp>

/// \file
/// Compares the parameters that this job trains with those that a checkpoint's job trained, and fingerprints frozen parameters
/// that are in no file.

namespace chevron {

/// Options of `save_checkpoint`.
struct save_options {
  /// Leaves out frozen parameters. The manifest stores their fingerprints, which `load_checkpoint` compares with the parameters
  /// of the model. For adapters of a large model, whose frozen weights are read from another folder. Buffers are always saved.
  bool trained_only = false;
};

/// Options of `load_checkpoint` and `resume`.
struct load_options {
  /// Allows that this job trains other parameters than the job that saved. Newly trained parameters start without optimizer
  /// state, and with the learning rate of their group.
  bool allow_other_trained = false;
  /// Called on rank 0 with a sentence for each setting of the saved run with which this run does not go on, or goes on in place
  /// of its own: a learning rate, momentum that begins anew. Empty: LibTorch's warnings.
  std::function<void(std::string const&)> on_difference = {};
};

namespace detail {

/// A mark of a frozen tensor: dtype, shape and a fingerprint of the values.
inline std::string base_mark(at::Tensor const& t) { return dtype_and_shape(t) + " " + hexadecimal(fingerprint(t)); }

inline std::string words_for(saved_name const& one) { return "stage " + std::to_string(one.stage) + "'s " + one.name; }

/// Stores the mark of a frozen tensor, and compares it with the tensor's mark in this job's earlier checkpoints.
/// \throws checkpoint_error if marks differ, since one of the checkpoints could not be loaded
inline void keep_mark(checkpoint_session& session, saved_name const& one, std::string const& mark) {
  if (session.base.emplace(one, mark).first->second == mark) return;
  throw checkpoint_error(
      words_for(one) +
      " needs no gradient, so save_options::trained_only leaves this tensor out, but its values have "
      "changed since the checkpoint before. Remedy: keep a changing tensor as a buffer, or save without trained_only");
}

inline nlohmann::json base_to_json(std::map<saved_name, std::string> const& base) {
  auto out = nlohmann::json::array();
  for (auto const& [one, mark] : base) out.push_back({one.stage, one.name, mark});
  return out;
}

/// Differences between this model's parameters and a checkpoint's, over all ranks.
struct trained_differences {
  std::set<std::string> only_now, only_then;  // trained only by this job, only by the saved job
  std::set<std::string> other_base;

  nlohmann::json to_json() const { return nlohmann::json::array({only_now, only_then, other_base}); }
  void add_from_json(nlohmann::json const& from) {
    only_now.merge(from.at(0).get<std::set<std::string>>());
    only_then.merge(from.at(1).get<std::set<std::string>>());
    other_base.merge(from.at(2).get<std::set<std::string>>());
  }

  /// Checks the differences. \throws checkpoint_error for differences that `options` do not allow
  void refuse(std::filesystem::path const& folder, load_options const& options) const {
    if (!other_base.empty()) {
      throw checkpoint_error(folder.string() + ": was saved with trained_only, beside frozen parameters with other values than " +
                             some_of(other_base) +
                             " here. Remedy: load into the stages the weights that the saving run began with");
    }
    if (options.allow_other_trained || (only_now.empty() && only_then.empty())) return;
    std::string differs;
    if (!only_now.empty())
      differs = some_of(only_now) + (only_now.size() == 1 ? " is" : " are") + " trained in this run, and not in the saved one";
    if (!only_then.empty())
      differs += (differs.empty() ? "" : "; ") + some_of(only_then) + (only_then.size() == 1 ? " was" : " were") +
                 " trained in the saved run, and not in this one";
    throw checkpoint_error(folder.string() + ": was saved by a run that trained other parameters: " + differs +
                           ". Remedy: freeze the parameters that the saved run froze, or load_options::allow_other_trained to go "
                           "on with another set");
  }

 private:
  static std::string some_of(std::set<std::string> const& all) {
    constexpr std::size_t most = 4;
    std::string out;
    std::size_t count = 0;
    for (std::string const& one : all) {
      if (count == most) return out + " and " + std::to_string(all.size() - most) + " more";
      out += (count++ == 0 ? "" : ", ") + one;
    }
    return out;
  }
};

}  // namespace detail

}  // namespace chevron
