#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>

#include <chevron/run/error.hpp>
#include <chevron/run/loss_scale.hpp>
#include <chevron/run/safetensors.hpp>
#include <chevron/run/stage.hpp>

/// \file
/// What a checkpoint says of itself, and where it holds what a model needs.

namespace chevron::detail {

inline std::filesystem::path stage_file(std::filesystem::path const& folder, char const* sort, int stage) {
  return folder / (std::string(sort) + "-" + std::to_string(stage) + ".safetensors");
}

/// A tensor of a checkpoint: whose file, and its name there.
struct saved_name {
  std::size_t stage = 0;
  std::string name;
  friend auto operator<=>(saved_name const&, saved_name const&) = default;
};

/// This rank's parameters that are one with others, by a word: that of the tie, or one made up for a tensor that has several
/// names.
inline std::map<std::string, std::set<saved_name>> same_parameters(std::vector<stage> const& stages) {
  std::map<void const*, std::set<saved_name>> names;
  std::map<void const*, std::string> words;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    for (parameter const& p : stages[s].parameters()) {
      void const* const key = p.value.unsafeGetTensorImpl();
      names[key].insert({s, p.name});
      if (!p.tied_as.empty()) words[key] = "tied " + p.tied_as;
    }
  }
  std::map<std::string, std::set<saved_name>> out;
  for (auto const& [key, all] : names) {
    std::string const word =
        words.count(key) != 0 ? words[key] : "tensor " + std::to_string(all.begin()->stage) + " " + all.begin()->name;
    if (all.size() > 1 || words.count(key) != 0) out[word].insert(all.begin(), all.end());
  }
  return out;
}

inline nlohmann::json to_json(std::map<std::string, std::set<saved_name>> const& same) {
  auto out = nlohmann::json::object();
  for (auto const& [word, all] : same) {
    for (saved_name const& one : all) out[word].push_back({one.stage, one.name});
  }
  return out;
}

inline void add_from_json(std::map<std::string, std::set<saved_name>>& same, nlohmann::json const& from) {
  for (auto const& [word, all] : from.items()) {
    for (auto const& one : all) same[word].insert({one.at(0).get<std::size_t>(), one.at(1).get<std::string>()});
  }
}

/// What a manifest says.
struct manifest {
  long next_step = 0;
  std::size_t stages = 0;
  std::string optimizer;                             // its kind
  std::optional<loss_scale::state> scale;            // where losses were scaled
  std::map<std::string, std::string> files;          // fingerprints
  std::map<std::string, std::set<saved_name>> same;  // parameters that are one
  std::map<std::string, std::string> words;
};

inline manifest read_manifest(std::filesystem::path const& folder) {
  std::filesystem::path const file = folder / "manifest.json";
  std::ifstream in(file);
  manifest out;
  try {
    auto const json = nlohmann::json::parse(in);
    auto const require = [](bool holds, char const* what) {
      if (!holds) throw checkpoint_error(what);
    };
    require(json.at("format") == 2, "its format is not 2");
    require(json.at("next_step").is_number_unsigned(), "next_step is no number of a step");
    require(json.at("stages").is_number_unsigned(), "stages is no number of stages");
    out.next_step = json["next_step"].get<long>();
    out.stages = json["stages"].get<std::size_t>();
    out.optimizer = json.at("optimizer").get<std::string>();
    out.files = json.at("files").get<std::map<std::string, std::string>>();
    out.words = json.at("words").get<std::map<std::string, std::string>>();
    add_from_json(out.same, json.at("same"));
    if (auto const scale = json.find("loss_scale"); scale != json.end()) {
      out.scale = {scale->at("factor").get<double>(), scale->at("steps").get<int>()};
      require(std::isfinite(out.scale->factor) && out.scale->factor > 0, "the factor of the loss is no number above 0");
    }
  } catch (std::exception const& e) {
    refuse_file(file, std::string("is no manifest of a checkpoint that this version of Chevron reads: ") + e.what());
  }
  return out;
}

/// Where a checkpoint holds what a model needs: by name, and where a name stands in several stages by the stage's number. Only
/// headers are read until a file is asked for.
class checkpoint_index {
 public:
  checkpoint_index(std::filesystem::path folder, manifest const& about, std::size_t stages_here)
      : folder_(std::move(folder)), about_(&about), same_stages_(about.stages == stages_here), stages_here_(stages_here) {
    for (std::size_t s = 0; s < about.stages; ++s) {
      models_.emplace_back(stage_file(folder_, "model", static_cast<int>(s)));
      for (std::string const& name : models_.back().names()) where_[name].push_back(s);
    }
    for (auto const& [word, all] : about.same) {
      for (saved_name const& one : all) word_of_[one] = word;
    }
  }

  /// The model file of a stage of the checkpoint, found to be whole.
  safetensors_file const& model(std::size_t s) {
    be_whole(models_[s].path());
    return models_[s];
  }
  safetensors_file const& optimizer(std::size_t s) {
    auto found = optimizers_.find(s);
    if (found == optimizers_.end()) {
      auto const file = stage_file(folder_, "optimizer", static_cast<int>(s));
      found = optimizers_.emplace(s, safetensors_file(file)).first;
      be_whole(file);
    }
    return found->second;
  }

  /// \param also names of the same parameter in other stages of this model
  saved_name find(std::size_t s, std::string const& name, std::set<saved_name> const& also) const {
    if (auto const there = held(s, name)) return *there;
    for (saved_name const& other : also) {
      if (auto const there = held(other.stage, other.name)) return *there;
    }
    throw checkpoint_error(folder_.string() + ": stage " + std::to_string(s) + " needs " + name +
                           ", which the checkpoint does not hold. Remedy: the model that was saved");
  }

  /// Whether two tensors of the checkpoint are one parameter.
  bool are_one(saved_name const& a, saved_name const& b) const {
    if (a == b) return true;
    auto const of_a = word_of_.find(a), of_b = word_of_.find(b);
    return of_a != word_of_.end() && of_b != word_of_.end() && of_a->second == of_b->second;
  }

  /// \throws checkpoint_error where the checkpoint holds what nobody took
  void check_taken(std::set<saved_name> const& taken) const {
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
    throw checkpoint_error(folder_.string() + ": holds " + std::to_string(held) + " tensors, this model has " +
                           std::to_string(taken.size()) + ": none is " + left->name + " of stage " + std::to_string(left->stage) +
                           ". Remedy: the model that was saved");
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
                             " stages hold: names that repeat can only be loaded by as many stages, not " +
                             std::to_string(stages_here_) + ". Remedy: register modules under names of their own");
    }
    return saved_name{places[0], name};
  }

  void be_whole(std::filesystem::path const& file) {
    if (!whole_.insert(file).second) return;
    auto const wanted = about_->files.find(file.filename().string());
    if (wanted != about_->files.end() && fingerprint_of(file) == wanted->second) return;
    refuse_file(
        file,
        "is not the file that the manifest names: it was damaged, or another job has saved into the same folder. Remedy: another "
        "checkpoint, and a folder for each job");
  }

  std::filesystem::path folder_;
  manifest const* about_;
  bool same_stages_;
  std::size_t stages_here_;
  std::vector<safetensors_file> models_;
  std::map<std::size_t, safetensors_file> optimizers_;
  std::map<std::string, std::vector<std::size_t>> where_;  // by name: stages that hold it
  std::map<saved_name, std::string> word_of_;
  std::set<std::filesystem::path> whole_;
};

}  // namespace chevron::detail
