#include <torch/nn/modules/embedding.h>

#include <chevron/run.hpp>

// Trained numbers of a stage with an embedding of eight words.
long embedded(int width) {
  chevron::stage const stage = torch::nn::Embedding(8, width);
  return static_cast<long>(stage.parameters()[0].value.numel());
}
