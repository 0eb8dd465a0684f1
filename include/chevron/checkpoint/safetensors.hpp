#pragma once

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <nlohmann/json.hpp>

#include <chevron/base/new_file.hpp>
#include <chevron/checkpoint/file_tensor.hpp>
#include <chevron/checkpoint/strict_json.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>

/// \file
/// Reads and writes files of the safetensors format: 8 bytes with the header's length, a JSON header, then the tensors' bytes.
/// Python's safetensors reads these files, too.

namespace chevron {

/// Tensors with names, in the order in which they are written.
using named_tensors = std::vector<std::pair<std::string, at::Tensor>>;

namespace detail {

struct stored_dtype {
  at::ScalarType type;
  char const* name;
};
inline constexpr stored_dtype stored_dtypes[] = {{at::kDouble, "F64"},    {at::kFloat, "F32"},       {at::kHalf, "F16"},
                                                 {at::kBFloat16, "BF16"}, {at::kLong, "I64"},        {at::kInt, "I32"},
                                                 {at::kShort, "I16"},     {at::kChar, "I8"},         {at::kByte, "U8"},
                                                 {at::kBool, "BOOL"},     {at::kComplexFloat, "C64"}};

[[noreturn]] inline void refuse_file(std::filesystem::path const& file, std::string const& why) {
  throw checkpoint_error(file.string() + ": " + why);
}

/// A new file (new_file.hpp) that the constructor writes and syncs to the disk, with the fingerprint of its bytes. `give_name`
/// renames the file in one step; without this call the destructor removes the file.
class unnamed_file {
 public:
  /// Writes the file. \param write called with a function that appends bytes, given their address and number
  /// \throws checkpoint_error if a file cannot be written
  template <class Write>
  unnamed_file(std::filesystem::path const& file, Write&& write) : file_(created(file)) {
    write([&](void const* bytes, std::size_t count) {
      try {
        file_.write(bytes, count);
      } catch (std::system_error const& e) {
        refuse_writing(file, e.code());
      }
      sum_.add(bytes, count);
    });
    try {
      file_.sync();
      file_.close();
    } catch (std::system_error const& e) {
      refuse_file(file, "cannot be flushed to the disk: " + e.code().message());
    }
  }

  std::filesystem::path const& file() const { return file_.path(); }
  std::filesystem::path partial() const { return file_.partial(); }
  std::string fingerprint() const { return sum_.text(); }

  /// Gives the file its name. \throws checkpoint_error if the file cannot be renamed, or another program removed it
  void give_name() {
    try {
      file_.give_name();
    } catch (std::system_error const& e) {
      refuse_file(file(), "cannot be renamed from its temporary name: " + e.code().message() +
                              ". Remedy: a folder that no other job writes to");
    }
  }

 private:
  [[noreturn]] static void refuse_writing(std::filesystem::path const& file, std::error_code const& fault) {
    refuse_file(file, "cannot be written: " + fault.message() + ". Remedy: make room, or choose another folder");
  }
  static new_file created(std::filesystem::path const& file) {
    if (is_stream(file)) refuse_file(file, "is no file. Remedy: the name of a file");
    try {
      return new_file(file);
    } catch (std::system_error const& e) {
      refuse_writing(file, e.code());
    }
  }

  new_file file_;
  byte_fingerprint sum_;
};

/// The fingerprint of a file's bytes.
inline std::string fingerprint_of(std::filesystem::path const& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) refuse_file(file, std::string("cannot be opened: ") + std::strerror(errno));
  byte_fingerprint sum;
  std::vector<char> piece(std::size_t{1} << 20);
  while (in) {
    in.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    sum.add(piece.data(), static_cast<std::size_t>(in.gcount()));
  }
  if (!in.eof()) refuse_file(file, std::string("cannot be read: ") + std::strerror(errno));
  return sum.text();
}

/// Reads a whole file whose size is limited.
/// \param most largest size in bytes \param kind the kind of file, for the error about a larger file \param too_large further
/// words of that error
/// \throws checkpoint_error for a larger file, and if the file cannot be read
inline std::string text_of(std::filesystem::path const& file, std::uintmax_t most, char const* kind,
                           std::string const& too_large = "") {
  std::error_code failed;
  std::uintmax_t const size = std::filesystem::file_size(file, failed);
  if (failed) refuse_file(file, "cannot be read: " + failed.message());
  if (size > most) refuse_file(file, "is no " + std::string(kind) + ": it has " + std::to_string(size) + " bytes" + too_large);
  std::string text(size, ' ');
  std::ifstream in(file, std::ios::binary);
  in.read(text.data(), static_cast<std::streamsize>(size));
  if (!in) refuse_file(file, std::string("cannot be read: ") + std::strerror(errno));
  return text;
}

/// Writes tensors to a file that has no name yet. \param metadata entries of the header; empty: none
inline unnamed_file unnamed_safetensors(std::filesystem::path const& file, std::vector<file_tensor> const& all,
                                        std::map<std::string, std::string> const& metadata = {}) {
  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (file_tensor const& one : all) {
    char const* dtype = nullptr;
    for (auto const& known : stored_dtypes) dtype = known.type == one.type ? known.name : dtype;
    if (dtype == nullptr)
      refuse_file(file, one.name + " is of a dtype that safetensors does not have, " + std::string(c10::toString(one.type)) +
                            ". Remedy: another dtype; for complex numbers of doubles, a parameter of their real parts and its "
                            "at::view_as_complex in forward");
    if (header.contains(one.name)) refuse_file(file, "two tensors are called " + one.name);
    header[one.name] = {{"dtype", dtype}, {"shape", one.shape}, {"data_offsets", {offset, offset + one.bytes()}}};
    offset += one.bytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return {file, [&](auto const& write) {
            unsigned char length[8];
            for (int i = 0; i < 8; ++i)
              length[i] = static_cast<unsigned char>(static_cast<std::uint64_t>(text.size()) >> (8 * i));
            write(length, 8);
            write(text.data(), text.size());
            for (file_tensor const& one : all) {
              at::Tensor const plain = one.values().detach().cpu().contiguous();
              write(plain.const_data_ptr(), plain.nbytes());
            }
          }};
}

}  // namespace detail

/// Writes tensors, of any device and layout, as one file. A failure leaves no partial file.
/// \param all names and values; double, float, half, bfloat16, complex float, bool, signed integers, and bytes
/// \throws checkpoint_error for a dtype that the format lacks, for a name given twice, and if a file cannot be written
inline void write_safetensors(std::filesystem::path const& file, named_tensors const& all) {
  std::vector<detail::file_tensor> whole;
  for (auto const& [name, value] : all) whole.emplace_back(name, value);
  detail::unnamed_safetensors(file, whole).give_name();
}

/// A safetensors file, opened for reading. The constructor checks the whole header; tensors are read one at a time.
class safetensors_file {
 public:
  /// Reads the header. \throws checkpoint_error if the file is missing or cut short, or its header does not describe its bytes
  explicit safetensors_file(std::filesystem::path file) : path_(std::move(file)) {
    std::ifstream in(path_, std::ios::binary);
    if (!in) detail::refuse_file(path_, std::string("cannot be opened: ") + std::strerror(errno));
    std::error_code ignored;
    std::uint64_t const size = std::filesystem::file_size(path_, ignored);
    unsigned char length[8] = {};
    in.read(reinterpret_cast<char*>(length), 8);
    std::uint64_t header_size = 0;
    for (int i = 0; i < 8; ++i) header_size |= static_cast<std::uint64_t>(length[i]) << (8 * i);
    if (!in || size < 8 || header_size > size - 8 || header_size > most_header) {
      detail::refuse_file(path_, "is no safetensors file, or was cut short: its first 8 bytes give a header of " +
                                     std::to_string(header_size) + " bytes, the file has " + std::to_string(size));
    }
    std::string text(header_size, ' ');
    in.read(text.data(), static_cast<std::streamsize>(header_size));
    nlohmann::json header;
    try {
      header = detail::parse_strictly(text, 4);
    } catch (std::exception const& e) {
      detail::refuse_file(path_, std::string("its header is no JSON of this kind: ") + detail::in_short(e));
    }
    if (!header.is_object()) detail::refuse_file(path_, "its header is no JSON object");
    data_ = 8 + header_size;
    for (auto const& [name, about] : header.items()) {
      if (name != "__metadata__") entries_.emplace(name, entry_of(name, about, size - data_));
    }
    check_places(size - data_);
  }

  std::filesystem::path const& path() const { return path_; }  ///< as given to the constructor
  /// Whether the file holds a tensor of this name.
  bool holds(std::string const& name) const { return entries_.count(name) != 0; }
  /// All names, in alphabetical order.
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (auto const& [name, about] : entries_) all.push_back(name);
    return all;
  }
  /// Returns a tensor's shape. \throws checkpoint_error for a name that the file does not hold
  std::vector<std::int64_t> const& shape(std::string const& name) const { return entry(name).shape; }
  /// Returns a tensor's dtype. \throws checkpoint_error for a name that the file does not hold
  at::ScalarType dtype(std::string const& name) const { return entry(name).type; }

  /// Returns the position of a tensor's first byte in the file, and the number of its bytes.
  /// \throws checkpoint_error for a name that the file does not hold
  std::pair<std::uint64_t, std::uint64_t> place(std::string const& name) const {
    auto const& about = entry(name);
    return {data_ + about.begin, about.bytes};
  }

  /// Reads one tensor into main memory, contiguous.
  /// \param part the part to read: only its bytes are read; empty: the whole tensor
  /// \throws checkpoint_error for a name that the file does not hold, and if the file cannot be read
  at::Tensor read(std::string const& name, std::optional<detail::tensor_part> const& part = {}) const {
    auto const& about = entry(name);
    auto shape = about.shape;
    if (part) shape[static_cast<std::size_t>(part->along)] = part->size();
    at::Tensor out = at::empty(shape, about.type);
    detail::byte_runs const runs = detail::runs_of(about.shape, about.type, part);
    auto* to = static_cast<char*>(out.mutable_data_ptr());
    std::ifstream in(path_, std::ios::binary);  // opened for each read: a checkpoint may have more files than a process may open
    for (std::uint64_t read = 0, all = runs.bytes(); read < all;) {
      detail::byte_runs::run const here = runs.place(read);
      in.seekg(static_cast<std::streamoff>(data_ + about.begin + here.begin));
      in.read(to + read, static_cast<std::streamsize>(here.size));
      read += here.size;
    }
    if (!in) detail::refuse_file(path_, "cannot be read at " + name + ": " + std::strerror(errno));
    return out;
  }

 private:
  static constexpr std::uint64_t most_header = std::uint64_t{16} << 20;  // bytes; enough for a hundred thousand tensors

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
    auto const bad = [&](std::string const& what) {
      detail::refuse_file(path_, "its header does not describe its bytes: " + name + " " + what);
    };
    stored out{};
    if (!about.is_object() || !about.contains("dtype") || !about["dtype"].is_string()) bad("has no dtype");
    bool known = false;
    for (auto const& dtype : detail::stored_dtypes) {
      if (about["dtype"] == dtype.name) out.type = dtype.type, known = true;
    }
    if (!known) bad("has a dtype that is not known here, " + about["dtype"].get<std::string>().substr(0, 20));
    if (!about.contains("shape") || !about["shape"].is_array()) bad("has no shape");
    std::uint64_t elements = 1;
    for (auto const& extent : about["shape"]) {
      if (!extent.is_number_unsigned()) bad("has a shape that is not made of whole numbers");
      std::uint64_t const n = extent.get<std::uint64_t>();
      if (n > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) bad("has a shape that no tensor can have");
      out.shape.push_back(static_cast<std::int64_t>(n));
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

  /// Checks that tensors cover the data without overlap or gap, as the format requires.
  void check_places(std::uint64_t data_size) const {
    std::vector<std::pair<std::uint64_t, std::uint64_t>> places;
    for (auto const& [name, about] : entries_) places.emplace_back(about.begin, about.begin + about.bytes);
    std::sort(places.begin(), places.end());
    std::uint64_t reached = 0;
    for (auto const& [begin, end] : places) {
      if (begin != reached)
        detail::refuse_file(path_, "its header does not describe its bytes: " +
                                       std::string(begin < reached ? "two tensors share the bytes" : "no tensor has the bytes") +
                                       " from " + std::to_string(std::min(begin, reached)));
      reached = end;
    }
    if (reached != data_size)
      detail::refuse_file(path_,
                          "its header does not describe its bytes: no tensor has the bytes from " + std::to_string(reached));
  }

  std::filesystem::path path_;
  std::uint64_t data_ = 0;
  std::map<std::string, stored> entries_;
};

}  // namespace chevron
