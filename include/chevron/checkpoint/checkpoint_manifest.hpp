#pragma once

#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>

#include <chevron/checkpoint/checkpoint_folder.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/checkpoint/strict_json.hpp>
#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/loss_scale.hpp>
#include <chevron/version.hpp>

/// \file
/// The manifest of a checkpoint. Its last entry is a fingerprint of all earlier bytes, so that every changed bit is noticed.

namespace chevron::detail {

/// A tensor of a checkpoint: the stage of the tensor's file, and the tensor's name in that file.
struct saved_name {
  std::size_t stage = 0;
  std::string name;
  friend auto operator<=>(saved_name const&, saved_name const&) = default;
};

/// Returns all names of each of this rank's parameters that is tied or has several names, by a key (made of the tie group, or
/// of the tensor's first name).
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
    for (auto const& one : all) {
      if (one.size() != 2 || !one[0].is_number_unsigned()) throw std::runtime_error("'same' does not name stages and tensors");
      same[word].insert({one[0].get<std::size_t>(), one[1].get<std::string>()});
    }
  }
}

/// The layout of a tensor that shards saved in pieces: the dimension of the cut, and the sizes of the whole tensor's blocks.
struct saved_cut {
  std::int64_t along = 0;
  std::vector<std::int64_t> blocks;
};

/// The contents of a manifest.
struct manifest {
  std::string job;  // the job's name, drawn by the first run and kept by runs that resume from its checkpoints
  long next_step = 0;
  std::size_t stages = 0;
  std::string optimizer;                             // kind of the optimizer
  std::optional<loss_scale::state> scale;            // if losses are scaled
  std::optional<double> learning_rate;               // the report's, of the last step
  std::map<std::string, std::string> files;          // fingerprints, by file name
  std::map<std::string, std::set<saved_name>> same;  // names of each tied parameter, by a key
  std::map<saved_name, std::string> base;            // fingerprints of frozen parameters that are in no file
  std::map<saved_name, saved_cut> cuts;              // of tensors that shards saved in pieces
  std::map<std::string, std::string> metadata;
  std::string fingerprint;  // of the manifest itself
};

inline constexpr int manifest_format = 4, oldest_manifest_format = 3;  // 3: has no 'base'
inline constexpr std::uintmax_t most_of_a_manifest = std::uintmax_t{16} << 20;

inline constexpr std::string_view before_fingerprint = ",\n  \"fingerprint\": \"", after_fingerprint = "\"\n}\n";
inline constexpr std::size_t fingerprint_digits = 16;

/// Writes a JSON object as text that ends with a fingerprint of all earlier bytes.
inline std::string with_fingerprint(nlohmann::json const& all) {
  std::string text = all.dump(2);
  text.resize(text.size() - 2);  // drops "\n}"
  byte_fingerprint sum;
  sum.add(text.data(), text.size());
  return text.append(before_fingerprint).append(sum.text()).append(after_fingerprint);
}

/// Returns the fingerprint at the end of a text if it is that of all earlier bytes; else empty.
inline std::string true_fingerprint_of(std::string_view text) {
  constexpr std::size_t tail = before_fingerprint.size() + fingerprint_digits + after_fingerprint.size();
  if (text.size() < tail) return {};
  std::string_view const end = text.substr(text.size() - tail);
  byte_fingerprint sum;
  sum.add(text.data(), text.size() - tail);
  std::string const right = sum.text();
  return end == std::string(before_fingerprint) + right + std::string(after_fingerprint) ? right : std::string();
}

/// Returns the remedy for an error about a damaged checkpoint: to load the previous checkpoint, or another one.
inline std::string without(std::filesystem::path const& folder) {
  std::string const name = name_of(folder);
  std::optional<std::filesystem::path> before;
  if (long const step = step_of(name); step >= 0) before = last_checkpoint_before(folder_of(folder), step);
  if (!before) return ". Remedy: another checkpoint";
  return ". Remedy: move " + name + " away; the last checkpoint is then " + before->filename().string();
}

namespace reading {

inline void require(bool holds, char const* what) {
  if (!holds) throw std::runtime_error(what);
}

/// Checks the format. \throws std::runtime_error for a manifest of a format that is not supported, and for a text that names no
/// format
inline void check_format(nlohmann::json const& json) {
  auto const format = json.find("format");
  auto const by = json.find("chevron");
  require(format != json.end() && format->is_number_unsigned() && by != json.end() && by->is_string(),
          "'format' is no number, or 'chevron' no text");
  if (*format >= oldest_manifest_format && *format <= manifest_format) return;
  throw std::runtime_error("its format is " + format->dump() + ", written by Chevron " + by->get<std::string>() + "; Chevron " +
                           version + " reads formats " + std::to_string(oldest_manifest_format) + " to " +
                           std::to_string(manifest_format) + ". Remedy: go on with that version, or begin anew");
}

inline void add_base(manifest& to, nlohmann::json const& from) {
  require(from.is_array(), "'base' is no list");
  for (auto const& one : from) {
    require(one.is_array() && one.size() == 3 && one[0].is_number_unsigned(), "'base' does not name stages and tensors");
    require(one[0].get<std::size_t>() < to.stages, "'base' names a stage that does not exist");
    to.base[{one[0].get<std::size_t>(), one[1].get<std::string>()}] = one[2].get<std::string>();
  }
}

inline void add_cuts(manifest& to, nlohmann::json const& from) {
  require(from.is_array(), "'cuts' is no list");
  for (auto const& one : from) {
    require(one.is_array() && one.size() == 4 && one[0].is_number_unsigned() && one[2].is_number_unsigned() && one[3].is_array(),
            "'cuts' does not name stages, tensors and blocks");
    require(one[0].get<std::size_t>() < to.stages, "'cuts' names a stage that does not exist");
    saved_cut& cut = to.cuts[{one[0].get<std::size_t>(), one[1].get<std::string>()}];
    cut.along = one[2].get<std::int64_t>();
    for (auto const& size : one[3]) {
      require(size.is_number_unsigned(), "'cuts' has a size that is no number");
      cut.blocks.push_back(size.get<std::int64_t>());
    }
  }
}

inline manifest from_json(nlohmann::json const& json) {
  check_format(json);
  manifest out;
  out.job = json.at("job").get<std::string>();
  require(!out.job.empty(), "'job' is empty");
  auto const& step = json.at("next_step");
  require(step.is_number_unsigned() && step.get<std::uint64_t>() <= static_cast<std::uint64_t>(LONG_MAX),
          "'next_step' is no number of a step");
  out.next_step = step.get<long>();
  auto const& stages = json.at("stages");
  require(stages.is_number_unsigned(), "'stages' is no number of stages");
  out.stages = stages.get<std::size_t>();
  out.optimizer = json.at("optimizer").get<std::string>();
  out.files = json.at("files").get<std::map<std::string, std::string>>();
  require(out.stages > 0 && out.files.size() % 2 == 0 && out.files.size() / 2 == out.stages,
          "'files' does not name two files for each stage");
  for (std::size_t s = 0; s < out.stages; ++s) {
    for (char const* sort : {"model", "optimizer"})
      require(out.files.count(stage_file({}, sort, s).string()) == 1, "'files' does not name two files for each stage");
  }
  out.metadata = json.at("words").get<std::map<std::string, std::string>>();
  add_from_json(out.same, json.at("same"));
  for (auto const& [word, all] : out.same) {
    for (saved_name const& one : all) require(one.stage < out.stages, "'same' names a stage that does not exist");
  }
  if (json.at("format") != oldest_manifest_format) add_base(out, json.at("base"));
  if (auto const cuts = json.find("cuts"); cuts != json.end()) add_cuts(out, *cuts);
  if (auto const scale = json.find("loss_scale"); scale != json.end()) {
    auto const &factor = scale->at("factor"), &steps = scale->at("steps");
    require(factor.is_number() && std::isfinite(factor.get<double>()) && factor.get<double>() > 0,
            "the factor of the loss is no number above 0");
    require(steps.is_number_unsigned() && steps.get<std::uint64_t>() <= INT_MAX, "the factor of the loss has no number of steps");
    out.scale = {factor.get<double>(), steps.get<int>()};
  }
  if (auto const rate = json.find("learning_rate"); rate != json.end()) {
    require(rate->is_number() && std::isfinite(rate->get<double>()), "the learning rate is no number");
    out.learning_rate = rate->get<double>();
  }
  return out;
}

}  // namespace reading

/// Reads a checkpoint's manifest.
/// \throws checkpoint_error for a manifest that was damaged, changed by hand or written in a format that is not supported, or
/// whose step is not that in the folder's name
inline manifest read_manifest(std::filesystem::path const& folder) {
  std::filesystem::path const file = folder / "manifest.json";
  constexpr int most_deep = 5;
  std::string const text = text_of(file, most_of_a_manifest, "manifest of a checkpoint", without(folder));
  std::string const fingerprint = true_fingerprint_of(text);
  if (fingerprint.empty()) {
    // Manifests of earlier formats have no fingerprint.
    try {
      reading::check_format(parse_strictly(text, most_deep));
    } catch (nlohmann::json::exception const&) {
    } catch (std::exception const& e) {
      if (text.find(before_fingerprint) == text.npos)
        refuse_file(file, std::string("is no manifest that can be read: ") + in_short(e));
    }
    refuse_file(file, "was damaged, or changed by hand: it does not end with the fingerprint of its bytes" + without(folder));
  }
  manifest out;
  try {
    out = reading::from_json(parse_strictly(text, most_deep));
  } catch (std::exception const& e) {
    refuse_file(file, std::string("is no manifest that can be read: ") + in_short(e));
  }
  out.fingerprint = fingerprint;
  // The folder of a copied checkpoint may have any name but that of another step.
  std::string const name = name_of(folder);
  if (step_of(name) >= 0 && step_of(name) != out.next_step) {
    refuse_file(file, "is of step " + std::to_string(out.next_step) + ", and lies in the folder " + name +
                          ". Remedy: give the folder its old name");
  }
  return out;
}

/// Checks a file of a checkpoint. \throws checkpoint_error if its fingerprint is not the fingerprint in the manifest
inline void check_whole(std::filesystem::path const& file, manifest const& about, std::filesystem::path const& folder) {
  auto const wanted = about.files.find(file.filename().string());
  if (wanted != about.files.end() && fingerprint_of(file) == wanted->second) return;
  refuse_file(file, "is not the file that the manifest names: it was damaged or exchanged" + without(folder));
}

}  // namespace chevron::detail
