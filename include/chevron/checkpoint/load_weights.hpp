#pragma once

#include <fnmatch.h>

#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>

#include <chevron/checkpoint/checkpoint_ranks.hpp>
#include <chevron/checkpoint/shard_cuts.hpp>
#include <chevron/checkpoint/weight_folder.hpp>
#include <chevron/checkpoint/weight_names.hpp>
#include <chevron/checkpoint/weight_ranks.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/evaluator.hpp>
#include <chevron/run/train/trainer.hpp>

/// \file
/// Loads a model's weights from a folder of Hugging Face's layout.

namespace chevron {

/// Options of `load_weights`.
struct load_weights_options {
  /// Tensors of the folder that the model need not have, as patterns of fnmatch(3): `*.rotary_emb.inv_freq`, or `*` for all.
  std::vector<std::string> may_stay{};
};

namespace detail {

/// The differences between a folder and a model.
struct weight_differences {
  std::set<std::string> missing, misshapen, surplus;

  /// The remedy for a folder that a wrapper of the model has saved, whose names have the wrapper's word; empty if no such name
  /// is the model's without the word.
  std::string wrapper_remedy() const {
    struct wrapper {
      std::string word, made_by, remedy;
    };
    for (wrapper const& one : {wrapper{"_orig_mod.", "torch.compile", "model._orig_mod"},
                               {"module.", "torch's DataParallel or DistributedDataParallel", "model.module"},
                               {"base_model.model.", "peft", "model.merge_and_unload()"}}) {
      bool const found = std::any_of(surplus.begin(), surplus.end(), [&](std::string name) {
        for (std::size_t at = 0; (at = name.find(one.word, at)) != std::string::npos;) name.erase(at, one.word.size());
        return missing.contains(name);
      });
      if (found) {
        return ". Names have `" + one.word + "`, as " + one.made_by + " saves them. Remedy: save the model itself, " +
               one.remedy + ".save_pretrained(folder)";
      }
    }
    return "";
  }

  bool any() const { return !missing.empty() || !misshapen.empty() || !surplus.empty(); }

  std::string text() const {
    std::string out;
    auto const add = [&](std::set<std::string> const& all, char const* one, char const* several) {
      if (all.empty()) return;
      bool const shortened = all.size() > most_listed;
      out += (out.empty() ? "" : "; ") + std::to_string(all.size()) + " " + (all.size() == 1 ? one : several) +
             (shortened ? ", such as " : ": ");
      std::size_t count = 0;
      for (std::string const& each : all) {
        if (shortened && count == most_examples) break;
        out += (count++ == 0 ? "" : ", ") + each;
      }
    };
    add(missing, "tensor is missing", "tensors are missing");
    add(misshapen, "tensor does not fit the model", "tensors do not fit the model");
    add(surplus, "tensor is not the model's", "tensors are not the model's");
    return out;
  }

  /// Of a list longer than `most_listed`, only `most_examples` are named: layers have hundreds of similar tensors.
  static constexpr std::size_t most_listed = 12, most_examples = 4;
};

/// Whether values of one dtype may be converted to another: floating-point dtypes to each other, any other dtype only to
/// itself.
inline bool can_become(at::ScalarType from, at::ScalarType to) {
  return from == to || (c10::isFloatingType(from) && c10::isFloatingType(to));
}

inline void load_weights(weight_ranks const& ranks, std::vector<named_weight> const& mine, std::filesystem::path const& path,
                         load_weights_options const& options) {
  std::optional<weight_folder> folder;
  ranks.together([&] { folder.emplace(path); });
  weight_groups const groups(ranks, mine);

  // All tensors are found and compared before any is changed.
  weight_differences wrong;
  std::set<std::string> taken;
  std::vector<std::string> sources;
  ranks.together([&] {
    for (named_weight const& one : mine) {
      std::vector<std::string> held;
      if (folder->holds(one.there)) held.push_back(one.there);
      for (auto const& [stage, place, there] : groups.of(one)) {
        if (folder->holds(there) && std::find(held.begin(), held.end(), there) == held.end()) held.push_back(there);
      }
      sources.push_back(held.empty() ? "" : held[0]);
      taken.insert(held.begin(), held.end());
      if (held.empty()) {
        wrong.missing.insert(one.there + (one.there == one.here.name ? "" : " (the model's " + one.here.name + ")"));
        continue;
      }
      auto const there = folder->dtype(held[0]);
      if (folder->shape(held[0]) != one.shape() || !can_become(there, one.here.value.scalar_type())) {
        wrong.misshapen.insert(held[0] + " is " + c10::toString(there) + " " + plain_shape(folder->shape(held[0])) +
                               ", the model's is " + one.words());
      }
      for (std::size_t k = 1; k < held.size(); ++k) {
        if (!folder->equal(held[0], held[k]))
          wrong.misshapen.insert(std::max(held[0], held[k]) + " differs from " + std::min(held[0], held[k]) +
                                 ", and both are one parameter of the model");
      }
    }
  });
  nlohmann::json const told = nlohmann::json::array({wrong.missing, wrong.misshapen, taken});
  taken.clear();
  for (std::string const& text : ranks.gather(told.dump())) {
    auto const one = nlohmann::json::parse(text);
    wrong.missing.merge(one[0].get<std::set<std::string>>());
    wrong.misshapen.merge(one[1].get<std::set<std::string>>());
    taken.merge(one[2].get<std::set<std::string>>());
  }
  for (std::string const& name : folder->names()) {
    bool const stays = std::any_of(options.may_stay.begin(), options.may_stay.end(),
                                   [&](std::string const& pattern) { return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0; });
    if (taken.count(name) == 0 && !stays) wrong.surplus.insert(name);
  }
  if (wrong.any()) {
    std::string const wrapped = wrong.wrapper_remedy();
    throw checkpoint_error(
        path.string() + ": is not of this model: " + wrong.text() +
        (wrapped.empty() ? ". Remedy: the model that was saved; in a program's own C++ also names as the folder has them "
                           "(chevron::weight_names), or load_weights_options::may_stay for tensors that the model does not need"
                         : wrapped + "; in a program's own C++ chevron::weight_names"));
  }
  ranks.together([&] {
    for (std::size_t i = 0; i < mine.size(); ++i) folder->copy(sources[i], mine[i].here.value, mine[i].part());
  });
}

/// Loads the weights of all ranks' stages. Collective.
inline void load_weights(transport& comm, std::vector<stage> const& stages, std::filesystem::path const& folder,
                         weight_names const& names, load_weights_options const& options) {
  std::optional<shard_cuts> cuts;
  std::vector<named_weight> mine;
  together(comm, [&] {
    cuts.emplace(comm, stages);
    mine = weights_of(stages, names, *cuts);
  });
  load_weights(weight_ranks(comm), mine, folder, options);
}

}  // namespace detail

/// Loads a module's parameters and buffers from a folder of weights: `model.safetensors`, or shards with
/// `model.safetensors.index.json`, as Hugging Face's libraries write them. Files are mapped, and tensors are copied piece by
/// piece, so that little memory is needed besides the module's. Floating-point values are converted to the module's dtypes.
/// \param names the folder's names of the module's tensors
/// \throws checkpoint_error, and nothing is changed: for tensors that are missing, surplus or of another shape, all in one
/// sentence (of more than 12 tensors of a kind, the number and some names); and for damaged files
template <module_pointer Module>
void load_weights(Module module, std::filesystem::path const& folder, weight_names const& names = {},
                  load_weights_options const& options = {}) {
  detail::load_weights(detail::weight_ranks(), detail::weights_of(module, names), folder, options);
}

/// Loads weights into a trainer before its first step: each rank reads its stages' tensors, or only its piece of a tensor that
/// is cut over shards. The folder may contain a tied parameter under one of its names, or under all. Collective.
/// \param folder the same, and shared, for all ranks
/// \param names the folder's names of the stages' tensors
/// \throws checkpoint_error, as above, on every rank. If two stages use one name for different tensors, `names` must be a
/// function of stage and name
inline void load_weights(trainer& train, std::filesystem::path const& folder, weight_names const& names = {},
                         load_weights_options const& options = {}) {
  collective_scope const doing(train.comm(), "load_weights");
  detail::be_between_steps(train, "loaded");
  train.synchronize();
  detail::load_weights(train.comm(), train.stages(), folder, names, options);
}

/// Loads weights into the stages of an evaluator without a trainer. Collective.
inline void load_weights(evaluator& model, std::filesystem::path const& folder, weight_names const& names = {},
                         load_weights_options const& options = {}) {
  collective_scope const doing(model.comm(), "load_weights");
  detail::load_weights(model.comm(), model.stages(), folder, names, options);
}

}  // namespace chevron
