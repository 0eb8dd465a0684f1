#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <chevron/run/stage/batch.hpp>

#include "common/packed_windows.hpp"
#include "common/token_windows.hpp"

/// \file
/// Samples of files of tokens, as the decoder and its loss take them.

namespace chevron::finetune {

/// How windows are cut from files of tokens.
enum class window_kind {
  stream,  ///< one after another, whatever documents they cut; a token sees all earlier ones of its window
  packed   ///< whole documents; a token sees earlier ones of its own document
};

/// The side input of a batch of packed windows, for the decoder: each token's position in its document.
inline constexpr char const* positions_name = "positions";

/// Windows of either kind.
class samples {
 public:
  /// \param context tokens in a window \param vocabulary number of tokens of the vocabulary
  /// \throws usage_error as `train::token_windows` and `train::packed_windows` do
  samples(window_kind kind, std::vector<std::string> const& files, std::int64_t context, std::int64_t vocabulary);

  std::size_t size() const;       ///< number of windows
  std::size_t tokens() const;     ///< number of tokens of all files
  std::int64_t context() const;   ///< tokens in a window
  bool packed() const;            ///< whether batches have positions
  bool counts_labels() const;     ///< whether tokens may be no labels, so that the loss is a mean over labels alone
  std::string settings() const;   ///< a text of all that decides which tokens a window contains
  std::string words() const;      ///< the same for people
  void check_vocabulary() const;  ///< \throws usage_error for a token outside the vocabulary

  /// The number of labels in windows [first, first + count). \param first number of a window \param count of windows
  double labels(std::size_t first, std::size_t count) const;
  /// The tensors of some windows: tokens as input, labels as target, and positions as side input if windows are packed.
  /// \param windows numbers of windows, below `size()`
  /// \throws usage_error for a token outside the vocabulary
  chevron::batch batch(std::span<std::size_t const> windows) const;

 private:
  std::variant<train::token_windows, train::packed_windows> windows_;
};

/// Counts the labels of a microbatch, by which the mean loss weighs it. \param of a batch of `samples`
double labels_of(chevron::batch const& of);

/// The kind of windows that a command line means. \param word `stream`, `packed`, or empty: packed if a file has a mask
window_kind kind_of_windows(std::string const& word, std::vector<std::string> const& files);

}  // namespace chevron::finetune
