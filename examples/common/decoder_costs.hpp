#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// \file
/// Operations, memory traffic and bytes of a decoder's embedding, layers and head. docs/reference/model-costs.md derives each
/// formula, with its source.

namespace chevron::train {

/// The sizes of a decoder-only Transformer: of Llama's kind (RMSNorm, rotary embedding, gated maps), or of GPT's kind (LayerNorm,
/// learned positions, two maps with GELU, biases everywhere).
struct decoder_size {
  bool gpt = false;
  std::int64_t layers = 0;
  std::int64_t width = 0;  ///< of the stream between layers
  std::int64_t inner = 0;  ///< of the maps, or of one expert
  std::int64_t heads = 0;
  std::int64_t key_heads = 0;  ///< fewer than heads: grouped queries
  std::int64_t head_width = 0;
  std::int64_t vocabulary = 0;
  std::int64_t positions = 0;  ///< rows of GPT's position embedding
  std::int64_t experts = 0;    ///< of each layer; 0: maps without experts
  std::int64_t experts_per_token = 0;
  bool tied = false;                    ///< embedding and head share their weight
  bool query_bias = false;              ///< of queries, keys and values
  bool output_bias = false;             ///< of attention's output
  bool inner_bias = false;              ///< of the maps, or of those of each expert
  bool router_bias = false;             ///< of the scores of experts
  bool sinks = false;                   ///< attention has a learned score for each head, which no key has
  bool head_norms = false;              ///< queries and keys are normed, head by head
  std::vector<std::int64_t> windows{};  ///< by layer: tokens that attention sees; 0: all earlier ones. Empty: 0 for each

  std::int64_t queries() const { return heads * head_width; }
  std::int64_t keys() const { return key_heads * head_width; }
  /// Parameters of one layer that multiply activations, and of those the ones that a token meets (with experts, fewer).
  std::int64_t layer_weights() const;
  std::int64_t layer_weights_of_token() const;
  std::int64_t layer_parameters() const;
  std::int64_t embedding_parameters() const;
  /// The head's weight and the last norm, tied or not.
  std::int64_t head_parameters() const;
  /// Parameters of the whole model; a tied weight counts once.
  std::int64_t parameters() const;
};

/// Code that runs attention, and what of it is stored for the backward.
enum class attention_kind {
  flash,     ///< the scores are computed again in the backward (Dao, arXiv 2307.08691)
  full,      ///< the scores are stored
  selective  ///< the scores of `full` are computed again in the backward (Korthikanti et al., arXiv 2205.05198, section 5)
};

/// Code of norms, gates and rotary embedding.
enum class kernel_kind {
  finetune,      ///< of chevron-finetune: separate operators; keys and values are repeated for each query's head
  transformers,  ///< of transformers 5: separate operators; flash attention takes shared keys and values
  fused          ///< one kernel for each norm and gate, which keeps its input
};

enum class optimizer_kind { adamw, momentum, sgd };

/// Low-rank adapters beside a frozen decoder of Llama's kind without experts (LoRA: Hu et al., arXiv 2106.09685): each projection
/// with an adapter computes W x + scale × B A x. Everything but A and B is frozen.
struct adapter_sizes {
  std::int64_t rank = 0;  ///< rows of A and columns of B; 0: no adapters, the whole model is trained
  bool queries = false, keys = false, values = false, output = false;  ///< of attention: which projections have an adapter
  bool gate = false, up = false, down = false;                         ///< of the gated maps
};

/// One microbatch, or one slice of its sequences, and the options of training that decide costs and bytes.
struct training_setup {
  std::int64_t tokens = 0;   ///< of a sequence
  std::int64_t samples = 1;  ///< sequences of a microbatch
  /// With sequences in slices: the tokens of each sequence that one slice has, from `slice_begin` up to `slice_end`. Its queries
  /// also meet the keys of earlier slices. `slice_end` 0: whole sequences.
  std::int64_t slice_begin = 0, slice_end = 0;
  /// With `kernel_kind::finetune`: whether attention of a later slice takes all keys and values up to the slice's end in one
  /// joined tensor, as on GPUs, or each slice's as they are, as on the CPU.
  bool joins_slices = true;
  std::int64_t item = 2;  ///< bytes of a number: of parameters, of the stream between layers, and of activations
  /// Whether products run in bfloat16 beside parameters and a stream of `item` bytes, as under PyTorch's autocast: each product
  /// casts its inputs and its weight anew. Of decoders of Llama's kind without experts.
  bool autocast = false;
  adapter_sizes adapters{};  ///< change bytes alone: works are those of a model that is trained as a whole
  optimizer_kind optimizer = optimizer_kind::adamw;
  bool masters = false;  ///< float32 copies of parameters in half precision
  attention_kind attention = attention_kind::flash;
  kernel_kind kernels = kernel_kind::finetune;
  std::int64_t shards = 1;     ///< ranks of tensor parallelism, which share each layer
  bool cuts_sequence = false;  ///< with shards: norms run on a shard's piece of the sequence
  /// Ranks over which whole experts of each layer are divided evenly, the shards among them, if they cut the sequence (expert
  /// parallelism); 1: each shard has a part of every expert.
  std::int64_t expert_ranks = 1;

  /// Tokens of each sequence whose queries are computed, and tokens up to the last of them.
  std::int64_t own_tokens() const { return slice_end > 0 ? slice_end - slice_begin : tokens; }
  std::int64_t seen_tokens() const { return slice_end > 0 ? slice_end : tokens; }
  /// Whether later slices take keys and values of these tokens.
  bool is_carried() const { return slice_end > 0 && slice_end < tokens; }
  /// Tokens of the microbatch, or of the slice of it.
  std::int64_t microbatch() const { return own_tokens() * samples; }
  bool trains_all() const { return adapters.rank == 0; }
  /// Bytes of a number that a product takes or gives.
  std::int64_t product_item() const { return autocast ? 2 : item; }
  /// Bytes of a parameter's gradient: sums of half precision are float32.
  std::int64_t gradient_item() const { return item < 4 ? 4 : item; }
  /// Bytes of a parameter's gradient as the optimizer reads it, beside its float32 sum: in half precision without masters.
  std::int64_t rounded_item() const { return item < 4 && !masters ? item : 0; }
  /// Bytes of a parameter's optimizer state, with its master.
  std::int64_t state_item() const;
};

/// The work of F, I or W of one piece on one microbatch.
struct piece_work {
  double matrix = 0;  ///< floating-point operations of matrix products
  double moved = 0;   ///< bytes that other operators and gradient sums read and write
};

/// Embedding, layer or head: work and bytes of one microbatch, on one of the shards.
struct piece_figures {
  piece_work forward, backward_input, backward_weight;
  std::int64_t parameters = 0;
  std::int64_t expert_parameters = 0;  ///< of these, experts'
  std::int64_t trained = 0;            ///< of these, the ones that are not frozen
  std::int64_t fixed = 0;              ///< parameters, gradients and the optimizer's state
  std::int64_t gradient = 0;           ///< of these, sums of gradients; 0 for tied parameters
  std::int64_t state = 0;              ///< of these, the optimizer's state
  std::int64_t activation = 0;         ///< stored from F to B or I
  std::int64_t kept = 0;               ///< stored from I to W
  std::int64_t input = 0;
  /// Of a slice: its keys and values, which later slices take and which recomputed stages store, too; and the sums of their
  /// gradients, which later slices compute.
  std::int64_t carried = 0, carried_gradient = 0;
  /// Of `carried`, and of `activation` with it: keys and values that the slice's own backward does not take, so that a forward
  /// that is repeated does not store them again.
  std::int64_t carried_alone = 0;
  /// The gradients of `carried` as they are returned to the slice, in the dtype of keys and values.
  std::int64_t carried_returned = 0;
  /// Of the first layer of a later slice, if nothing below is trained but an embedding: stored from I, which computes the
  /// gradients of earlier slices' keys and values alone, to W.
  std::int64_t kept_as_first = 0;
  /// With shards: sums of the stream of a microbatch over the shards in F and in the backward. Half a sum is a reduce-scatter, or
  /// the gather that its gradient needs.
  double collectives = 0, backward_collectives = 0;
  /// With divided experts: bytes of the rows that a rank routes to experts, in each of the two all-to-all of F and of I.
  double routed = 0;
};

/// The pieces of a decoder in their order: the embedding, each layer, the head with the loss. With adapters the input of the
/// first layer needs no gradient, since no parameter below it is trained.
/// \param size of the whole model; its heads, inner widths and vocabulary are divided by `setup.shards`, rounded up
std::vector<piece_figures> decoder_pieces(decoder_size const& size, training_setup const& setup);

/// Bytes of the message between two pieces: one microbatch's stream.
std::int64_t message_bytes(decoder_size const& size, training_setup const& setup);

/// Floating-point operations that F, I and W of one microbatch spend on the model itself (recomputed scores are not counted), for
/// the share of a device's peak that training reaches ("model FLOPs utilization", Chowdhery et al., arXiv 2204.02311, appendix
/// B).
double model_operations(decoder_size const& size, training_setup const& setup);

}  // namespace chevron::train
