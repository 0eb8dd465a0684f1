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
  double inner;        ///< of the maps, or of each of this rank's experts
  double experts;      ///< of this rank; 1 for maps without experts
  double norm_tokens;  ///< of the microbatch, that this shard's norms and sums see
  double maps_tokens;  ///< that the maps or the router take as their input
  double rows;         ///< inputs of the maps: tokens, once for each expert that a token meets
};

/// A projection of a layer: the numbers of its weight on a shard, the tokens that it takes and gives, and what is trained of it.
struct projection {
  double in, out;
  double tokens, left;  ///< `left` is less where the result leaves a cut region as a piece of the sequence
  bool adapted;
  bool takes_gradient;  ///< whether its input needs a gradient

  double adapter(double rank) const { return adapted ? rank * (in + out) : 0; }
};

/// Which values of a layer need gradients; autograd stores what their backwards take, and nothing of other values.
struct gradients_needed {
  bool input, queries, keys, seen, middle, gate, up, product;
};

class layer_figures {
 public:
  /// \param first whether the layer is the first one: with adapters its input needs no gradient
  layer_figures(decoder_size const& of, training_setup const& with, std::int64_t window, bool first = false)
      : of_(of),
        with_(with),
        tokens_(static_cast<double>(with.microbatch())),
        width_(static_cast<double>(of.width)),
        item_(static_cast<double>(with.item)),
        cast_(static_cast<double>(with.product_item())),
        window_(window) {
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

    adapter_sizes const& on = with.adapters;
    bool const input = with.trains_all() || !first;
    needs_ = {.input = input, .queries = input || on.queries, .keys = input || on.keys};
    // Keys and values of earlier slices get gradients, whatever is trained below.
    needs_.seen = needs_.queries || needs_.keys || on.values || with.slice_begin > 0;
    needs_.middle = needs_.seen || on.output;
    needs_.gate = needs_.middle || on.gate;
    needs_.up = needs_.middle || on.up;
    needs_.product = needs_.gate || needs_.up;
    double const n = tokens_, h = width_, q = part_.queries, k = part_.keys, f = part_.inner;
    attention_ = {{.in = h, .out = q, .tokens = n, .left = n, .adapted = on.queries, .takes_gradient = needs_.input},
                  {.in = h, .out = k, .tokens = n, .left = n, .adapted = on.keys, .takes_gradient = needs_.input},
                  {.in = h, .out = k, .tokens = n, .left = n, .adapted = on.values, .takes_gradient = needs_.input}};
    output_ = {.in = q, .out = h, .tokens = n, .left = piece, .adapted = on.output, .takes_gradient = needs_.seen};
    maps_ = {{.in = h, .out = f, .tokens = n, .left = n, .adapted = on.gate, .takes_gradient = needs_.middle},
             {.in = h, .out = f, .tokens = n, .left = n, .adapted = on.up, .takes_gradient = needs_.middle}};
    down_ = {.in = f, .out = h, .tokens = n, .left = piece, .adapted = on.down, .takes_gradient = needs_.product};
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
    auto const adapters = static_cast<std::int64_t>(of_projections([&](projection const& p) { return p.adapter(rank()); }));
    out.trained = with_.trains_all() ? out.parameters : adapters;
    out.parameters += adapters;
    out.backward_weight.moved = sums(out.parameters);
    out.activation = static_cast<std::int64_t>(activation());
    out.kept = static_cast<std::int64_t>(kept());
    out.input = with_.microbatch() * of_.width * with_.item / (with_.cuts_sequence ? with_.shards : 1);
    // The results of whole experts need no sum over shards.
    out.collectives = out.backward_collectives = divides_experts() ? 1 : 2;
    if (with_.is_carried()) {
      out.carried = static_cast<std::int64_t>(cast_ * tokens_ * 2 * part_.keys);
      out.carried_alone = static_cast<std::int64_t>(carried_alone());
      // The gradients that slices compute of one number are added in float32.
      out.carried_gradient = static_cast<std::int64_t>(float_item() * tokens_ * 2 * part_.keys);
      out.carried_returned = static_cast<std::int64_t>(carried_returned());
    }
    if (with_.slice_begin > 0) out.kept_as_first = static_cast<std::int64_t>(kept_as_first());
    if (divides_experts()) out.routed = part_.rows * width_ * item_;
    return out;
  }

  /// Bytes that a gradient's sum reads and writes, in W: the microbatch's gradient, the sum twice.
  double sums(std::int64_t parameters) const {
    return static_cast<double>(parameters * (with_.item + 2 * with_.gradient_item()));
  }

  /// Bytes that a norm of so many numbers stores, without its output. \param item bytes of a number of its input
  double norm_stored(double numbers, double rows, double item) const {
    if (of_.gpt) return item * numbers + 8 * rows;  // its input, mean and deviation
    if (with_.kernels == kernel_kind::fused) return item * numbers + 4 * rows;
    // Its input in float32, the reciprocal root and, for the gradient of its weight, the normed numbers before that weight.
    return float_item() * numbers + float_item() * rows + (with_.trains_all() ? item * numbers : 0);
  }
  /// Bytes of the inputs of products that take the same numbers, if so many of the products have a trained weight: autocast casts
  /// them for each.
  double taken_by(int products, double numbers) const {
    return with_.autocast ? products * cast_ * numbers : products > 0 ? item_ * numbers : 0;
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

  double rank() const { return static_cast<double>(with_.adapters.rank); }
  /// Whether the gradient of a projection's weight, or of its adapter's A, takes the projection's input.
  bool takes_input(projection const& p) const { return with_.trains_all() || p.adapted; }
  template <class Count>
  int counted(std::vector<projection> const& of, Count const& count) const {
    return static_cast<int>(std::count_if(of.begin(), of.end(), count));
  }
  /// The sum of a figure over all seven projections.
  template <class Figure>
  double of_projections(Figure const& figure) const {
    double sum = figure(output_) + figure(down_);
    for (std::vector<projection> const* group : {&attention_, &maps_}) {
      for (projection const& p : *group) sum += figure(p);
    }
    return sum;
  }
  /// Inputs of the products behind both norms.
  double entered() const {
    auto const takes = [&](projection const& p) { return takes_input(p); };
    return taken_by(counted(attention_, takes), tokens_ * width_) + taken_by(counted(maps_, takes), part_.maps_tokens * width_);
  }
  /// Copies of weights that autocast casts for products whose inputs need gradients; each slice casts anew.
  /// \param trained only those of weights that have gradients themselves
  double cast_weights(bool trained) const {
    if (!with_.autocast) return 0;
    return cast_ * of_projections([&](projection const& p) {
             double const own = p.takes_gradient && (with_.trains_all() || !trained) ? p.in * p.out : 0;
             return own + (p.adapted ? rank() * (p.out + (p.takes_gradient ? p.in : 0)) : 0);
           });
  }
  /// What B of each adapter takes: the results of A.
  double narrow() const {
    return cast_ * of_projections([&](projection const& p) { return p.adapted ? rank() * p.left : 0; });
  }

  /// Whether attention takes the keys of earlier slices, and those joined with the slice's own or each as they are.
  bool joins_slices() const { return with_.kernels == kernel_kind::finetune && with_.slice_begin > 0 && with_.joins_slices; }
  bool takes_each_slice() const { return with_.kernels == kernel_kind::finetune && with_.slice_begin > 0 && !with_.joins_slices; }
  /// Values that attention stores for each token: repeated for each query's head or, where these see one key head in its own
  /// memory, or slices are taken each as they are, a shard's own.
  double stored_values() const {
    bool const one_head = of_.key_heads <= with_.shards && with_.kernels == kernel_kind::finetune;
    return repeats_keys() && !one_head && !takes_each_slice() ? part_.queries : part_.keys;
  }
  /// Keys and values for later slices in memory of their own: where attention has joined, repeated or cast ones, or stores none.
  double carried_alone() const {
    bool const copied = !needs_.seen || joins_slices() || stored_values() > part_.keys;
    return copied ? cast_ * tokens_ * 2 * part_.keys : 0;
  }

  bool needs_values() const { return needs_.input || with_.adapters.values; }
  double carried_returned() const {
    return with_.is_carried() ? cast_ * tokens_ * part_.keys * ((needs_.keys ? 1 : 0) + (needs_values() ? 1 : 0)) : 0;
  }
  /// Cosines and sines, of queries and of keys, in their dtype: of norms of heads that of the weights.
  double turns() const {
    if (of_.gpt || with_.kernels != kernel_kind::finetune) return 0;
    double const of_one = 2 * static_cast<double>(with_.own_tokens() * of_.head_width) * (of_.head_norms ? item_ : cast_);
    return (needs_.queries ? of_one : 0) + (needs_.keys ? of_one : 0);
  }

  double activation() const {
    double const n = tokens_, q = part_.queries, k = part_.keys, a = part_.heads;
    auto const of_head = static_cast<double>(of_.head_width);
    double const norm = norm_stored(part_.norm_tokens * width_, part_.norm_tokens, item_);
    double out = (needs_.input ? norm : 0) + (needs_.middle ? norm : 0) + entered() + cast_weights(false) + narrow();
    // Queries, and attention's output, which is also the input of the product behind it; keys and values, which are joined with
    // those of earlier slices.
    auto const seen = static_cast<double>(with_.seen_tokens());
    if (needs_.seen) {
      double const taken = joins_slices() ? seen * static_cast<double>(with_.samples) : n;
      out += cast_ * (n * (q + q) + taken * 2 * stored_values());
    } else if (takes_input(output_)) {
      out += cast_ * n * q;
    }
    if (with_.is_carried()) out += carried_alone();
    if (of_.head_norms && needs_.queries) out += norm_stored(n * q, n * a, cast_);
    if (of_.head_norms && needs_.keys) out += norm_stored(n * k, n * k / of_head, cast_);
    if (with_.attention == attention_kind::flash && needs_.seen) out += 4 * n * a;  // logarithms of the sums of exponentials
    if (with_.attention == attention_kind::full) {
      // Scores after their softmax; separate operators store them in float32, too.
      out += n * a * seen * (separate() && item_ < 4 && !of_.gpt ? item_ + 4 : item_);
    }
    return out + turns() + maps_stored(part_.inner);
  }
  double maps_stored(double f) const {
    double const rows = part_.rows;
    // GELU: input, output. Gates: both maps, their product, and SiLU's output.
    double const between = of_.gpt       ? 2
                           : !separate() ? 3
                                         : (needs_.gate ? 2 : 0) + (needs_.up ? 1 : 0) + (takes_input(down_) ? 1 : 0);
    double out = cast_ * rows * f * between;
    // Router: float32 probabilities. Rows as experts take them, and their outputs for the sum with weights.
    if (of_.experts > 0) out += 4 * part_.maps_tokens * static_cast<double>(of_.experts) + item_ * rows * width_ * 2 + 12 * rows;
    return out;
  }

  /// Inputs of products and gradients of their outputs; normed numbers and gradients of the norms' outputs.
  double kept() const {
    double const n = tokens_, q = part_.queries, k = part_.keys, f = part_.inner, rows = part_.rows;
    double out = entered() + cast_weights(true);
    if (!with_.trains_all()) {
      // Of each adapter the gradients of what A and B give, beside their inputs. `o_proj` and `down_proj` share theirs with no
      // other.
      out += (output_.adapted ? cast_ * n * q : 0) + (down_.adapted ? cast_ * n * f : 0) + narrow();
      return out +
             cast_ * of_projections([&](projection const& p) { return p.adapted ? rank() * p.tokens + p.left * p.out : 0; });
    }
    double const maps = of_.gpt ? 2 * f : 3 * f;
    out += cast_ * (n * q + n * (q + 2 * k) + n * width_ + rows * (maps + width_));
    if (of_.experts > 0) out += item_ * rows * width_ + 4 * part_.maps_tokens * static_cast<double>(of_.experts);
    double const norm = part_.norm_tokens * width_;
    if (of_.head_norms) out += (cast_ + item_) * n * (q + k);
    return out + 2 * (2 * item_ * norm);
  }

  /// I stops at the gradients of queries, keys and values: the rotary embedding and the norms before it have yet to run, and
  /// have no gradients of their outputs.
  double kept_as_first() const {
    double const n = tokens_, q = part_.queries, k = part_.keys, norm = part_.norm_tokens * width_;
    double out = kept() + turns() + carried_returned();
    if (!with_.trains_all()) {
      for (projection const& p : attention_) out -= p.adapted ? cast_ * rank() * p.tokens : 0;  // gradients of what A gives
      return out;
    }
    out += float_item() * (norm + part_.norm_tokens) - (with_.autocast ? 1 : 2) * item_ * norm;
    if (of_.head_norms) {
      auto const rows = n * (q + k) / static_cast<double>(of_.head_width);
      out += float_item() * (n * (q + k) + rows) - item_ * n * (q + k);
    }
    return out;
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
  double tokens_, width_, item_, cast_;
  std::int64_t window_;
  shard_sizes part_{};
  gradients_needed needs_{};
  std::vector<projection> attention_, maps_;  // those behind a norm
  projection output_{}, down_{};
};

void count_fixed(piece_figures& of, training_setup const& with) {
  of.gradient = of.trained * with.gradient_item();
  of.state = of.trained * with.state_item();
  of.fixed = of.parameters * with.item + of.trained * with.rounded_item() + of.gradient + of.state;
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
  embedding.input = 8 * setup.microbatch();  // tokens are whole numbers of 8 bytes
  if (setup.trains_all()) {
    embedding.trained = embedding.parameters;
    embedding.activation = embedding.input;
    // Each shard keeps which tokens are others'.
    if (setup.shards > 1 && setup.kernels == kernel_kind::finetune) embedding.activation += setup.microbatch();
    embedding.kept = embedding.activation + setup.microbatch() * size.width * setup.item;
  }
  // Whole sequences on each shard are summed once in the embedding's F, and their gradients once in the head's backward.
  embedding.collectives = setup.cuts_sequence ? 0.5 : 1;
  embedding.backward_collectives = setup.cuts_sequence ? 0.5 : 0;
  out.push_back(embedding);
  for (std::int64_t i = 0; i < size.layers; ++i)
    out.push_back(layer_figures(size, setup, size.windows.empty() ? 0 : size.windows[static_cast<std::size_t>(i)], i == 0).all());

  piece_figures head;
  double const rows = setup.cuts_sequence ? n / static_cast<double>(setup.shards) : n;
  head.parameters = words * size.width + (size.gpt ? 2 : 1) * size.width;
  for (piece_work* one : {&head.forward, &head.backward_input, &head.backward_weight}) one->matrix = 2 * n * h * v;
  double const wide = std::max(item, 4.0);
  head.forward.moved = of_layer.norm_moved(rows * h) + (item + wide + 2 * wide) * n * v;  // logits to float32, their log-softmax
  head.backward_input.moved = 2 * of_layer.norm_moved(rows * h) + (3 * wide + item) * n * v;
  head.backward_weight.moved = of_layer.sums(head.parameters);
  // The norm, the product's input and weight, and the logarithms of probabilities in float32.
  double const weight_cast = setup.autocast ? static_cast<double>(setup.product_item()) * h * v : 0;
  head.activation = static_cast<std::int64_t>(of_layer.norm_stored(rows * h, rows, item) +
                                              of_layer.taken_by(setup.trains_all() ? 1 : 0, n * h) + weight_cast + wide * n * v);
  if (setup.kernels != kernel_kind::finetune) {
    head.activation += 8 * setup.microbatch();  // the next tokens; those of chevron-finetune belong to the batch
  } else if (setup.shards > 1) {
    // A sum over the shards stores shifted logits and their exponentials, and for each token its place, whether it is another
    // shard's, and its sum.
    head.activation += static_cast<std::int64_t>(wide * n * v) + (8 + 1 + 4) * setup.microbatch();
  }
  if (setup.trains_all()) {
    head.trained = head.parameters;
    head.kept =
        static_cast<std::int64_t>(static_cast<double>(setup.product_item()) * n * (h + v) + weight_cast + 2 * item * rows * h);
  }
  head.input = static_cast<std::int64_t>(item * rows * h);
  head.collectives = setup.cuts_sequence ? 0.5 : 0;
  head.backward_collectives = setup.cuts_sequence ? 0.5 : 1;
  out.push_back(head);
  for (piece_figures& each : out) count_fixed(each, setup);
  if (size.tied && setup.trains_all()) {
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
