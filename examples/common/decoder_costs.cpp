#include "decoder_costs.hpp"

#include <algorithm>

namespace chevron::train {
namespace {

std::int64_t divided(std::int64_t whole, std::int64_t by) { return (whole + by - 1) / by; }

/// Keys that a token's query meets, on average over a sequence; windows and causality leave out the others.
/// \param whole whether the products are computed for all pairs, as without flash attention
double keys_of_query(std::int64_t tokens, std::int64_t window, bool whole) {
  auto const s = static_cast<double>(tokens);
  if (whole) return s;
  if (window <= 0 || window >= tokens) return (s + 1) / 2;
  auto const w = static_cast<double>(window);
  return w - w * (w - 1) / (2 * s);
}

/// Keys that a query of the microbatch, or of the slice of it, meets on average.
double keys_of_query(training_setup const& of, std::int64_t window) {
  bool const whole = of.attention != attention_kind::flash;
  double const all = keys_of_query(of.seen_tokens(), window, whole);
  if (whole || of.slice_begin == 0) return all;
  // Pairs of the tokens up to the slice's end, without those of earlier slices.
  auto const begin = static_cast<double>(of.slice_begin), end = static_cast<double>(of.slice_end);
  return (end * all - begin * keys_of_query(of.slice_begin, window, false)) / (end - begin);
}

/// One layer's part that a rank has.
struct shard_sizes {
  double queries, keys, heads;
  double inner;         ///< of the maps, or of each of this rank's experts
  double experts;       ///< of this rank; 1 for maps without experts
  double norm_tokens;   ///< of the microbatch, that this shard's norms and sums see
  double maps_tokens;   ///< that the maps or the router take as their input
  double rows;          ///< inputs of the maps: tokens, once for each expert that a token meets
};

class layer_figures {
 public:
  layer_figures(decoder_size const& of, training_setup const& with, std::int64_t window)
      : of_(of), with_(with), tokens_(static_cast<double>(with.microbatch())), width_(static_cast<double>(of.width)),
        item_(static_cast<double>(with.item)), window_(window) {
    auto const t = with.shards;
    double const piece = with.cuts_sequence ? tokens_ / static_cast<double>(t) : tokens_;
    std::int64_t const experts = std::max<std::int64_t>(of.experts, 1);
    part_ = {.queries = static_cast<double>(divided(of.heads, t) * of.head_width),
             .keys = static_cast<double>(divided(of.key_heads, t) * of.head_width),
             .heads = static_cast<double>(divided(of.heads, t)),
             .inner = static_cast<double>(divides_experts() ? of.inner : divided(of.inner, t)),
             .experts = static_cast<double>(divides_experts() ? divided(experts, with.expert_ranks) : experts),
             .norm_tokens = piece,
             .maps_tokens = divides_experts() ? piece : tokens_,
             .rows = 0};
    // Experts get equally many rows: a rank's experts take as many as the rank's own tokens send.
    part_.rows = part_.maps_tokens * used();
  }

  piece_figures all() const {
    piece_figures out;
    // A token meets the maps of all its experts, and the router.
    double const maps = (of_.gpt ? 2 : 3) * width_ * part_.inner, router = width_ * static_cast<double>(of_.experts);
    double const products =
        2 * (tokens_ * width_ * (2 * part_.queries + 2 * part_.keys) + part_.rows * maps + part_.maps_tokens * router);
    // Two products for each pair of a query and a key it meets.
    double const scores = 4 * tokens_ * part_.queries * keys_of_query(with_, window_);
    out.forward.matrix = products + scores;
    // Flash attention computes one of the two products again, full attention none, selective recomputation one.
    out.backward_input.matrix = products + scores * (with_.attention == attention_kind::full ? 2 : 2.5);
    out.backward_weight.matrix = products;
    double const elsewhere = moved();
    out.forward.moved = elsewhere;
    out.backward_input.moved = 2 * elsewhere;
    out.parameters = static_cast<std::int64_t>(width_ * (2 * part_.queries + 2 * part_.keys) + part_.experts * maps + router) +
                     small_parameters();
    if (of_.experts > 0) out.expert_parameters = static_cast<std::int64_t>(part_.experts * (maps + map_biases()));
    out.backward_weight.moved = sums(out.parameters);
    out.activation = static_cast<std::int64_t>(activation());
    out.kept = static_cast<std::int64_t>(kept());
    out.input = with_.microbatch() * of_.width * with_.item / (with_.cuts_sequence ? with_.shards : 1);
    // The results of whole experts need no sum over shards.
    out.collectives = out.backward_collectives = divides_experts() ? 1 : 2;
    if (with_.is_carried()) {
      out.carried = static_cast<std::int64_t>(item_ * tokens_ * 2 * part_.keys);
      // The gradients that slices compute of one number are added in float32.
      out.carried_gradient = static_cast<std::int64_t>(float_item() * tokens_ * 2 * part_.keys);
    }
    if (divides_experts()) out.routed = part_.rows * width_ * item_;
    return out;
  }

  /// Bytes that a gradient's sum reads and writes, in W: the microbatch's gradient, the sum twice.
  double sums(std::int64_t parameters) const {
    return static_cast<double>(parameters * (with_.item + 2 * with_.gradient_item()));
  }

  /// Bytes that a norm of so many numbers stores: \param outputs whether its output is stored, for a product behind it
  double norm_stored(double numbers, double rows, bool outputs) const {
    double const output = outputs ? item_ * numbers : 0;
    if (of_.gpt) return item_ * numbers + 8 * rows + output;  // its input, mean and deviation
    if (with_.kernels == kernel_kind::fused) return item_ * numbers + 4 * rows + output;
    // Its input in float32, the reciprocal root, and the normed numbers before their weight.
    return float_item() * numbers + float_item() * rows + item_ * numbers + output;
  }
  double norm_moved(double numbers) const {
    return (of_.gpt || with_.kernels == kernel_kind::fused ? 2 * item_ : 4 * item_ + 20) * numbers;
  }

 private:
  double float_item() const { return std::max(item_, 4.0); }
  bool separate() const { return with_.kernels != kernel_kind::fused; }
  bool repeats_keys() const {
    return with_.kernels == kernel_kind::finetune ||
           (with_.kernels == kernel_kind::transformers && with_.attention != attention_kind::flash);
  }
  double used() const { return of_.experts > 0 ? static_cast<double>(of_.experts_per_token) : 1; }
  bool divides_experts() const { return of_.experts > 0 && with_.expert_ranks > 1; }

  /// Biases of the maps, or of one expert.
  double map_biases() const { return of_.inner_bias ? (of_.gpt ? 1 : 2) * part_.inner + width_ : 0; }
  /// Norms, biases: whole on each shard but for those of queries, keys, values and the first maps.
  std::int64_t small_parameters() const {
    auto const part = [](double n) { return static_cast<std::int64_t>(n); };
    std::int64_t const norms = (of_.gpt ? 4 : 2) * of_.width + (of_.head_norms ? 2 * of_.head_width : 0);
    std::int64_t const biases = (of_.query_bias ? part(part_.queries + 2 * part_.keys) : 0) + (of_.output_bias ? of_.width : 0) +
                                part(part_.experts * map_biases()) + (of_.router_bias ? of_.experts : 0);
    return norms + biases + (of_.sinks ? part(part_.heads) : 0);
  }

  double activation() const {
    double const n = tokens_, q = part_.queries, k = part_.keys, f = part_.inner, a = part_.heads;
    double out = 2 * norm_stored(part_.norm_tokens * width_, part_.norm_tokens, true);
    // Gathered, for the products behind norms; divided experts take rows of a shard's piece.
    if (with_.cuts_sequence) out += item_ * ((n - part_.norm_tokens) + (part_.maps_tokens - part_.norm_tokens)) * width_;
    // The heads of all queries see one key head in its own memory.
    bool const one_head = of_.key_heads <= with_.shards && with_.kernels == kernel_kind::finetune;
    double const each_key = repeats_keys() && !one_head ? q : k;
    bool const joins = with_.kernels == kernel_kind::finetune && with_.slice_begin > 0;
    // Queries, and attention's output for the product behind it; keys and values, which are joined with those of earlier slices.
    out += item_ * n * (q + q) + item_ * (joins ? static_cast<double>(with_.seen_tokens() * with_.samples) : n) * 2 * each_key;
    // Keys and values for later slices, in memory of their own where attention has joined or repeated ones.
    if (with_.is_carried() && (joins || each_key > k)) out += item_ * n * 2 * k;
    if (of_.head_norms) out += norm_stored(n * q, n * a, false) + norm_stored(n * k, n * k / static_cast<double>(of_.head_width), false);
    auto const length = static_cast<double>(with_.own_tokens()), seen = static_cast<double>(with_.seen_tokens());
    if (with_.attention == attention_kind::flash) out += 4 * n * a;  // logarithms of the sums of exponentials
    if (with_.attention == attention_kind::full) {
      // Scores after their softmax; separate operators store them in float32, too.
      out += n * a * seen * (separate() && item_ < 4 && !of_.gpt ? item_ + 4 : item_);
    }
    if (!of_.gpt && with_.kernels == kernel_kind::finetune)
      out += 4 * length * static_cast<double>(of_.head_width) * item_;  // cosines and sines, of queries and of keys
    return out + maps_stored(f);
  }
  double maps_stored(double f) const {
    double const rows = part_.rows;
    double const between = of_.gpt ? 2 : separate() ? 4 : 3;  // GELU: input, output; gates: both maps, their product, and SiLU's output
    double out = item_ * rows * f * between;
    // Router: float32 probabilities. Rows as experts take them, and their outputs for the sum with weights.
    if (of_.experts > 0) out += 4 * part_.maps_tokens * static_cast<double>(of_.experts) + item_ * rows * width_ * 2 + 12 * rows;
    return out;
  }

  /// Inputs of products and gradients of their outputs; normed numbers and gradients of the norms' outputs.
  double kept() const {
    double const n = tokens_, q = part_.queries, k = part_.keys, f = part_.inner, rows = part_.rows;
    double const maps = of_.gpt ? 2 * f : 3 * f;
    double out = item_ * (n * (width_ + q) + part_.maps_tokens * width_ + n * (q + 2 * k) + n * width_ + rows * (maps + width_));
    if (of_.experts > 0) out += item_ * rows * width_ + 4 * part_.maps_tokens * static_cast<double>(of_.experts);
    double const norm = part_.norm_tokens * width_;
    if (of_.head_norms) out += 2 * item_ * n * (q + k);
    return out + 2 * (2 * item_ * norm);
  }

  /// Bytes that norms, sums, gates, rotary embedding and softmax move in F.
  double moved() const {
    double const n = tokens_, q = part_.queries, k = part_.keys, rows = part_.rows;
    double out = 2 * norm_moved(part_.norm_tokens * width_) + 2 * 3 * item_ * part_.norm_tokens * width_;
    if (!of_.gpt) out += (separate() ? 9 : 2) * item_ * n * (q + k);
    if (repeats_keys() && q > k) out += 2 * item_ * n * (q + k);
    out += (of_.gpt ? 2 : separate() ? 5 : 3) * item_ * rows * part_.inner;
    if (with_.attention != attention_kind::flash)
      out += (separate() ? 4 * item_ + 8 : 2 * item_) * n * part_.heads * static_cast<double>(with_.seen_tokens());
    if (of_.experts > 0) out += item_ * width_ * (2 * rows * 2 + part_.maps_tokens);
    return out;
  }

  decoder_size const& of_;
  training_setup const& with_;
  double tokens_, width_, item_;
  std::int64_t window_;
  shard_sizes part_{};
};

void count_fixed(piece_figures& of, training_setup const& with) {
  of.gradient = of.parameters * with.gradient_item();
  of.state = of.parameters * with.state_item();
  of.fixed = of.parameters * (with.item + with.rounded_item()) + of.gradient + of.state;
}

}  // namespace

std::int64_t training_setup::state_item() const {
  bool const has_master = masters && item < 4;
  std::int64_t const moments = optimizer == optimizer_kind::adamw ? 2 : optimizer == optimizer_kind::momentum ? 1 : 0;
  return has_master ? 4 + 4 * moments : item * moments;
}

std::int64_t decoder_size::layer_weights() const {
  std::int64_t const maps = (gpt ? 2 : 3) * width * inner;
  return width * (2 * queries() + 2 * keys()) + std::max<std::int64_t>(experts, 1) * maps + width * experts;
}

std::int64_t decoder_size::layer_weights_of_token() const {
  std::int64_t const maps = (gpt ? 2 : 3) * width * inner;
  return width * (2 * queries() + 2 * keys()) + (experts > 0 ? experts_per_token : 1) * maps + width * experts;
}

std::int64_t decoder_size::layer_parameters() const {
  std::int64_t const biases = (query_bias ? queries() + 2 * keys() : 0) + (output_bias ? width : 0) +
                              (inner_bias ? std::max<std::int64_t>(experts, 1) * ((gpt ? 1 : 2) * inner + width) : 0) +
                              (router_bias ? experts : 0) + (sinks ? heads : 0);
  return layer_weights() + biases + (gpt ? 4 : 2) * width + (head_norms ? 2 * head_width : 0);
}

std::int64_t decoder_size::embedding_parameters() const { return (vocabulary + (gpt ? positions : 0)) * width; }

std::int64_t decoder_size::head_parameters() const { return vocabulary * width + (gpt ? 2 : 1) * width; }

std::int64_t decoder_size::parameters() const {
  return embedding_parameters() + layers * layer_parameters() + head_parameters() - (tied ? vocabulary * width : 0);
}

std::vector<piece_figures> decoder_pieces(decoder_size const& size, training_setup const& setup) {
  std::vector<piece_figures> out;
  auto const n = static_cast<double>(setup.microbatch()), h = static_cast<double>(size.width);
  auto const item = static_cast<double>(setup.item);
  std::int64_t const words = divided(size.vocabulary, setup.shards);
  auto const v = static_cast<double>(words);
  layer_figures const of_layer(size, setup, 0);

  piece_figures embedding;
  embedding.parameters = (words + (size.gpt ? size.positions : 0)) * size.width;
  embedding.forward.moved = 2 * item * n * h;
  embedding.backward_weight.moved = 2 * item * n * h + of_layer.sums(embedding.parameters);
  embedding.activation = embedding.input = 8 * setup.microbatch();  // tokens are whole numbers of 8 bytes
  // Each shard keeps which tokens are others'.
  if (setup.shards > 1 && setup.kernels == kernel_kind::finetune) embedding.activation += setup.microbatch();
  embedding.kept = embedding.activation + setup.microbatch() * size.width * setup.item;
  // Whole sequences on each shard are summed once in the embedding's F, and their gradients once in the head's backward.
  embedding.collectives = setup.cuts_sequence ? 0.5 : 1;
  embedding.backward_collectives = setup.cuts_sequence ? 0.5 : 0;
  out.push_back(embedding);
  for (std::int64_t i = 0; i < size.layers; ++i)
    out.push_back(layer_figures(size, setup, size.windows.empty() ? 0 : size.windows[static_cast<std::size_t>(i)]).all());

  piece_figures head;
  double const rows = setup.cuts_sequence ? n / static_cast<double>(setup.shards) : n;
  head.parameters = words * size.width + (size.gpt ? 2 : 1) * size.width;
  for (piece_work* one : {&head.forward, &head.backward_input, &head.backward_weight}) one->matrix = 2 * n * h * v;
  double const wide = std::max(item, 4.0);
  head.forward.moved = of_layer.norm_moved(rows * h) + (item + wide + 2 * wide) * n * v;  // logits to float32, their log-softmax
  head.backward_input.moved = 2 * of_layer.norm_moved(rows * h) + (3 * wide + item) * n * v;
  head.backward_weight.moved = of_layer.sums(head.parameters);
  // The norm, and the logarithms of probabilities in float32.
  head.activation = static_cast<std::int64_t>(of_layer.norm_stored(rows * h, rows, true) + wide * n * v + item * (n - rows) * h);
  if (setup.kernels != kernel_kind::finetune) {
    head.activation += 8 * setup.microbatch();  // the next tokens; those of chevron-finetune belong to the batch
  } else if (setup.shards > 1) {
    // A sum over the shards stores shifted logits and their exponentials, and for each token its place, whether it is another
    // shard's, and its sum.
    head.activation += static_cast<std::int64_t>(wide * n * v) + (8 + 1 + 4) * setup.microbatch();
  }
  head.kept = static_cast<std::int64_t>(item * n * (h + v) + 2 * item * rows * h);
  head.input = static_cast<std::int64_t>(item * rows * h);
  head.collectives = setup.cuts_sequence ? 0.5 : 0;
  head.backward_collectives = setup.cuts_sequence ? 0.5 : 1;
  out.push_back(head);
  for (piece_figures& each : out) count_fixed(each, setup);
  if (size.tied) {
    // Sums of tied gradients are apart from those that replicas share.
    out.front().gradient -= words * size.width * setup.gradient_item();
    out.back().gradient -= words * size.width * setup.gradient_item();
  }
  return out;
}

std::int64_t message_bytes(decoder_size const& size, training_setup const& setup) {
  return setup.microbatch() * size.width * setup.item;
}

double model_operations(decoder_size const& size, training_setup const& setup) {
  training_setup plain = setup;
  plain.shards = plain.expert_ranks = 1;
  if (plain.attention == attention_kind::selective) plain.attention = attention_kind::full;
  double out = 0;
  for (piece_figures const& each : decoder_pieces(size, plain)) out += 3 * each.forward.matrix;
  return out;
}

}  // namespace chevron::train
