#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "common/layer_cut.hpp"

/// \file
/// What `config.json` of a Hugging Face folder says of a decoder.

namespace chevron::finetune {

/// How rotary frequencies are stretched for longer texts than the model first learned from (Llama 3.1 and later).
struct stretched_rope {
  double factor = 1, low = 1, high = 4;
  double original_context = 8192;
};

/// A decoder of Llama's kind.
struct decoder_config {
  std::int64_t vocabulary = 0;
  std::int64_t width = 0;  ///< hidden_size
  std::int64_t inner = 0;  ///< intermediate_size
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t key_heads = 0;  ///< num_key_value_heads: each is shared by `heads / key_heads` queries
  std::int64_t head_width = 0;
  std::int64_t most_positions = 0;                        ///< no longer than a window of attention, where layers have one
  std::string positions_key = "max_position_embeddings";  ///< the key that says so
  std::vector<std::int64_t> windows{};  ///< by layer: tokens that its attention sees; 0: all. Empty: no layer has a window
  double norm_epsilon = 1e-6;
  double rope_theta = 10000;
  std::optional<stretched_rope> stretched{};
  bool tied = false;         ///< the embedding is the head, too
  bool query_bias = false;   ///< of queries, keys and values
  bool output_bias = false;  ///< of the projection behind attention
  bool inner_bias = false;
  bool head_norms = false;  ///< queries and keys are normed, head by head
  std::optional<std::int64_t>
      padding{};      ///< pad_token_id, whose row of the embedding is not trained; from the end where negative
  std::string dtype;  ///< of the saved tensors: float32, bfloat16, float16, float64; empty: not said
  std::string kind;   ///< model_type

  /// Parameters of the whole model, however it is cut; those that are tied once.
  std::int64_t parameters() const;
  /// Floating-point operations that training spends on a token, as torchtitan counts them.
  double flops_per_token(std::int64_t context) const;
  /// The share of a layer's operations that goes with the square of the context: causal attention's.
  double attention_share(std::int64_t context) const;
};

/// Reads `config.json` of a folder: keys, defaults of missing ones, and which of two spellings counts are those of
/// transformers 5.23.
/// \throws usage_error, with the key, its value and what is known here, for a model of another kind, and for a folder whose
/// tensors are not a model's plain ones
decoder_config read_decoder_config(std::filesystem::path const& folder);

/// Which layers a stage holds: they are shared out so that the costliest stage costs as little as possible, where the head costs
/// what its products do.
/// \throws usage_error for more stages than there are pieces
train::layer_cut cut_of(decoder_config const& c, int stages, int stage);

}  // namespace chevron::finetune
