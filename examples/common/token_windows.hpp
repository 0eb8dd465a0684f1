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

#include "common/labelled_tokens.hpp"

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
  /// \throws usage_error if `labelled_tokens` refuses a file, and for a file of at most `context` tokens
  token_windows(std::vector<std::filesystem::path> const& files, std::int64_t context, std::int64_t vocabulary)
      : context_(context) {
    if (context < 1 || vocabulary < 1)
      throw usage_error("windows need a context and a vocabulary from 1, not " + std::to_string(context) + " and " +
                        std::to_string(vocabulary));
    for (auto const& file : files) {
      files_.emplace_back(file, vocabulary);
      first_.push_back(size_);
      std::size_t const tokens = files_.back().file().size(), whole = (tokens - 1) / static_cast<std::size_t>(context);
      if (whole == 0) {
        throw usage_error(file.string() + " holds " + std::to_string(tokens) + (tokens == 1 ? " token" : " tokens") +
                          ", and a window with its next token needs " + std::to_string(context + 1) +
                          ". Remedy: a shorter context, or more tokens");
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
    for (labelled_tokens const& each : files_) sum += each.file().size();
    return sum;
  }
  /// Whether a file has a mask.
  bool masked() const {
    return std::any_of(files_.begin(), files_.end(), [](labelled_tokens const& each) { return each.masked(); });
  }
  std::int64_t context() const { return context_; }  ///< tokens in a window

  /// Reads windows. \param windows numbers of windows, below `size()`
  /// \returns the tokens, and for each token the next token, or `ignored_label` if the mask says that the next token is no label;
  /// both of shape [windows, context] and dtype int64
  /// \throws usage_error for a token outside the vocabulary (the error names file and index) and for a number from `size()` on
  std::pair<at::Tensor, at::Tensor> batch(std::span<std::size_t const> windows) const {
    auto const count = static_cast<std::int64_t>(windows.size());
    at::Tensor tokens = at::empty({count, context_}, at::kLong), following = at::empty({count, context_}, at::kLong);
    std::vector<std::int64_t> read(static_cast<std::size_t>(context_) + 1);
    auto* x = tokens.mutable_data_ptr<std::int64_t>();
    auto* y = following.mutable_data_ptr<std::int64_t>();
    for (std::size_t const window : windows) {
      auto const [from, begin] = place_of(window);
      from->read(begin, read);
      x = std::copy(read.begin(), read.end() - 1, x);
      std::copy(read.begin() + 1, read.end(), y);
      from->mask(begin + 1, {y, read.size() - 1});
      y += context_;
    }
    return {tokens, following};
  }

  /// Reads every token of every file once, so that a token outside the vocabulary is found before training begins.
  /// \throws usage_error for a token outside the vocabulary; the error names file and index
  void check_vocabulary() const {
    for (labelled_tokens const& each : files_) each.check();
  }

  /// The number of labels in a window. \param window number of the window, below `size()`
  std::size_t labels(std::size_t window) const {
    auto const [from, begin] = place_of(window);
    return from->labels(begin + 1, static_cast<std::size_t>(context_));
  }

  /// A text of all that decides which tokens a window contains (settings, fingerprint of files); must not change on resumption.
  std::string settings() const {
    detail::byte_fingerprint sum;
    for (labelled_tokens const& each : files_) each.add_to(sum);
    return std::to_string(size_) + " windows of " + std::to_string(context_) + " tokens, fingerprint " + sum.text();
  }

 private:
  /// A window's file, and the index of the window's first token in it.
  std::pair<labelled_tokens const*, std::size_t> place_of(std::size_t window) const {
    if (window >= size_) throw usage_error("there is no window " + std::to_string(window) + " of " + std::to_string(size_));
    auto const file = static_cast<std::size_t>(std::upper_bound(first_.begin(), first_.end(), window) - first_.begin()) - 1;
    return {&files_[file], (window - first_[file]) * static_cast<std::size_t>(context_)};
  }

  std::int64_t context_;
  std::vector<labelled_tokens> files_;
  std::vector<std::size_t> first_;  // number of the first window of each file
  std::size_t size_ = 0;
};

}  // namespace chevron::train
