#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <nlohmann/json.hpp>

#include <chevron/checkpoint/checkpoint_folder.hpp>
#include <chevron/checkpoint/checkpoint_manifest.hpp>
#include <chevron/checkpoint/checkpoint_ranks.hpp>
#include <chevron/checkpoint/file_tensor.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/checkpoint/shard_cuts.hpp>
#include <chevron/checkpoint/weight_folder.hpp>
#include <chevron/checkpoint/weight_names.hpp>
#include <chevron/checkpoint/weight_ranks.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/trainer.hpp>

/// \file
/// Writes a model's weights in Hugging Face's layout.

namespace chevron {

/// Options of `save_weights` and `export_weights`.
struct save_weights_options {
  std::uint64_t shard_bytes = std::uint64_t{5} << 30;  ///< largest sum of tensors' bytes in one file, unless one tensor has more
  std::optional<at::ScalarType> dtype{};               ///< of floating-point tensors in the files; empty: the model's
};

namespace detail {

/// Divides a rank's tensors among files, in their order.
inline std::vector<std::vector<file_tensor>> shards_of(std::vector<file_tensor> all, save_weights_options const& options) {
  std::vector<std::vector<file_tensor>> out;
  std::uint64_t bytes = 0;
  for (auto& one : all) {
    if (out.empty() || (bytes > 0 && bytes + one.bytes() > options.shard_bytes)) {
      out.emplace_back();
      bytes = 0;
    }
    bytes += one.bytes();
    out.back().push_back(std::move(one));
  }
  return out;
}

inline std::string shard_name(std::size_t number, std::size_t count) {
  if (count == 1) return whole_weights;
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", number + 1, count);
  return name;
}

/// Writes all ranks' tensors as one folder of weights. Collective.
/// \param mine this rank's tensors; empty on ranks whose tensors other replicas write
/// \param cuts null if one rank writes alone
inline void save_weights(weight_ranks const& ranks, std::vector<file_tensor> mine, std::filesystem::path const& folder,
                         save_weights_options const& options, shard_cuts const* cuts = nullptr) {
  if (options.dtype && !c10::isFloatingType(*options.dtype)) {
    throw usage_error(std::string("save_weights_options::dtype is ") + c10::toString(*options.dtype) +
                      ", which has no fractions. Remedy: at::kFloat, at::kBFloat16, at::kHalf or at::kDouble");
  }
  auto shards = shards_of(std::move(mine), options);
  nlohmann::json told = nlohmann::json::array();
  for (std::size_t i = 0; ranks.writes() && i < shards.size(); ++i) {
    nlohmann::json names = nlohmann::json::array();
    for (file_tensor const& one : shards[i]) names.push_back(one.name);
    told.push_back(names);
  }
  std::vector<nlohmann::json> all;
  std::size_t count = 0, before_me = 0;
  std::map<std::string, std::string> file_of;
  std::string twice;
  for (std::string const& text : ranks.gather(told.dump())) {
    if (all.size() == ranks.me()) before_me = count;
    all.push_back(nlohmann::json::parse(text));
    count += all.back().size();
  }
  std::size_t number = 0;
  for (auto const& of_rank : all) {
    for (auto const& names : of_rank) {
      for (auto const& name : names) {
        if (!file_of.emplace(name.get<std::string>(), shard_name(number, count)).second) twice = name.get<std::string>();
      }
      ++number;
    }
  }
  if (!twice.empty()) {
    throw checkpoint_error(folder.string() + ": two tensors of the model would be called " + twice +
                           ". Remedy: other names (chevron::weight_names), or tie them if they are one");
  }
  if (count == 0) throw checkpoint_error(folder.string() + ": the model has no tensor to be saved");

  std::vector<unnamed_file> written;
  std::uint64_t bytes = 0;
  ranks.together([&] {
    if (ranks.me() == 0) refuse_folders_of_weights(folder);
    std::vector<file_to_write> files;
    for (std::size_t i = 0; i < shards.size(); ++i) {
      for (file_tensor& one : shards[i]) {
        if (options.dtype && c10::isFloatingType(one.type) && one.type != *options.dtype) {
          one.type = *options.dtype;
          one.values = [to = one.type, as_it_is = one.values] { return as_it_is().detach().to(to); };
        }
        if (ranks.writes()) bytes += one.bytes();
      }
      // If the widest dtypes come first, all tensors are aligned to their dtypes.
      std::stable_sort(shards[i].begin(), shards[i].end(), [](file_tensor const& a, file_tensor const& b) {
        return c10::elementSize(a.type) > c10::elementSize(b.type);
      });
      files.push_back({folder / shard_name(before_me + i, count), std::move(shards[i]), {{"format", "pt"}}});
    }
    if (ranks.holds()) written = write_files(cuts, std::move(files), ranks.writes());
  });
  std::uint64_t total = 0;
  for (std::string const& text : ranks.gather(std::to_string(bytes))) total += std::stoull(text);
  ranks.check_one_folder(folder, written);
  // All new files are written, but have no names yet. Older weights are removed first, so that no reader mixes old and new
  // files.
  ranks.together([&] {
    if (ranks.me() != 0) return;
    std::vector<std::filesystem::path> old;
    for (auto const& entry : std::filesystem::directory_iterator(folder)) {
      if (is_weight_file(entry.path().filename().string())) old.push_back(entry.path());
    }
    for (auto const& one : old) std::filesystem::remove(one);
  });
  ranks.together([&] {
    for (unnamed_file& file : written) file.give_name();
  });
  ranks.together([&] {
    if (ranks.me() != 0) return;
    if (count > 1) {
      std::string const text = nlohmann::json{{"metadata", {{"total_size", total}}}, {"weight_map", file_of}}.dump(2) + "\n";
      unnamed_file(folder / weight_index, [&](auto const& write) { write(text.data(), text.size()); }).give_name();
    }
    bring_to_disk(folder);
  });
}

/// Returns the tensors to write: each parameter once, under the first of its names.
inline std::vector<file_tensor> each_once(weight_groups const& groups, std::vector<named_weight> const& mine) {
  std::vector<file_tensor> out;
  for (named_weight const& one : mine) {
    auto const& [stage, place, there] = *groups.of(one).begin();
    if (stage == one.stage && place == one.place) out.push_back(one.to_file());
  }
  return out;
}

}  // namespace detail

/// Writes a module's parameters and buffers as a folder of weights that Hugging Face's libraries read: one `model.safetensors`,
/// or shards and their index. Older weights in the folder are removed once all new files are written. Other files are not
/// touched.
/// \param names the folder's names of the module's tensors; of tied parameters the first name is written
/// \throws checkpoint_error if two tensors would have one name, and if a file cannot be written
template <module_pointer Module>
void save_weights(Module module, std::filesystem::path const& folder, weight_names const& names = {},
                  save_weights_options const& options = {}) {
  detail::weight_ranks const alone;
  auto const mine = detail::weights_of(module, names);
  detail::save_weights(alone, detail::each_once({alone, mine}, mine), folder, options);
}

/// Writes a trainer's weights, between two steps: each rank of the first replica writes files of its stages' tensors. A tensor
/// that is cut over shards is written whole, by one shard. Collective.
/// \param folder the same, and shared, for all ranks
/// \throws checkpoint_error, as above, on every rank
inline void save_weights(trainer& train, std::filesystem::path const& folder, weight_names const& names = {},
                         save_weights_options const& options = {}) {
  char const* const call = "save_weights";
  collective_scope const doing(train.comm(), call);
  detail::begin_save(train, call);
  detail::weight_ranks const ranks(train.comm());
  std::vector<detail::named_weight> mine;
  std::optional<detail::shard_cuts> cuts;
  ranks.together([&] {
    cuts.emplace(train.comm(), train.stages());
    mine = detail::weights_of(train.stages(), names, *cuts);
  });
  auto all = detail::each_once({ranks, mine}, mine);
  if (!ranks.holds()) all.clear();
  detail::save_weights(ranks, std::move(all), folder, options, &*cuts);
}

/// Writes the model of a Chevron checkpoint as a folder of weights, without a trainer, from mapped files whose fingerprints are
/// checked.
/// \param checkpoint a folder of checkpoints, of which the last whole checkpoint is used, or the folder of one checkpoint
/// \param names the folder's names of the checkpoint's tensors, by stage and name
/// \throws checkpoint_error without a whole checkpoint, for a damaged file, and as `save_weights`
inline void export_weights(std::filesystem::path const& checkpoint, std::filesystem::path const& folder,
                           weight_names const& names = {}, save_weights_options const& options = {}) {
  namespace fs = std::filesystem;
  fs::path const from = detail::checkpoint_in(checkpoint);
  if (from.empty())
    detail::refuse_file(checkpoint,
                        "holds no whole checkpoint, no folder step-N with a manifest.json. Remedy: the folder that "
                        "was saved to");
  detail::manifest const about = detail::read_manifest(from);
  std::map<detail::saved_name, std::string> word_of;
  for (auto const& [word, all] : about.same) {
    for (detail::saved_name const& one : all) word_of[one] = word;
  }
  std::vector<detail::file_tensor> all;
  std::set<std::string> written;  // keys of the parameters with several names that were written
  for (std::size_t s = 0; s < about.stages; ++s) {
    fs::path const file = detail::stage_file(from, "model", s);
    detail::check_whole(file, about, from);
    detail::mapped_tensors const saved(file);
    std::vector<std::string> in_order = saved.header().names();
    std::stable_sort(in_order.begin(), in_order.end(), [&](std::string const& a, std::string const& b) {
      return saved.header().place(a).first < saved.header().place(b).first;
    });
    for (std::string const& name : in_order) {
      auto const word = word_of.find({s, name});
      std::string const there = names(s, name);
      if (there.empty() || (word != word_of.end() && !written.insert(word->second).second)) continue;
      all.emplace_back(there, saved.bytes_of(name));
    }
  }
  detail::save_weights(detail::weight_ranks(), std::move(all), folder, options);
}

}  // namespace chevron
