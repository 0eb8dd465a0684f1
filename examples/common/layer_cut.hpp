#pragma once

#include <string>

/// \file
/// What of a language model a stage holds.

namespace chevron::train {

/// The layers [first, last) of one stage, and whether it starts with the embedding or ends with the head.
struct layer_cut {
  int first = 0;
  int last = 0;
  bool embeds = false;
  bool predicts = false;
};

/// The piece as words: `embedding, layers 0-1`.
inline std::string words_for(layer_cut const& cut) {
  std::string out;
  auto const add = [&](std::string const& part) { out += (out.empty() ? "" : ", ") + part; };
  if (cut.embeds) add("embedding");
  if (cut.last - cut.first == 1) add("layer " + std::to_string(cut.first));
  if (cut.last - cut.first > 1) add("layers " + std::to_string(cut.first) + "-" + std::to_string(cut.last - 1));
  if (cut.predicts) add("head");
  return out.empty() ? "passes on" : out;
}

}  // namespace chevron::train
