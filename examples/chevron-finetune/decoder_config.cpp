#include "decoder_config.hpp"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <chevron/run/core/error.hpp>

#include "chevron-finetune/config_object.hpp"

namespace chevron::finetune {
namespace {

/// Values of keys that a model's configuration may lack, as transformers' class for the model has them.
struct kind_defaults {
  std::int64_t vocabulary, inner;
  std::int64_t key_heads;  ///< 0: as many as heads
  std::int64_t positions;
};

std::map<std::string, kind_defaults> const known_kinds = {
    {"llama", {.vocabulary = 32000, .inner = 11008, .key_heads = 0, .positions = 2048}},
    {"mistral", {.vocabulary = 32000, .inner = 14336, .key_heads = 8, .positions = 131072}},
    {"qwen2", {.vocabulary = 151936, .inner = 22016, .key_heads = 32, .positions = 32768}},
    {"qwen3", {.vocabulary = 151936, .inner = 22016, .key_heads = 32, .positions = 32768}}};

/// Refuses folders whose tensors mean something else than their names and shapes say, or lie elsewhere.
void refuse_other_meanings(config_object const& file, std::filesystem::path const& folder) {
  std::string const plain = "a folder of plain tensors: load it with the library that wrote it, convert it, and save it anew";
  for (char const* key : {"quantization_config", "compression_config", "sparsity_config", "quantization"}) {
    if (!file.is_empty(key)) file.refuse(key, plain);
  }
  for (char const* key : {"pruned_heads", "per_layer_config"}) {
    if (!file.is_empty(key)) file.refuse(key, "layers that are all alike");
  }
  for (char const* key : {"configuration_files", "transformers_weights"}) {
    if (!file.is_empty(key)) file.refuse(key, "a folder whose config.json and model.safetensors are the model");
  }
  if (!file.is_empty("auto_map")) {
    config_object const code = file.object("auto_map");
    for (auto const& [name, place] : code.all().items()) {
      if (name.starts_with("AutoModel") || name == "AutoConfig")
        file.refuse("auto_map", "a model that transformers' own code defines, not a file of its folder");
    }
  }
  if (!file.flag("is_causal", true)) file.refuse("is_causal", "true: a token sees only earlier ones here");
  for (char const* other : {"adapter_config.json", "quantize_config.json", "quant_config.json", "hf_quant_config.json"}) {
    std::error_code ignored;
    if (std::filesystem::exists(folder / other, ignored)) {
      throw usage_error((folder / other).string() +
                        " says that the folder's tensors are not the whole model, or quantized ones. " +
                        "Remedy: merge the adapter into its model, or " + plain);
    }
  }
}

/// Rotary frequencies: since transformers 5 all of them are in `rope_parameters`, before that in `rope_theta` and `rope_scaling`.
/// Where both objects are there, `rope_scaling` counts and `rope_parameters` does not.
void read_rope(config_object const& file, decoder_config& c) {
  std::string const key = file.is_empty("rope_scaling") ? "rope_parameters" : "rope_scaling";
  if (!file.has(key) || file.is_null(key)) {
    c.rope_theta = file.number("rope_theta", 10000);
    return;
  }
  config_object const rope = file.object(key);
  c.rope_theta = rope.has("rope_theta") ? rope.number("rope_theta") : file.number("rope_theta", 10000);
  for (auto const& [name, value] : rope.all().items()) {
    if (value.is_object()) rope.refuse(name, "frequencies that all layers share");
  }
  std::string const type_key = rope.has("rope_type") ? "rope_type" : "type";
  std::string const type = rope.word(type_key, "default");
  if (type == "default") return;
  if (type != "llama3")
    rope.refuse(type_key, "a model with rotary frequencies of the kind default or llama3; others are not known here");
  for (config_object const* each : {&rope, &file}) {
    if (each->number("partial_rotary_factor", 1) != 1) each->refuse("partial_rotary_factor", "1: all of a head turns");
  }
  // One at the top of the file counts more than one in the object.
  std::string const original = "original_max_position_embeddings";
  double const inside = rope.number(original, static_cast<double>(c.most_positions));
  c.stretched = {.factor = rope.number("factor"),
                 .low = rope.number("low_freq_factor"),
                 .high = rope.number("high_freq_factor"),
                 .original_context = file.number(original, inside)};
  if (c.stretched->high <= c.stretched->low) rope.refuse("high_freq_factor", "one above low_freq_factor");
}

/// How many tokens back a layer of this model looks at least; none: all of them.
std::optional<std::int64_t> read_window(config_object const& file, decoder_config const& c) {
  if (c.kind == "mistral" && file.has("layer_types"))
    file.refuse("layer_types",
                "a Mistral without this key: with it transformers takes it for a Ministral, which is not known here");
  bool const chosen = c.kind == "qwen2" || c.kind == "qwen3";
  bool const may_slide = c.kind == "mistral" || (chosen && file.flag("use_sliding_window", false));
  std::optional<std::int64_t> window;
  if (may_slide && !file.is_null("sliding_window")) window = file.size("sliding_window", 4096);
  if (file.has("layer_types") && !file.is_null("layer_types")) {
    config_object::json const& types = file.all().at("layer_types");
    if (!types.is_array() || types.size() != static_cast<std::size_t>(c.layers))
      file.refuse("layer_types", "a list of one word a layer, " + std::to_string(c.layers) + " in all");
    bool slides = false;
    for (config_object::json const& type : types) {
      bool const full = type == "full_attention" || type == "attention";
      if (!full && (type != "sliding_attention" || !window))
        file.refuse("layer_types", window ? "full_attention or sliding_attention" : "full_attention, as there is no window");
      slides = slides || !full;
    }
    if (chosen && !slides) window.reset();
  } else if (chosen && file.size("max_window_layers", 28, 0) >= c.layers) {
    window.reset();
  }
  return window;
}

/// The window of each layer, 0: none. Layers slide as `layer_types` says or, of Qwen, from `max_window_layers` on.
std::vector<std::int64_t> windows_of(config_object const& file, decoder_config const& c, std::int64_t window) {
  std::vector<std::int64_t> out(static_cast<std::size_t>(c.layers), window);
  if (file.has("layer_types") && !file.is_null("layer_types")) {
    config_object::json const& types = file.all().at("layer_types");
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = types[i] == "sliding_attention" ? window : 0;
  } else if (c.kind != "mistral") {
    std::int64_t const full = std::min(file.size("max_window_layers", 28, 0), c.layers);
    std::fill(out.begin(), out.begin() + full, 0);
  }
  return out;
}

std::string read_dtype(config_object const& file) {
  std::string const key = file.is_empty("dtype") ? "torch_dtype" : "dtype";
  if (file.is_null(key)) return "";
  std::string const name = file.word(key, "");
  static std::map<std::string, std::string> const others = {
      {"", ""}, {"float", "float32"}, {"half", "float16"}, {"double", "float64"}};
  if (auto const found = others.find(name); found != others.end()) return found->second;
  if (name != "float32" && name != "bfloat16" && name != "float16" && name != "float64")
    file.refuse(key, "float32, bfloat16, float16 or float64");
  return name;
}

}  // namespace

std::int64_t decoder_config::parameters() const {
  std::int64_t const queries = heads * head_width, keys = key_heads * head_width;
  std::int64_t const attention =
      width * (queries + 2 * keys) + queries * width + (query_bias ? queries + 2 * keys : 0) + (output_bias ? width : 0);
  std::int64_t const maps = 3 * width * inner + (inner_bias ? 2 * inner + width : 0);
  std::int64_t const norms = 2 * width + (head_norms ? 2 * head_width : 0);
  return vocabulary * width * (tied ? 1 : 2) + layers * (attention + maps + norms) + width;
}

double decoder_config::attention_share(std::int64_t context) const {
  std::int64_t const queries = heads * head_width, keys = key_heads * head_width;
  auto const maps = static_cast<double>(width * (2 * queries + 2 * keys) + 3 * width * inner);
  double const square = static_cast<double>(queries) * static_cast<double>(context);
  return square / (maps + square);
}

double decoder_config::flops_per_token(std::int64_t context) const {
  double const multiplying = static_cast<double>(parameters()) - static_cast<double>(tied ? 0 : vocabulary * width);
  return 6 * multiplying +
         12.0 * static_cast<double>(layers) * static_cast<double>(heads * head_width) * static_cast<double>(context);
}

decoder_config read_decoder_config(std::filesystem::path const& folder) {
  config_object const file(folder / "config.json");
  decoder_config c;
  c.kind = file.word("model_type", "");
  auto const kind = known_kinds.find(c.kind);
  if (kind == known_kinds.end()) {
    file.refuse("model_type", "llama, mistral, qwen2 or qwen3: models of RMSNorm, rotary embedding, grouped queries and SwiGLU");
  }
  refuse_other_meanings(file, folder);
  if (std::string const gate = file.word("hidden_act", "silu"); gate != "silu" && gate != "swish")
    file.refuse("hidden_act", "silu");
  if (file.has("attention_dropout") && !file.is_null("attention_dropout") && file.all().at("attention_dropout") != 0)
    file.refuse("attention_dropout", "0: there is no dropout here");
  kind_defaults const& others = kind->second;
  bool const qwen2 = c.kind == "qwen2", qwen3 = c.kind == "qwen3", llama = c.kind == "llama";
  c.vocabulary = file.size("vocab_size", others.vocabulary);
  c.width = file.size("hidden_size", 4096);
  c.inner = file.size("intermediate_size", others.inner);
  c.layers = file.size("num_hidden_layers", 32);
  if (c.layers > 10000) file.refuse("num_hidden_layers", "10000 at most");
  c.heads = file.size("num_attention_heads", 32);
  bool const as_heads = file.is_null("num_key_value_heads") && c.kind != "mistral";
  c.key_heads = as_heads ? c.heads : file.size("num_key_value_heads", others.key_heads > 0 ? others.key_heads : c.heads);
  if (c.heads % c.key_heads != 0)
    file.refuse("num_key_value_heads", "a divisor of num_attention_heads, " + std::to_string(c.heads));
  // Of Llama transformers asks it even where there is a head_dim.
  bool const by_width = !qwen3 && (!file.has("head_dim") || (!qwen2 && file.is_null("head_dim")));
  if ((by_width || llama) && c.width % c.heads != 0)
    file.refuse("num_attention_heads", "a divisor of hidden_size, " + std::to_string(c.width) + (llama ? "" : ", or a head_dim"));
  c.head_width = by_width ? c.width / c.heads : file.size("head_dim", 128);
  if (c.head_width % 2 != 0) file.refuse("head_dim", "an even number, as rotary embedding turns pairs");
  c.most_positions = file.size("max_position_embeddings", others.positions);
  c.norm_epsilon = file.number("rms_norm_eps", 1e-6);
  c.tied = file.flag("tie_word_embeddings", false);
  // Qwen2's biases are always there, and Mistral has none: their classes do not read these keys.
  c.output_bias = (llama || qwen3) && file.flag("attention_bias", false);
  c.query_bias = qwen2 || c.output_bias;
  c.inner_bias = llama && file.flag("mlp_bias", false);
  c.head_norms = qwen3;
  if (file.has("pad_token_id") && !file.is_null("pad_token_id")) {
    config_object::json const& pad = file.all().at("pad_token_id");
    if (!pad.is_number_integer() || pad >= c.vocabulary || pad < -c.vocabulary)
      file.refuse("pad_token_id", "null, or a token of the vocabulary, which has " + std::to_string(c.vocabulary));
    c.padding = pad.get<std::int64_t>();
  }
  c.dtype = read_dtype(file);
  read_rope(file, c);
  // Nothing slides where the window holds all positions.
  if (auto const window = read_window(file, c); window && *window < c.most_positions) {
    c.windows = windows_of(file, c, *window);
    c.most_positions = *window;
    c.positions_key = "sliding_window";
  }
  return c;
}

}  // namespace chevron::finetune
