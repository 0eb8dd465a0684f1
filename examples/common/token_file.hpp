#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <utility>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/core/mapped_file.hpp>

/// \file
/// Memory-mapped files of tokens, in the formats of nanoGPT and Megatron-LM.

namespace chevron::train {

/// Adds a file's size and 65 evenly spread pieces of at most 4 KiB to a fingerprint, which tells files apart without reading all
/// bytes.
inline void add_pieces(detail::mapped_file const& file, detail::byte_fingerprint& sum) {
  std::uint64_t const bytes = file.size();
  sum.add(&bytes, sizeof bytes);
  constexpr std::size_t pieces = 64, piece = 4096;
  for (std::size_t i = 0; i <= pieces; ++i) {
    std::size_t const count = std::min<std::size_t>(piece, file.size());
    std::size_t const first = (file.size() - count) / pieces * i;
    sum.add(file.data() + first, count);
  }
}

/// The tokens of a file, as one sequence. Two formats can be read, both little-endian:
///
/// - nanoGPT's: FILE.bin contains 16-bit unsigned numbers, without a header; only the ending `.bin` marks the format;
/// - Megatron-LM's: FILE.bin, and beside it FILE.idx with the dtype of tokens and the length and place of each sequence.
///   Sequences must follow one another without gaps, as Megatron's tools write them.
class token_file {
 public:
  /// \param file FILE.bin, which is read in Megatron's format if FILE.idx exists
  /// \throws usage_error if a file cannot be mapped, is empty, contradicts its index, or has no index and either an odd number
  /// of bytes or an ending other than .bin
  explicit token_file(std::filesystem::path file) : tokens_(mapped(std::move(file))) {
    std::filesystem::path index = path();
    index.replace_extension(".idx");
    std::error_code ignored;
    if (index != path() && std::filesystem::exists(index, ignored)) {
      index_ = mapped(index);
      read_index(*index_);
    } else if (path().extension() != ".bin") {  // else a text file with an even number of bytes would be read as tokens
      refuse(path(), "is no FILE.bin, and no index " + index.filename().string() +
                         " lies beside it. Remedy: tokens; tokenise.py of chevron-finetune makes them of text");
    } else if (tokens_->size() % width_ != 0) {
      refuse(path(), "has an odd number of bytes, " + std::to_string(tokens_->size()) +
                         ". Remedy: 16-bit numbers, as nanoGPT writes them, or Megatron's index " + index.filename().string() +
                         " beside it");
    }
    if (size() == 0) refuse(path(), "holds no token. Remedy: a file of tokens that was written to its end");
  }

  std::filesystem::path const& path() const { return tokens_->path(); }  ///< the path of FILE.bin
  /// The number of tokens.
  std::size_t size() const { return tokens_->size() / width_; }

  /// Whether the file has an index; tokens of a file without an index have 16 bits.
  bool indexed() const { return index_ != nullptr; }

  /// Reads tokens [first, first + to.size()) into `to`.
  /// \param first index of the first token; first + to.size() must be at most `size()`, unchecked
  /// \throws usage_error if the file was cut short after it was mapped
  void read(std::size_t first, std::span<std::int64_t> to) const {
    if (!tokens_->still_whole()) refuse(path(), "was cut short while it was read. Remedy: let no other program write to it");
    copy_(tokens_->data() + first * width_, to);
  }

  /// Tokens of an index's sequence.
  struct piece {
    std::size_t begin, length;  ///< index of the first token, number of tokens
  };
  /// The number of sequences that the index lists; 0 without an index.
  std::size_t sequences() const { return sequences_; }
  /// A sequence of the index. \param number below `sequences()`, unchecked
  piece sequence(std::size_t number) const {
    auto const length = number_at<std::int32_t>(*index_, index_header + 4 * number);
    auto const place = number_at<std::int64_t>(*index_, index_header + 4 * sequences_ + 8 * number);
    return {static_cast<std::size_t>(place) / width_, static_cast<std::size_t>(length)};
  }

  /// Adds the file to a fingerprint, as `add_pieces` does.
  void add_to(detail::byte_fingerprint& sum) const { add_pieces(*tokens_, sum); }

 private:
  [[noreturn]] static void refuse(std::filesystem::path const& file, std::string const& why) {
    throw usage_error(file.string() + " " + why);
  }

  static std::shared_ptr<detail::mapped_file const> mapped(std::filesystem::path file) {
    try {
      return std::make_shared<detail::mapped_file const>(std::move(file));
    } catch (std::filesystem::filesystem_error const& e) {
      refuse(e.path1(), "cannot be mapped: " + e.code().message() + ". Remedy: a file of tokens, FILE.bin");
    }
  }

  template <class Number>
  static void copy(std::byte const* from, std::span<std::int64_t> to) {
    for (std::int64_t& token : to) {
      Number number;
      std::memcpy(&number, from, sizeof number);
      token = static_cast<std::int64_t>(number);
      from += sizeof number;
    }
  }

  template <class Number>
  static Number number_at(detail::mapped_file const& in, std::size_t place) {
    Number out;
    std::memcpy(&out, in.data() + place, sizeof out);
    return out;
  }

  template <class Number>
  void take() {
    copy_ = copy<Number>;
    width_ = sizeof(Number);
  }
  /// Sets the dtype of tokens. \param code the dtype's code in Megatron's index
  void take_dtype(std::filesystem::path const& index, int code) {
    if (code == 1) return take<std::uint8_t>();
    if (code == 2) return take<std::int8_t>();
    if (code == 3) return take<std::int16_t>();
    if (code == 4) return take<std::int32_t>();
    if (code == 5) return take<std::int64_t>();
    if (code == 8) return take<std::uint16_t>();
    refuse(index, "says that tokens are of dtype " + std::to_string(code) + ", which are no integers that are known here");
  }

  /// Reads and checks an index: a magic word of nine bytes, version, dtype, numbers of sequences and documents; then each
  /// sequence's length in tokens, each sequence's place in bytes, and the documents, which are not read.
  void read_index(detail::mapped_file const& index) {
    constexpr char magic[] = "MMIDIDX\0";  // nine bytes with the terminating 0
    if (index.size() < index_header || std::memcmp(index.data(), magic, 9) != 0)
      refuse(index.path(),
             "is no index of Megatron's. Remedy: the index of this file, or without one where tokens are nanoGPT's");
    auto const format = number_at<std::uint64_t>(index, 9);
    if (format != 1) refuse(index.path(), "is of version " + std::to_string(format) + "; version 1 is known here");
    take_dtype(index.path(), number_at<std::uint8_t>(index, 17));
    auto const sequences = number_at<std::uint64_t>(index, 18), documents = number_at<std::uint64_t>(index, 26);
    std::size_t const room = index.size() - index_header;
    bool const fits = sequences <= room / 12 && documents <= (room - sequences * 12) / 8;
    if (!fits) {
      refuse(index.path(), "was cut short: it speaks of " + std::to_string(sequences) + " sequences and " +
                               std::to_string(documents) + " documents, and has " + std::to_string(index.size()) + " bytes");
    }
    std::uint64_t bytes = 0;
    for (std::uint64_t s = 0; s < sequences; ++s) {
      auto const length = number_at<std::int32_t>(index, index_header + 4 * s);
      auto const place = number_at<std::int64_t>(index, index_header + 4 * sequences + 8 * s);
      if (length < 0 || place < 0 || static_cast<std::uint64_t>(place) != bytes) {
        refuse(index.path(), "says that sequence " + std::to_string(s) + " has " + std::to_string(length) + " tokens from byte " +
                                 std::to_string(place) + ", where the one before it ends at " + std::to_string(bytes) +
                                 ". Remedy: sequences one after another, as Megatron's tools write them");
      }
      bytes += static_cast<std::uint64_t>(length) * width_;
    }
    if (bytes != tokens_->size()) {
      refuse(path(), "has " + std::to_string(tokens_->size()) + " bytes, and its index " + index.path().filename().string() +
                         " speaks of " + std::to_string(bytes) + ". Remedy: the index that was written with it");
    }
    sequences_ = sequences;
  }

  static constexpr std::size_t index_header = 9 + 8 + 1 + 8 + 8;  // bytes before the sequences' lengths

  std::shared_ptr<detail::mapped_file const> tokens_, index_;  // index_: null without one
  std::size_t sequences_ = 0;
  void (*copy_)(std::byte const*, std::span<std::int64_t>) = copy<std::uint16_t>;
  std::size_t width_ = 2;  // bytes of a token
};

}  // namespace chevron::train
