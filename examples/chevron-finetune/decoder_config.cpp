#include "decoder_config.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <chevron/run/checkpoint/strict_json.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/model/partition.hpp>

namespace chevron::finetune {
namespace {

using json = nlohmann::json;

/// A configuration file, and what it says by key. A key that is null counts as missing.
class config_file {
 public:
  explicit config_file(std::filesystem::path file) : file_(std::move(file)) {
    std::error_code failed;
    std::uintmax_t const size = std::filesystem::file_size(file_, failed);
    if (failed) {
      throw usage_error(file_.string() + " cannot be read: " + failed.message() +
                        ". Remedy: the folder of a Hugging Face model, with its config.json");
    }
    if (size > (std::uintmax_t{1} << 20))
      throw usage_error(file_.string() + " has " + std::to_string(size) + " bytes: it is no configuration");
    std::string text(size, ' ');
    std::ifstream in(file_, std::ios::binary);
    in.read(text.data(), static_cast<std::streamsize>(size));
    if (!in) throw usage_error(file_.string() + " cannot be read: " + std::strerror(errno));
    try {
      all_ = detail::parse_strictly(text, 16);
    } catch (std::exception const& e) {
      throw usage_error(file_.string() + " is no JSON of this kind: " + detail::in_short(e));
    }
    if (!all_.is_object()) throw usage_error(file_.string() + " is no JSON object");
  }

  [[noreturn]] void refuse(std::string const& key, std::string const& remedy) const {
    std::string value = find(all_, key) == nullptr ? "missing" : find(all_, key)->dump();
    if (value.size() > 80) value = value.substr(0, 80) + "…";
    throw usage_error(file_.string() + ": `" + key + "` is " + value + ". Remedy: " + remedy);
  }

  json const* find(std::string const& key) const { return find(all_, key); }
  static json const* find(json const& in, std::string const& key) {
    auto const found = in.find(key);
    return found == in.end() || found->is_null() ? nullptr : &*found;
  }

  std::int64_t size(std::string const& key, std::int64_t otherwise = 0) const {
    json const* const found = find(key);
    if (found == nullptr && otherwise > 0) return otherwise;
    constexpr std::int64_t most = std::int64_t{1} << 24;
    if (found == nullptr || !found->is_number_unsigned() || found->get<std::uint64_t>() == 0 ||
        found->get<std::uint64_t>() > most)
      refuse(key, "a whole number from 1 to " + std::to_string(most));
    return found->get<std::int64_t>();
  }
  double number(json const& in, std::string const& key, double otherwise) const {
    json const* const found = find(in, key);
    if (found == nullptr) return otherwise;
    if (!found->is_number() || !(found->get<double>() > 0) || !(found->get<double>() < 1e12)) refuse(key, "a number above 0");
    return found->get<double>();
  }
  double number(std::string const& key, double otherwise) const { return number(all_, key, otherwise); }
  bool flag(std::string const& key, bool otherwise) const {
    json const* const found = find(key);
    if (found != nullptr && !found->is_boolean()) refuse(key, "true or false");
    return found == nullptr ? otherwise : found->get<bool>();
  }
  std::string word(json const& in, std::string const& key, std::string const& otherwise) const {
    json const* const found = find(in, key);
    if (found != nullptr && !found->is_string()) refuse(key, "a word");
    return found == nullptr ? otherwise : found->get<std::string>();
  }
  std::string word(std::string const& key, std::string const& otherwise) const { return word(all_, key, otherwise); }

 private:
  std::filesystem::path file_;
  json all_;
};

/// Rotary frequencies: since transformers 5 all of them are in `rope_parameters`, before that in `rope_theta` and `rope_scaling`.
void read_rope(config_file const& file, decoder_config& c) {
  c.rope_theta = file.number("rope_theta", 10000);
  for (char const* key : {"rope_parameters", "rope_scaling"}) {
    json const* const rope = file.find(key);
    if (rope == nullptr) continue;
    if (!rope->is_object()) file.refuse(key, "an object");
    c.rope_theta = file.number(*rope, "rope_theta", c.rope_theta);
    std::string const kind = file.word(*rope, "rope_type", file.word(*rope, "type", "default"));
    if (kind == "llama3") {
      c.stretched = {.factor = file.number(*rope, "factor", 8),
                     .low = file.number(*rope, "low_freq_factor", 1),
                     .high = file.number(*rope, "high_freq_factor", 4),
                     .original_context = static_cast<std::int64_t>(file.number(*rope, "original_max_position_embeddings", 8192))};
      if (c.stretched->high <= c.stretched->low) file.refuse(key, "a high_freq_factor above low_freq_factor");
    } else if (kind != "default") {
      file.refuse(key, "a model with rotary frequencies of the kind default or llama3; others are not known here");
    }
    return;
  }
}

}  // namespace

std::int64_t decoder_config::parameters() const {
  std::int64_t const queries = heads * head_width, keys = key_heads * head_width;
  std::int64_t const attention =
      width * (queries + 2 * keys) + queries * width + (query_bias ? queries + 2 * keys : 0) + (output_bias ? width : 0);
  std::int64_t const maps = 3 * width * inner + (inner_bias ? 2 * inner + width : 0);
  return vocabulary * width * (tied ? 1 : 2) + layers * (attention + maps + 2 * width) + width;
}

double decoder_config::flops_per_token(std::int64_t context) const {
  double const multiplying = static_cast<double>(parameters()) - static_cast<double>(tied ? 0 : vocabulary * width);
  return 6 * multiplying +
         12.0 * static_cast<double>(layers) * static_cast<double>(heads * head_width) * static_cast<double>(context);
}

decoder_config read_decoder_config(std::filesystem::path const& folder) {
  config_file const file(folder / "config.json");
  decoder_config c;
  c.kind = file.word("model_type", "");
  if (c.kind != "llama" && c.kind != "mistral" && c.kind != "qwen2")
    file.refuse("model_type",
                "llama, mistral or qwen2: RMSNorm, rotary embedding, grouped queries and SwiGLU are what is known here");
  if (file.word("hidden_act", "silu") != "silu") file.refuse("hidden_act", "silu");
  if (json const* const dropout = file.find("attention_dropout"); dropout != nullptr && *dropout != 0)
    file.refuse("attention_dropout", "0: there is no dropout here");
  c.vocabulary = file.size("vocab_size");
  c.width = file.size("hidden_size");
  c.inner = file.size("intermediate_size");
  c.layers = file.size("num_hidden_layers");
  if (c.layers > 10000) file.refuse("num_hidden_layers", "10000 at most");
  c.heads = file.size("num_attention_heads");
  c.key_heads = file.size("num_key_value_heads", c.kind == "mistral" ? 8 : c.kind == "qwen2" ? 32 : c.heads);
  if (c.heads % c.key_heads != 0)
    file.refuse("num_key_value_heads", "a divisor of num_attention_heads, " + std::to_string(c.heads));
  if (file.find("head_dim") == nullptr && c.width % c.heads != 0)
    file.refuse("num_attention_heads", "a divisor of hidden_size, " + std::to_string(c.width) + ", or a head_dim");
  c.head_width = file.size("head_dim", c.width / c.heads);
  if (c.head_width % 2 != 0) file.refuse("head_dim", "an even number, as rotary embedding turns pairs");
  c.most_positions = file.size("max_position_embeddings", 2048);
  c.norm_epsilon = file.number("rms_norm_eps", 1e-6);
  c.tied = file.flag("tie_word_embeddings", false);
  c.query_bias = c.kind == "qwen2" || file.flag("attention_bias", false);
  c.output_bias = c.kind != "qwen2" && file.flag("attention_bias", false);
  c.inner_bias = file.flag("mlp_bias", false);
  // Nothing slides where the window holds all positions.
  if (c.kind == "mistral" || file.flag("use_sliding_window", false)) {
    if (file.find("sliding_window") != nullptr) c.most_positions = std::min(c.most_positions, file.size("sliding_window"));
  }
  c.dtype = file.word("dtype", file.word("torch_dtype", ""));
  read_rope(file, c);
  return c;
}

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
