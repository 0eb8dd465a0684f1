#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>

#include "common/labelled_tokens.hpp"
#include "common/packing.hpp"

/// \file
/// Samples for a language model, of whole documents.

namespace chevron::train {

/// Windows of whole documents, which are the sequences of Megatron-LM's index: conversations, for example. A document of n
/// tokens takes n - 1 places of a window, since its last token is only a label. A document that is longer than a window is cut at
/// the window's end, and what is behind is not used; one without a label is left out. Where a window has room behind its last
/// document there is padding, which is no label.
///
/// Each document counts its positions from 0, so a model that restarts at position 0 computes what it would compute for each
/// document alone.
class packed_windows {
 public:
  /// \param files files of tokens, each with its index (token_file.hpp) \param context tokens in a window, from 1
  /// \param vocabulary number of tokens of the vocabulary
  /// \throws usage_error if `labelled_tokens` refuses a file, for a file without an index, and for files without a label
  packed_windows(std::vector<std::filesystem::path> const& files, std::int64_t context, std::int64_t vocabulary)
      : context_(context) {
    if (context < 1 || vocabulary < 1 || files.empty())
      throw usage_error("windows need a file of tokens, FILE.bin, and a context and a vocabulary from 1");
    std::vector<std::size_t> lengths;
    for (auto const& file : files) {
      files_.emplace_back(file, vocabulary);
      if (!files_.back().file().indexed()) {
        throw usage_error(file.string() +
                          " has no index beside it, which says where documents end. Remedy: tokenise.py of "
                          "chevron-finetune writes one for conversations; or --windows stream");
      }
      add_documents(files_.size() - 1, lengths);
    }
    if (pieces_.empty()) {
      throw usage_error(files.front().string() + (files.size() > 1 ? " and the files behind it have" : " has") +
                        " no document with a label in its first " + std::to_string(context + 1) +
                        " tokens. Remedy: a longer context, or a mask that marks what the model shall learn");
    }
    windows_ = packed(lengths, static_cast<std::size_t>(context));
  }

  std::size_t size() const { return windows_.size(); }      ///< number of windows
  std::int64_t context() const { return context_; }         ///< tokens in a window
  std::size_t documents() const { return pieces_.size(); }  ///< number of documents in all windows
  std::size_t cut() const { return cut_; }                  ///< of these, documents that are longer than a window
  std::size_t left_out() const { return left_out_; }        ///< number of documents without a label, which no window has
  /// The number of tokens of all files.
  std::size_t tokens() const {
    std::size_t sum = 0;
    for (labelled_tokens const& each : files_) sum += each.file().size();
    return sum;
  }
  /// The share of places that have no padding.
  double filled() const {
    std::size_t sum = 0;
    for (piece const& each : pieces_) sum += each.length;
    return static_cast<double>(sum) / (static_cast<double>(size()) * static_cast<double>(context_));
  }
  /// The number of labels in a window. \param window number of the window
  std::size_t labels(std::size_t window) const {
    std::size_t sum = 0;
    for (std::size_t const p : windows_.at(window)) sum += pieces_[p].labels;
    return sum;
  }

  /// The tensors of some windows, of shape [windows, context] and dtype int64.
  struct batch_of {
    at::Tensor tokens;     ///< padding is token 0
    at::Tensor following;  ///< each token's label; `ignored_label` where the mask has none, and of padding
    at::Tensor positions;  ///< each token's position in its document; 0 of padding
  };
  /// Reads windows. \param windows numbers of windows, below `size()`
  /// \throws usage_error for a token outside the vocabulary (the error names file and index) and for a number from `size()` on
  batch_of batch(std::span<std::size_t const> windows) const {
    std::vector<std::int64_t> const shape{static_cast<std::int64_t>(windows.size()), context_};
    batch_of out{at::zeros(shape, at::kLong), at::full(shape, ignored_label, at::kLong), at::zeros(shape, at::kLong)};
    auto* x = out.tokens.mutable_data_ptr<std::int64_t>();
    auto* y = out.following.mutable_data_ptr<std::int64_t>();
    auto* z = out.positions.mutable_data_ptr<std::int64_t>();
    std::vector<std::int64_t> read;
    for (std::size_t w = 0; w < windows.size(); ++w) {
      if (windows[w] >= size())
        throw usage_error("there is no window " + std::to_string(windows[w]) + " of " + std::to_string(size()));
      std::size_t place = w * static_cast<std::size_t>(context_);
      for (std::size_t const number : windows_[windows[w]]) {
        piece const& p = pieces_[number];
        labelled_tokens const& from = files_[p.file];
        read.resize(p.length + 1);
        from.read(p.begin, read);
        std::copy(read.begin(), read.end() - 1, x + place);
        std::span<std::int64_t> const labels(y + place, p.length);
        std::copy(read.begin() + 1, read.end(), labels.begin());
        from.mask(p.begin + 1, labels);
        for (std::size_t i = 0; i < p.length; ++i) z[place + i] = static_cast<std::int64_t>(i);
        place += p.length;
      }
    }
    return out;
  }

  /// Reads every token of every file once, so that a token outside the vocabulary is found before training begins.
  /// \throws usage_error for a token outside the vocabulary; the error names file and index
  void check_vocabulary() const {
    for (labelled_tokens const& each : files_) each.check();
  }

  /// A text of all that decides which tokens a window contains (settings, fingerprint of files); must not change on resumption.
  std::string settings() const {
    detail::byte_fingerprint sum;
    for (labelled_tokens const& each : files_) each.add_to(sum);
    for (piece const& each : pieces_) {
      std::uint64_t const numbers[] = {each.begin, each.length, each.labels};
      sum.add(numbers, sizeof numbers);
    }
    return std::to_string(documents()) + " documents in " + std::to_string(size()) + " windows of " + std::to_string(context_) +
           " tokens, fingerprint " + sum.text();
  }

 private:
  /// A document's part in a window.
  struct piece {
    std::size_t file, begin;  ///< the file's number, and the index of the first token in it
    std::size_t length;       ///< places in the window; as many labels, or fewer, follow
    std::size_t labels;
  };

  void add_documents(std::size_t number, std::vector<std::size_t>& lengths) {
    labelled_tokens const& from = files_[number];
    for (std::size_t s = 0; s < from.file().sequences(); ++s) {
      auto const [begin, count] = from.file().sequence(s);
      std::size_t const length = count < 2 ? 0 : std::min(count - 1, static_cast<std::size_t>(context_));
      std::size_t const labels = from.labels(begin + 1, length);
      if (labels == 0) {
        ++left_out_;
        continue;
      }
      cut_ += length + 1 < count ? 1 : 0;
      pieces_.push_back({number, begin, length, labels});
      lengths.push_back(length);
    }
  }

  std::int64_t context_;
  std::vector<labelled_tokens> files_;
  std::vector<piece> pieces_;
  std::vector<std::vector<std::size_t>> windows_;  // numbers of pieces
  std::size_t cut_ = 0, left_out_ = 0;
};

}  // namespace chevron::train
