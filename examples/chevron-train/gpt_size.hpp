#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include <chevron/run/core/error.hpp>
#include <chevron/tools/search/layer_costs.hpp>

#include "common/layer_cut.hpp"

/// \file
/// How large the model is, and how it is cut into stages.

namespace chevron::train {

/// A token is a byte, so there is no vocabulary to build.
inline constexpr int vocabulary = 256;

struct gpt_size {
  int layers = 4;
  int width = 128;
  int heads = 4;
  int context = 64;  ///< bytes the model sees at once
  int experts = 1;   ///< of each block, of which a gate chooses one for each byte; 1: no gate

  /// Parameters of the whole model, however it is cut.
  constexpr std::int64_t parameters() const {
    std::int64_t const w = width;
    std::int64_t const attention = 2 * w + 3 * w * w + w * w;
    std::int64_t const gate = experts > 1 ? experts * w : 0;
    return (vocabulary + context) * w + layers * (attention + 2 * w + experts * two_maps() + gate) + 2 * w + vocabulary * w;
  }
  /// Parameters of one expert.
  constexpr std::int64_t two_maps() const {
    std::int64_t const w = width;
    return (4 * w * w + 4 * w) + (4 * w * w + w);
  }

  /// The share of a step's operations that goes with the square of the context: causal attention's of a block's.
  constexpr double attention_share() const {
    double const s = context, block = static_cast<double>(4 * std::int64_t{width} * width + two_maps());
    return width * s / (block + width * s);
  }

  /// Floating-point operations that training spends on a token, as torchtitan counts them: 6 for each parameter that multiplies,
  /// and attention's own, as if it saw the whole window.
  constexpr double flops_per_token() const {
    std::int64_t const idle = layers * (experts - 1) * two_maps();  // experts that the gate did not choose
    double const multiplying = static_cast<double>(parameters() - std::int64_t{vocabulary + context} * width - idle);
    return 6 * multiplying + 12.0 * layers * width * context;
  }
};

/// Which layers a stage holds. They are spread evenly, the front first, since the head weighs on the last stage. Up to two more
/// stages than layers will do: then the head, and after it the embedding, are stages of their own. Between first and last a stage
/// that `given` leaves without layers passes on what arrives.
/// \param given how many layers each stage holds; empty: as even as can be
inline layer_cut cut_of(int layers, int stages, int stage, std::vector<int> const& given = {}) {
  if (given.empty() && stages > layers + 2) {
    throw usage_error("the schedule cuts the model into " + std::to_string(stages) + " stages, but with --layers " +
                      std::to_string(layers) + " there are " + std::to_string(layers + 2) +
                      " pieces (embedding, layers, head). Remedy: --layers " + std::to_string(stages - 2) +
                      " or more, --layers with a number for each stage (0: it passes on), or fewer --ranks or --chunks");
  }
  std::vector<int> const each = given.empty() ? search::even_layers(layers, stages) : given;
  if (each.size() != static_cast<std::size_t>(stages)) {
    throw usage_error("--layers gives the layers of " + std::to_string(each.size()) + " stages, and the schedule has " +
                      std::to_string(stages) + ". Remedy: a number for each stage, or their sum alone");
  }
  int const first = std::accumulate(each.begin(), each.begin() + stage, 0);
  int const count = each[static_cast<std::size_t>(stage)];
  return {first, first + count, stage == 0, stage == stages - 1};
}

}  // namespace chevron::train
