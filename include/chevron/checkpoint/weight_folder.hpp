#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
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
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <nlohmann/json.hpp>

#include <chevron/checkpoint/file_tensor.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/checkpoint/strict_json.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/mapped_file.hpp>

/// \file
/// A folder of weights in Hugging Face's layout: `model.safetensors`, or an index and the files (shards) that it names.

namespace chevron::detail {

/// The tensors of a mapped safetensors file, whose pages are read at their first use.
class mapped_tensors {
 public:
  /// Maps a file. \throws checkpoint_error for a path that is no regular file (a pipe would block without end), and as
  /// `safetensors_file`
  explicit mapped_tensors(std::filesystem::path const& file) : bytes_(mapped(file)), header_(file) {}

  safetensors_file const& header() const { return header_; }

  /// Returns a tensor over the file's bytes, which must not be written. The tensor keeps the file mapped. Its address may not
  /// be aligned for its dtype: copy bytes, not numbers.
  at::Tensor bytes_of(std::string const& name) const {
    auto const [begin, count] = here(name);
    void* const at = const_cast<std::byte*>(bytes_->data() + begin);
    return at::from_blob(
        at, header_.shape(name), [keep = bytes_](void*) {}, at::TensorOptions(header_.dtype(name)));
  }

  /// Copies a tensor, converted to the dtype and device of `to`, piece by piece, so that besides `to` only one piece needs
  /// memory.
  /// \param to has the shape of the tensor or of the part \param part the part to copy: only its bytes are read; empty: the
  /// whole tensor
  void copy(std::string const& name, at::Tensor const& to, std::optional<tensor_part> const& part = {}) const {
    if (to.numel() == 0) return;
    at::NoGradGuard const off;
    at::Tensor const target = to.detach();
    bool const in_pieces = target.is_contiguous();
    at::Tensor const flat = in_pieces ? target.view({-1}) : target;
    each_piece(name, part, in_pieces ? piece : header_.place(name).second + 1, [&](at::Tensor const& read, std::int64_t first) {
      if (in_pieces)
        flat.narrow(0, first, read.numel()).copy_(read);
      else
        flat.copy_(read.view(target.sizes()));
    });
  }

  /// Whether two tensors have the same bytes, shape and dtype.
  bool equal(std::string const& name, mapped_tensors const& other, std::string const& its_name) const {
    if (header_.shape(name) != other.header_.shape(its_name) || header_.dtype(name) != other.header_.dtype(its_name))
      return false;
    auto const [mine, count] = here(name);
    auto const [theirs, same_count] = other.here(its_name);
    bool const same = count == 0 || std::memcmp(bytes_->data() + mine, other.bytes_->data() + theirs, count) == 0;
    bytes_->give_back(mine, count);
    other.bytes_->give_back(theirs, same_count);
    return same;
  }

 private:
  static constexpr std::uint64_t piece = std::uint64_t{8} << 20;

  static std::shared_ptr<mapped_file const> mapped(std::filesystem::path const& file) {
    try {
      return std::make_shared<mapped_file const>(file);
    } catch (std::filesystem::filesystem_error const& e) {
      refuse_file(file, "cannot be mapped: " + e.code().message() +
                            ". Remedy: the whole folder, with every file that its index names");
    }
  }

  /// Returns the position and number of a tensor's bytes. \throws checkpoint_error if the file was cut short since it was
  /// opened
  std::pair<std::size_t, std::size_t> here(std::string const& name) const {
    auto const [begin, count] = header_.place(name);
    if (begin + count > bytes_->size() || !bytes_->still_whole())
      refuse_file(header_.path(), "was cut short while it was read. Remedy: let no other program write to it");
    return {begin, count};
  }

  template <class Visit>
  void each_piece(std::string const& name, std::optional<tensor_part> const& part, std::uint64_t most, Visit visit) const {
    auto const [begin, count] = here(name);
    std::size_t const each = c10::elementSize(header_.dtype(name));
    byte_runs const runs = runs_of(header_.shape(name), header_.dtype(name), part);
    std::size_t const step = std::max<std::size_t>(most / each, 1) * each, all = runs.bytes();
    for (std::size_t done = 0; done < all; done += step) {
      std::size_t const now = std::min(step, all - done);
      auto const place = [&](std::size_t of) { return begin + runs.place(of).begin; };
      std::byte const* const at = bytes_->data() + place(done);
      auto const elements = static_cast<std::int64_t>(now / each);
      at::Tensor read;
      if (runs.place(done).size >= now && reinterpret_cast<std::uintptr_t>(at) % each == 0) {
        read = at::from_blob(const_cast<std::byte*>(at), {elements}, at::TensorOptions(header_.dtype(name)));
      } else {
        read = at::empty({elements}, header_.dtype(name));
        auto* const to = static_cast<std::byte*>(read.mutable_data_ptr());
        for (std::size_t got = 0, run = 0; got < now; got += run) {
          run = std::min(runs.place(done + got).size, now - got);
          std::memcpy(to + got, bytes_->data() + place(done + got), run);
        }
      }
      visit(read, static_cast<std::int64_t>(done / each));
      bytes_->give_back(place(done), place(done + now - 1) + 1 - place(done));
    }
  }

  std::shared_ptr<mapped_file const> bytes_;
  safetensors_file header_;
};

inline constexpr char const* whole_weights = "model.safetensors";
inline constexpr char const* weight_index = "model.safetensors.index.json";

/// Whether a name is that of a file of weights, which saving new weights removes.
inline bool is_weight_file(std::string const& name) {
  if (name == whole_weights || name == weight_index) return true;
  // model-00001-of-00003.safetensors
  std::string pattern = name;
  std::replace_if(
      pattern.begin(), pattern.end(), [](char c) { return c >= '0' && c <= '9'; }, '0');
  return pattern == "model-00000-of-00000.safetensors";
}

/// \throws checkpoint_error if a folder has the name of a file of weights, which saving replaces
inline void refuse_folders_of_weights(std::filesystem::path const& folder) {
  std::error_code ignored;
  for (auto const& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (is_weight_file(entry.path().filename().string()) && entry.is_directory(ignored) && !entry.is_symlink(ignored))
      refuse_file(entry.path(), "is a folder in place of a file of weights. Remedy: remove it, or save into another folder");
  }
}

/// A folder of weights, opened for reading. The constructor checks the index; a shard is checked when one of its tensors is first
/// used, so that ranks open only the shards of their stages.
class weight_folder {
 public:
  /// Opens a folder. \throws checkpoint_error for a folder without weights, and for an index that is damaged or names files
  /// elsewhere
  explicit weight_folder(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::error_code ignored;
    if (std::filesystem::exists(folder_ / detail::whole_weights, ignored)) {
      for (std::string const& name : shard(detail::whole_weights).header().names()) file_of_[name] = detail::whole_weights;
    } else if (std::filesystem::exists(folder_ / detail::weight_index, ignored)) {
      read_index(folder_ / detail::weight_index);
    } else {
      if (std::filesystem::exists(folder_ / "adapter_config.json", ignored)) {
        detail::refuse_file(folder_,
                            "holds an adapter of peft without the model's weights. Remedy: save the whole model, "
                            "model.merge_and_unload().save_pretrained(folder)");
      }
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
  /// Returns a tensor's shape. \throws checkpoint_error for an unknown name, and for a shard that differs from the index
  std::vector<std::int64_t> const& shape(std::string const& name) { return holder(name).header().shape(name); }
  /// Returns a tensor's dtype. \throws checkpoint_error, as `shape`
  at::ScalarType dtype(std::string const& name) { return holder(name).header().dtype(name); }
  /// Copies a tensor's values into `to`, which has the tensor's shape, and any dtype and device.
  /// \param part a part of the tensor: `to` then has the shape of the part; empty: the whole tensor
  /// \throws checkpoint_error, as `shape`, and if the file changes meanwhile
  void copy(std::string const& name, at::Tensor const& to, std::optional<tensor_part> const& part = {}) {
    holder(name).copy(name, to, part);
  }
  /// Whether two tensors of the folder have the same bytes, shape and dtype.
  bool equal(std::string const& a, std::string const& b) { return holder(a).equal(a, holder(b), b); }

 private:
  static constexpr std::uintmax_t most_of_an_index = std::uintmax_t{64} << 20;

  detail::mapped_tensors const& shard(std::string const& file) {
    auto& opened = shards_[file];
    if (opened == nullptr) opened = std::make_unique<detail::mapped_tensors>(folder_ / file);
    return *opened;
  }
  detail::mapped_tensors const& holder(std::string const& name) {
    auto const found = file_of_.find(name);
    if (found == file_of_.end()) detail::refuse_file(folder_, "holds no tensor called " + name);
    detail::mapped_tensors const& in = shard(found->second);
    if (!in.header().holds(name))
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
      // An index must name only files of its folder, no other paths.
      bool const plain =
          !shard_name.empty() && shard_name.find('/') == shard_name.npos && shard_name != "." && shard_name != "..";
      if (!plain) detail::refuse_file(file, "does not say in which of the folder's files " + name + " is");
      file_of_[name] = shard_name;
    }
  }

  std::filesystem::path folder_;
  std::map<std::string, std::string> file_of_;
  std::map<std::string, std::unique_ptr<detail::mapped_tensors>> shards_;
};

}  // namespace chevron::detail
