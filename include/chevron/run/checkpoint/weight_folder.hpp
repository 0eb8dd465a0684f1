#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>

#include <chevron/run/checkpoint/file_tensor.hpp>
#include <chevron/run/checkpoint/safetensors.hpp>
#include <chevron/run/checkpoint/strict_json.hpp>

/// \file
/// A folder of weights in Hugging Face's layout: `model.safetensors`, or an index and the files (shards) that it names.

namespace chevron::detail {

inline constexpr char const* whole_weights = "model.safetensors";
inline constexpr char const* weight_index = "model.safetensors.index.json";

/// Whether a name is that of a file of weights, which new weights replace.
inline bool is_weight_file(std::string const& name) {
  if (name == whole_weights || name == weight_index) return true;
  // model-00001-of-00003.safetensors
  std::string pattern = name;
  std::replace_if(
      pattern.begin(), pattern.end(), [](char c) { return c >= '0' && c <= '9'; }, '0');
  return pattern == "model-00000-of-00000.safetensors";
}

/// A folder of weights, opened for reading. The constructor checks the index; a shard is checked when one of its tensors is first
/// used, so that ranks open only the shards of their stages.
class weight_folder {
 public:
  /// \throws checkpoint_error for a folder without weights, and for an index that is damaged or names files elsewhere
  explicit weight_folder(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::error_code ignored;
    if (std::filesystem::exists(folder_ / detail::whole_weights, ignored)) {
      for (std::string const& name : shard(detail::whole_weights).names()) file_of_[name] = detail::whole_weights;
    } else if (std::filesystem::exists(folder_ / detail::weight_index, ignored)) {
      read_index(folder_ / detail::weight_index);
    } else {
      detail::refuse_file(folder_, std::string("holds neither ") + detail::whole_weights + " nor " + detail::weight_index +
                                       ". Remedy: the folder of a model that was saved as safetensors "
                                       "(save_pretrained of transformers does)");
    }
  }

  std::filesystem::path const& path() const { return folder_; }
  bool holds(std::string const& name) const { return file_of_.count(name) != 0; }
  /// All names, in alphabetical order.
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (auto const& [name, file] : file_of_) all.push_back(name);
    return all;
  }
  /// \throws checkpoint_error for an unknown name, and for a shard that differs from the index
  std::vector<std::int64_t> const& shape(std::string const& name) { return holder(name).shape(name); }
  /// \throws checkpoint_error, as `shape`
  at::ScalarType dtype(std::string const& name) { return holder(name).dtype(name); }
  /// Copies a tensor's values into `to`, of any dtype and device and of the tensor's shape.
  /// \param part a part of the tensor, whose shape `to` then has; empty: the whole tensor
  /// \throws checkpoint_error, as `shape`, and where the file changes meanwhile
  void copy(std::string const& name, at::Tensor const& to, std::optional<tensor_part> const& part = {}) {
    holder(name).copy(name, to, part);
  }
  /// Whether two tensors of the folder have the same bytes, shape and dtype.
  bool equal(std::string const& a, std::string const& b) {
    return shape(a) == shape(b) && dtype(a) == dtype(b) && holder(a).fingerprint(a) == holder(b).fingerprint(b);
  }

 private:
  static constexpr std::uintmax_t most_of_an_index = std::uintmax_t{64} << 20;

  safetensors_file const& shard(std::string const& file) {
    auto& opened = shards_[file];
    if (opened == nullptr) opened = std::make_unique<safetensors_file>(folder_ / file);
    return *opened;
  }
  safetensors_file const& holder(std::string const& name) {
    auto const found = file_of_.find(name);
    if (found == file_of_.end()) detail::refuse_file(folder_, "holds no tensor called " + name);
    safetensors_file const& in = shard(found->second);
    if (!in.holds(name))
      detail::refuse_file(folder_ / found->second,
                          "holds no tensor called " + name + ", though " + detail::weight_index + " says so");
    return in;
  }

  void read_index(std::filesystem::path const& file) {
    std::string const text = detail::text_of(file, most_of_an_index, "index of weights");
    nlohmann::json index;
    try {
      index = detail::parse_strictly(text, 4);
    } catch (std::exception const& e) {
      detail::refuse_file(file, std::string("is no JSON of this kind: ") + detail::in_short(e));
    }
    if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
      detail::refuse_file(file, "has no weight_map, which says which file holds which tensor");
    for (auto const& [name, where] : index["weight_map"].items()) {
      std::string const shard_name = where.is_string() ? where.get<std::string>() : "";
      // Files of this folder only: an index must not name other paths.
      bool const plain =
          !shard_name.empty() && shard_name.find('/') == shard_name.npos && shard_name != "." && shard_name != "..";
      if (!plain) detail::refuse_file(file, "does not say in which of the folder's files " + name + " is");
      file_of_[name] = shard_name;
    }
  }

  std::filesystem::path folder_;
  std::map<std::string, std::string> file_of_;
  std::map<std::string, std::unique_ptr<safetensors_file>> shards_;
};

}  // namespace chevron::detail
