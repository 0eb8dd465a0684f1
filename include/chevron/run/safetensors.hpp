#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <nlohmann/json.hpp>

#include <chevron/run/error.hpp>

/// \file
/// Tensors in files: the safetensors format (8 bytes of length, a JSON header, the tensors' bytes one after another), which
/// Python and others read too.

namespace chevron {

/// Tensors by name, in the order in which they are written.
using named_tensors = std::vector<std::pair<std::string, at::Tensor>>;

namespace detail {

struct stored_dtype {
  at::ScalarType type;
  char const* name;
};
inline constexpr stored_dtype stored_dtypes[] = {{at::kDouble, "F64"}, {at::kFloat, "F32"},   {at::kHalf, "F16"},
                                                 {at::kBFloat16, "BF16"}, {at::kLong, "I64"}, {at::kInt, "I32"},
                                                 {at::kShort, "I16"},  {at::kChar, "I8"},     {at::kByte, "U8"},
                                                 {at::kBool, "BOOL"}};

[[noreturn]] inline void refuse_file(std::filesystem::path const& file, std::string const& why) {
  throw checkpoint_error(file.string() + ": " + why);
}

/// Writes a file under another name, brings it to the disk and gives it its name: it is there whole or not at all.
template <class Write>
void write_whole(std::filesystem::path const& file, Write&& write) {
  std::filesystem::path const partial = file.string() + ".partial";
  {
    std::ofstream out(partial, std::ios::binary | std::ios::trunc);
    write(out);
    out.close();
    if (!out) refuse_file(partial, std::string("cannot be written: ") + std::strerror(errno) + ". Remedy: make room, or choose another folder");
  }
  int const opened = ::open(partial.c_str(), O_RDONLY);
  bool const kept = opened >= 0 && ::fsync(opened) == 0;
  if (opened >= 0) ::close(opened);
  std::error_code failed;
  if (kept) std::filesystem::rename(partial, file, failed);
  if (!kept || failed) refuse_file(file, std::string("cannot be brought to the disk: ") + std::strerror(kept ? failed.value() : errno));
}

}  // namespace detail

/// Writes tensors, of any device and layout, as one file. It is there whole or not at all.
/// \throws checkpoint_error for a dtype the format has no name for, for a name given twice, and where the disk refuses
inline void write_safetensors(std::filesystem::path const& file, named_tensors const& all) {
  nlohmann::json header = nlohmann::json::object();
  std::uint64_t offset = 0;
  for (auto const& [name, value] : all) {
    char const* dtype = nullptr;
    for (auto const& known : detail::stored_dtypes) dtype = known.type == value.scalar_type() ? known.name : dtype;
    if (dtype == nullptr) detail::refuse_file(file, name + " is of a dtype that safetensors does not have, " + std::string(c10::toString(value.scalar_type())));
    if (header.contains(name)) detail::refuse_file(file, "two tensors are called " + name);
    std::uint64_t const bytes = value.nbytes();
    header[name] = {{"dtype", dtype}, {"shape", value.sizes().vec()}, {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  detail::write_whole(file, [&](std::ofstream& out) {
    unsigned char length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(static_cast<std::uint64_t>(text.size()) >> (8 * i));
    out.write(reinterpret_cast<char const*>(length), 8);
    out.write(text.data(), static_cast<std::streamsize>(text.size()));
    for (auto const& [name, value] : all) {
      at::Tensor const plain = value.detach().cpu().contiguous();
      out.write(static_cast<char const*>(plain.const_data_ptr()), static_cast<std::streamsize>(plain.nbytes()));
    }
  });
}

/// A safetensors file opened for reading. Its header is checked in full when it is opened; tensors are read one at a time.
class safetensors_file {
 public:
  /// \throws checkpoint_error when the file is not there, is cut short, or its header does not describe its bytes
  explicit safetensors_file(std::filesystem::path file) : path_(std::move(file)), in_(path_, std::ios::binary) {
    if (!in_) detail::refuse_file(path_, std::string("cannot be opened: ") + std::strerror(errno));
    std::error_code ignored;
    std::uint64_t const size = std::filesystem::file_size(path_, ignored);
    unsigned char length[8] = {};
    in_.read(reinterpret_cast<char*>(length), 8);
    std::uint64_t header_size = 0;
    for (int i = 0; i < 8; ++i) header_size |= static_cast<std::uint64_t>(length[i]) << (8 * i);
    if (!in_ || size < 8 || header_size > size - 8 || header_size > most_header) {
      detail::refuse_file(path_, "is no safetensors file, or was cut short: its first 8 bytes give a header of " +
                                     std::to_string(header_size) + " bytes, the file has " + std::to_string(size));
    }
    std::string text(header_size, ' ');
    in_.read(text.data(), static_cast<std::streamsize>(header_size));
    auto const header = nlohmann::json::parse(text, nullptr, false);
    if (!header.is_object()) detail::refuse_file(path_, "its header is no JSON object");
    data_ = 8 + header_size;
    for (auto const& [name, about] : header.items()) {
      if (name != "__metadata__") entries_.emplace(name, entry_of(name, about, size - data_));
    }
  }

  std::filesystem::path const& path() const { return path_; }
  bool holds(std::string const& name) const { return entries_.count(name) != 0; }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (auto const& [name, about] : entries_) all.push_back(name);
    return all;
  }
  std::vector<std::int64_t> const& shape(std::string const& name) const { return entry(name).shape; }

  /// Reads one tensor into the main memory.
  at::Tensor read(std::string const& name) {
    auto const& about = entry(name);
    at::Tensor out = at::empty(about.shape, about.type);
    in_.clear();
    in_.seekg(static_cast<std::streamoff>(data_ + about.begin));
    in_.read(static_cast<char*>(out.mutable_data_ptr()), static_cast<std::streamsize>(about.bytes));
    if (!in_) detail::refuse_file(path_, "cannot be read at " + name + ": " + std::strerror(errno));
    return out;
  }

 private:
  static constexpr std::uint64_t most_header = std::uint64_t{100} << 20;

  struct stored {
    at::ScalarType type;
    std::vector<std::int64_t> shape;
    std::uint64_t begin, bytes;
  };

  stored const& entry(std::string const& name) const {
    auto const found = entries_.find(name);
    if (found == entries_.end()) detail::refuse_file(path_, "holds no tensor called " + name);
    return found->second;
  }

  stored entry_of(std::string const& name, nlohmann::json const& about, std::uint64_t data_size) const {
    auto const bad = [&](char const* what) { detail::refuse_file(path_, "its header does not describe its bytes: " + name + " " + what); };
    stored out{};
    if (!about.is_object() || !about.contains("dtype") || !about["dtype"].is_string()) bad("has no dtype");
    bool known = false;
    for (auto const& dtype : detail::stored_dtypes) {
      if (about["dtype"] == dtype.name) out.type = dtype.type, known = true;
    }
    if (!known) bad("has a dtype that is not known here");
    if (!about.contains("shape") || !about["shape"].is_array()) bad("has no shape");
    std::uint64_t elements = 1;
    for (auto const& extent : about["shape"]) {
      if (!extent.is_number_unsigned()) bad("has a shape that is not made of whole numbers");
      out.shape.push_back(extent.get<std::int64_t>());
      std::uint64_t const n = extent.get<std::uint64_t>();
      if (n != 0 && elements > data_size / n) bad("is larger than the file");
      elements *= n;
    }
    if (!about.contains("data_offsets") || !about["data_offsets"].is_array() || about["data_offsets"].size() != 2 ||
        !about["data_offsets"][0].is_number_unsigned() || !about["data_offsets"][1].is_number_unsigned()) {
      bad("has no place");
    }
    out.begin = about["data_offsets"][0].get<std::uint64_t>();
    std::uint64_t const end = about["data_offsets"][1].get<std::uint64_t>();
    if (end < out.begin || end > data_size) bad("reaches beyond the end of the file, which was cut short");
    out.bytes = end - out.begin;
    if (out.bytes != elements * c10::elementSize(out.type)) bad("has another size than its shape says");
    return out;
  }

  std::filesystem::path path_;
  std::ifstream in_;
  std::uint64_t data_ = 0;
  std::map<std::string, stored> entries_;
};

}  // namespace chevron
