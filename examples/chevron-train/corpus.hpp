#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

/// \file
/// The text a model is trained on: the bytes of files and folders.

namespace chevron::train {

/// Text in two parts: one to learn from, one never shown in training.
struct corpus {
  std::string training;
  std::string held_out;
  int files = 0;           ///< text files read
  int skipped = 0;         ///< files left out: not text
  bool cut_short = false;  ///< there was more than `limit` bytes
  std::string source;      ///< for people: where it came from
};

struct corpus_options {
  std::vector<std::string> paths;         ///< files and folders; empty: the C++ headers of LibTorch itself
  std::int64_t limit = 16 * 1024 * 1024;  ///< at most so many bytes are kept
  std::int64_t least = 0;                 ///< a `usage_error` if either part is shorter: one sample must fit
};

/// Reads everything: folders recursively, in the order of their names, text files only. Every twentieth file is held out, or,
/// where there are fewer than twenty, the last twentieth of the text. Throws a `usage_error` that names the path at fault.
corpus read_corpus(corpus_options const& options);

/// A number that depends on nothing but these: the same on every machine, for every number of ranks.
std::uint64_t mixed(std::uint64_t seed, std::uint64_t step, std::uint64_t sample);

}  // namespace chevron::train
