#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>

#include "common/token_file.hpp"

/// \file
/// Samples for a language model, cut from files of tokens.

namespace chevron::train {

/// Windows of tokens over one or several files, and for each token the token that follows. Window i of a file has tokens
/// [i × context, (i + 1) × context); its last token is followed by the first token of window i + 1. Documents are packed: a
/// window may contain several. Tokens at a file's end that fill no window are not used.
///
///     chevron::train::token_windows const set({"books.bin"}, 1024, vocabulary);
///     chevron::distributed_sampler sampler(set.size(), comm.topology(), {.batch_size = 16, .seed = 1});
///     sampler.start_at(trainer.next_step());  // 0, or the next step of a checkpoint
///     auto const [tokens, following] = set.batch(*sampler.next(16));
class token_windows {
 public:
  /// \param files files of tokens (token_file.hpp); windows are numbered file after file, in this order
  /// \param context tokens in a window, from 1
  /// \param vocabulary number of tokens of the vocabulary: tokens are from 0 to vocabulary - 1
  /// \throws usage_error if `token_file` refuses a file, for a file of at most `context` tokens, and for a file without an
  /// index if the vocabulary needs more than 16 bits: wider tokens would be read as several of 16 bits
  token_windows(std::vector<std::filesystem::path> const& files, std::int64_t context, std::int64_t vocabulary)
      : context_(context), vocabulary_(vocabulary) {
    if (context < 1 || vocabulary < 1)
      throw usage_error("windows need a context and a vocabulary from 1, not " + std::to_string(context) + " and " +
                        std::to_string(vocabulary));
    for (auto const& file : files) {
      files_.emplace_back(file);
      first_.push_back(size_);
      if (vocabulary > 65536 && !files_.back().indexed()) {
        throw usage_error(
            file.string() + " has no index beside it, so its tokens are 16-bit numbers, too few for a vocabulary of " +
            std::to_string(vocabulary) + ". Remedy: Megatron's convention, as tokenise.py of chevron-finetune writes it");
      }
      std::size_t const whole = (files_.back().size() - 1) / static_cast<std::size_t>(context);
      if (whole == 0) {
        throw usage_error(file.string() + " holds " + std::to_string(files_.back().size()) +
                          (files_.back().size() == 1 ? " token" : " tokens") + ", and a window with its next token needs " +
                          std::to_string(context + 1) + ". Remedy: a shorter context, or more tokens");
      }
      size_ += whole;
    }
    if (files_.empty()) throw usage_error("windows need a file of tokens, FILE.bin");
  }

  /// The number of windows of all files.
  std::size_t size() const { return size_; }
  /// The number of tokens of all files.
  std::size_t tokens() const {
    std::size_t sum = 0;
    for (token_file const& each : files_) sum += each.size();
    return sum;
  }
  std::int64_t context() const { return context_; }  ///< tokens in a window

  /// Reads windows. \param windows numbers of windows, below `size()`
  /// \returns the tokens, and for each token the next token, both of shape [windows, context] and dtype int64
  /// \throws usage_error for a token outside the vocabulary (the error names file and index) and for a number from `size()` on
  std::pair<at::Tensor, at::Tensor> batch(std::span<std::size_t const> windows) const {
    auto const count = static_cast<std::int64_t>(windows.size());
    at::Tensor tokens = at::empty({count, context_}, at::kLong), following = at::empty({count, context_}, at::kLong);
    std::vector<std::int64_t> read(static_cast<std::size_t>(context_) + 1);
    auto* x = tokens.mutable_data_ptr<std::int64_t>();
    auto* y = following.mutable_data_ptr<std::int64_t>();
    for (std::size_t const window : windows) {
      if (window >= size_) throw usage_error("there is no window " + std::to_string(window) + " of " + std::to_string(size_));
      auto const file = static_cast<std::size_t>(std::upper_bound(first_.begin(), first_.end(), window) - first_.begin()) - 1;
      std::size_t const begin = (window - first_[file]) * static_cast<std::size_t>(context_);
      files_[file].read(begin, read);
      check(files_[file], begin, read);
      x = std::copy(read.begin(), read.end() - 1, x);
      y = std::copy(read.begin() + 1, read.end(), y);
    }
    return {tokens, following};
  }

  /// Reads every token of every file once, so that a token outside the vocabulary is found before training begins.
  /// \throws usage_error for a token outside the vocabulary; the error names file and index
  void check_vocabulary() const {
    std::vector<std::int64_t> read;
    for (token_file const& each : files_) {
      for (std::size_t begin = 0; begin < each.size(); begin += read.size()) {
        read.resize(std::min<std::size_t>(65536, each.size() - begin));
        each.read(begin, read);
        check(each, begin, read);
      }
    }
  }

  /// A text of all that decides which tokens a window contains (settings, fingerprint of files); must not change on resumption.
  std::string settings() const {
    detail::byte_fingerprint sum;
    for (token_file const& each : files_) each.add_to(sum);
    return std::to_string(size_) + " windows of " + std::to_string(context_) + " tokens, fingerprint " + sum.text();
  }

 private:
  /// Checks that a file's tokens `read` are in the vocabulary. \param begin index in the file of the first token of `read`
  void check(token_file const& file, std::size_t begin, std::span<std::int64_t const> read) const {
    for (std::size_t i = 0; i < read.size(); ++i) {
      if (read[i] >= 0 && read[i] < vocabulary_) continue;
      throw usage_error(file.path().string() + ": token " + std::to_string(begin + i) + " is " + std::to_string(read[i]) +
                        ", and the vocabulary has " + std::to_string(vocabulary_) + ". Remedy: the tokenizer of this model");
    }
  }

  std::int64_t context_, vocabulary_;
  std::vector<token_file> files_;
  std::vector<std::size_t> first_;  // number of the first window of each file
  std::size_t size_ = 0;
};

}  // namespace chevron::train
