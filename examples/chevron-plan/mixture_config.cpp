#include "mixture_config.hpp"

#include <algorithm>
#include <string>

#include "../chevron-finetune/config_object.hpp"

namespace plan_program {
namespace {

using chevron::finetune::config_object;

/// Values of keys that a configuration may lack.
struct mixture_defaults {
  char const* kind;
  std::int64_t vocabulary, width, inner, layers, heads, key_heads, head_width, experts, experts_per_token;
};
// A width of heads of 0 is the stream's width divided by the heads.
constexpr mixture_defaults mixtures[] = {{"mixtral", 32000, 4096, 14336, 32, 32, 8, 0, 8, 2},
                                         {"qwen3_moe", 151936, 2048, 768, 24, 32, 4, 0, 128, 8},
                                         {"gpt_oss", 201088, 2880, 2880, 36, 64, 8, 64, 128, 4}};

/// By layer, the tokens that its attention sees; 0: all earlier ones. Empty: 0 for each.
std::vector<std::int64_t> windows_of(config_object const& file, std::string const& kind, std::int64_t layers) {
  bool const gpt_oss = kind == "gpt_oss";
  if (kind == "qwen3_moe" && !file.flag("use_sliding_window", false)) return {};
  if (file.is_null("sliding_window") || (!gpt_oss && !file.has("sliding_window"))) return {};
  std::vector<std::int64_t> out(static_cast<std::size_t>(layers), file.size("sliding_window", 128));
  if (!gpt_oss) return out;
  if (!file.has("layer_types") || file.is_null("layer_types")) {
    for (std::size_t i = 1; i < out.size(); i += 2) out[i] = 0;
    return out;
  }
  config_object::json const& types = file.all().at("layer_types");
  if (!types.is_array() || types.size() != out.size())
    file.refuse("layer_types", "a list of one word a layer, " + std::to_string(layers) + " in all");
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (types[i] != "sliding_attention" && types[i] != "full_attention")
      file.refuse("layer_types", "full_attention or sliding_attention");
    if (types[i] == "full_attention") out[i] = 0;
  }
  return out;
}

}  // namespace

std::optional<decoder_size> mixture_in_folder(std::filesystem::path const& folder) {
  config_object const file(folder / "config.json");
  std::string const kind = file.word("model_type", "");
  auto const* const found =
      std::find_if(std::begin(mixtures), std::end(mixtures), [&](mixture_defaults const& one) { return kind == one.kind; });
  if (found == std::end(mixtures)) return std::nullopt;
  bool const qwen = kind == "qwen3_moe", gpt_oss = kind == "gpt_oss";
  if (qwen && (file.size("decoder_sparse_step", 1, 0) != 1 || !file.is_empty("mlp_only_layers")))
    file.refuse(file.is_empty("mlp_only_layers") ? "decoder_sparse_step" : "mlp_only_layers",
                "a model with experts in every layer");
  decoder_size out;
  out.vocabulary = file.size("vocab_size", found->vocabulary);
  out.width = file.size("hidden_size", found->width);
  out.inner = file.size(qwen ? "moe_intermediate_size" : "intermediate_size", found->inner);
  out.layers = file.size("num_hidden_layers", found->layers);
  if (out.layers > 10000) file.refuse("num_hidden_layers", "10000 at most");
  out.heads = file.size("num_attention_heads", found->heads);
  out.key_heads = file.is_null("num_key_value_heads") ? out.heads : file.size("num_key_value_heads", found->key_heads);
  if (out.heads % out.key_heads != 0)
    file.refuse("num_key_value_heads", "a divisor of num_attention_heads, " + std::to_string(out.heads));
  out.head_width = file.is_null("head_dim") ? 0 : file.size("head_dim", found->head_width, 0);
  if (out.head_width == 0) {
    if (out.width % out.heads != 0)
      file.refuse("num_attention_heads", "a divisor of hidden_size, " + std::to_string(out.width) + ", or a head_dim");
    out.head_width = out.width / out.heads;
  }
  out.experts = file.size(file.has("num_experts") ? "num_experts" : "num_local_experts", found->experts);
  std::string const met =
      file.has("experts_per_token") && !file.has("num_experts_per_tok") ? "experts_per_token" : "num_experts_per_tok";
  out.experts_per_token = file.size(met, found->experts_per_token);
  if (out.experts_per_token > out.experts) file.refuse(met, "at most the number of experts, " + std::to_string(out.experts));
  out.tied = file.flag("tie_word_embeddings", false);
  out.query_bias = out.output_bias = kind != "mixtral" && file.flag("attention_bias", gpt_oss);
  out.head_norms = qwen;
  out.inner_bias = out.router_bias = out.sinks = gpt_oss;
  out.windows = windows_of(file, kind, out.layers);
  return out;
}

}  // namespace plan_program
