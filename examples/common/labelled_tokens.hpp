#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/core/mapped_file.hpp>

#include "common/ignored_label.hpp"
#include "common/token_file.hpp"

/// \file
/// Tokens of a vocabulary, and which of them a model learns to predict.

namespace chevron::train {

/// A file of tokens (token_file.hpp) and, if FILE.mask lies beside FILE.bin, its mask: one byte for each token, 1 for a label,
/// which the model learns to predict, and 0 for a token that it only reads, such as one of a prompt. Without a mask all tokens
/// are labels.
class labelled_tokens {
 public:
  /// \param file FILE.bin \param vocabulary number of tokens of the vocabulary: tokens are from 0 to vocabulary - 1
  /// \throws usage_error if `token_file` refuses the file, if the mask has not one byte for each token, and for a file without an
  /// index if the vocabulary needs more than 16 bits: wider tokens would be read as several of 16 bits
  labelled_tokens(std::filesystem::path const& file, std::int64_t vocabulary) : tokens_(file), vocabulary_(vocabulary) {
    if (vocabulary > 65536 && !tokens_.indexed()) {
      throw usage_error(
          file.string() + " has no index beside it, so its tokens are 16-bit numbers, too few for a vocabulary of " +
          std::to_string(vocabulary) + ". Remedy: Megatron's convention, as tokenise.py of chevron-finetune writes it");
    }
    std::filesystem::path beside = file;
    beside.replace_extension(".mask");
    std::error_code ignored;
    if (beside == file || !std::filesystem::exists(beside, ignored)) return;
    try {
      mask_ = std::make_shared<detail::mapped_file const>(beside);
    } catch (std::filesystem::filesystem_error const& e) {
      throw usage_error(beside.string() + " cannot be mapped: " + e.code().message() +
                        ". Remedy: the mask that tokenise.py wrote, or none");
    }
    if (mask_->size() != tokens_.size()) {
      throw usage_error(beside.string() + " has " + std::to_string(mask_->size()) + " bytes, and " + file.string() + " has " +
                        std::to_string(tokens_.size()) + " tokens. Remedy: the mask that was written with these tokens, or none");
    }
  }

  token_file const& file() const { return tokens_; }       ///< the tokens' file
  bool masked() const { return mask_ != nullptr; }         ///< whether the file has a mask
  std::int64_t vocabulary() const { return vocabulary_; }  ///< number of tokens of the vocabulary

  /// Reads tokens [first, first + to.size()) into `to`.
  /// \param first index of the first token; first + to.size() must be at most `file().size()`, unchecked
  /// \throws usage_error for a token outside the vocabulary; the error names file and index
  void read(std::size_t first, std::span<std::int64_t> to) const {
    tokens_.read(first, to);
    for (std::size_t i = 0; i < to.size(); ++i) {
      if (to[i] >= 0 && to[i] < vocabulary_) continue;
      throw usage_error(file().path().string() + ": token " + std::to_string(first + i) + " is " + std::to_string(to[i]) +
                        ", and the vocabulary has " + std::to_string(vocabulary_) + ". Remedy: the tokenizer of this model");
    }
  }

  /// Replaces tokens that are no labels by `ignored_label`.
  /// \param first index in the file of the first of `labels` \param labels tokens that were read there
  /// \throws usage_error for a byte of the mask that is neither 0 nor 1
  void mask(std::size_t first, std::span<std::int64_t> labels) const {
    if (!mask_) return;
    for (std::size_t i = 0; i < labels.size(); ++i) {
      if (!is_label(first + i)) labels[i] = ignored_label;
    }
  }

  /// Counts labels among the tokens [first, first + count). \throws usage_error as `mask`
  std::size_t labels(std::size_t first, std::size_t count) const {
    if (!mask_) return count;
    std::size_t sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += is_label(first + i) ? 1 : 0;
    return sum;
  }

  /// Reads every token and every byte of the mask once. \throws usage_error as `read` and `mask`
  void check() const {
    std::vector<std::int64_t> piece;
    for (std::size_t begin = 0; begin < tokens_.size(); begin += piece.size()) {
      piece.resize(std::min<std::size_t>(65536, tokens_.size() - begin));
      read(begin, piece);
      (void)labels(begin, piece.size());
    }
  }

  /// Adds sizes and evenly spread pieces of tokens and mask to a fingerprint.
  void add_to(detail::byte_fingerprint& sum) const {
    tokens_.add_to(sum);
    if (mask_) add_pieces(*mask_, sum);
  }

 private:
  bool is_label(std::size_t token) const {
    std::byte const one = mask_->data()[token];
    if (one > std::byte{1}) {
      throw usage_error(mask_->path().string() + ": byte " + std::to_string(token) + " is " +
                        std::to_string(std::to_integer<int>(one)) +
                        ". Remedy: a mask of bytes 0 and 1, as tokenise.py of chevron-finetune writes it");
    }
    return one == std::byte{1};
  }

  token_file tokens_;
  std::int64_t vocabulary_;
  std::shared_ptr<detail::mapped_file const> mask_;  // null: all tokens are labels
};

}  // namespace chevron::train
