#include <algorithm>
#include <string>
#include <vector>

#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/partition.hpp>

#include "decoder_config.hpp"

namespace chevron::finetune {

train::layer_cut cut_of(decoder_config const& c, int stages, int stage) {
  if (stages > c.layers + 2) {
    throw usage_error("the schedule cuts the model into " + std::to_string(stages) + " stages, but it has " +
                      std::to_string(c.layers + 2) + " pieces (embedding, " + std::to_string(c.layers) +
                      " layers, head). Remedy: fewer --ranks or --chunks");
  }
  // Pieces: the embedding, which multiplies nothing, the layers, and the head.
  std::vector<double> costs(static_cast<std::size_t>(c.layers) + 2, 0.0);
  auto const head = static_cast<double>(c.vocabulary * c.width);
  double const all_layers = static_cast<double>(c.parameters()) - head * (c.tied ? 1 : 2);
  for (std::size_t i = 1; i + 1 < costs.size(); ++i) costs[i] = all_layers / static_cast<double>(c.layers);
  costs.back() = head;
  std::vector<int> const pieces = balance(costs, stages);
  int begin = 0;
  for (int s = 0; s < stage; ++s) begin += pieces[static_cast<std::size_t>(s)];
  int const end = begin + pieces[static_cast<std::size_t>(stage)];
  return {.first = std::max(begin - 1, 0),
          .last = std::min(end - 1, static_cast<int>(c.layers)),
          .embeds = begin == 0,
          .predicts = stage == stages - 1};
}

}  // namespace chevron::finetune
