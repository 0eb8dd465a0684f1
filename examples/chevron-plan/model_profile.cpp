#include "model.hpp"

#include "value_list.hpp"

namespace plan_program {
namespace {

using json = nlohmann::ordered_json;

template <class Kind>
struct named {
  char const* name;
  Kind kind;
};
constexpr named<attention_kind> attention_names[] = {
    {"flash", attention_kind::flash}, {"full", attention_kind::full}, {"selective", attention_kind::selective}};
constexpr named<kernel_kind> kernel_names[] = {
    {"finetune", kernel_kind::finetune}, {"transformers", kernel_kind::transformers}, {"fused", kernel_kind::fused}};
constexpr named<optimizer_kind> optimizer_names[] = {
    {"adamw", optimizer_kind::adamw}, {"momentum", optimizer_kind::momentum}, {"sgd", optimizer_kind::sgd}};

template <class Kind, std::size_t Count>
std::string name_in(named<Kind> const (&all)[Count], Kind kind) {
  for (auto const& one : all) {
    if (one.kind == kind) return one.name;
  }
  return {};
}

template <class Kind, std::size_t Count>
Kind kind_in(named<Kind> const (&all)[Count], std::string const& typed, std::string const& flag) {
  std::string known;
  for (auto const& one : all) {
    if (typed == one.name) return one.kind;
    known += (known.empty() ? "" : ", ") + std::string(one.name);
  }
  throw usage(flag + " " + quoted(typed) + " is not known: choose one of " + known);
}

}  // namespace

attention_kind attention_named(std::string const& typed, std::string const& flag) {
  return kind_in(attention_names, typed, flag);
}
kernel_kind kernels_named(std::string const& typed, std::string const& flag) { return kind_in(kernel_names, typed, flag); }
optimizer_kind optimizer_named(std::string const& typed, std::string const& flag) {
  return kind_in(optimizer_names, typed, flag);
}
std::string name_of(attention_kind kind) { return name_in(attention_names, kind); }
std::string name_of(kernel_kind kind) { return name_in(kernel_names, kind); }
std::string name_of(optimizer_kind kind) { return name_in(optimizer_names, kind); }

json to_json(described_model const& model) {
  decoder_size const& s = model.size;
  training_setup const& t = model.setup;
  json out{{"kind", s.gpt ? "gpt" : "llama"},
           {"layers", s.layers},
           {"width", s.width},
           {"inner", s.inner},
           {"heads", s.heads},
           {"key_heads", s.key_heads},
           {"head_width", s.head_width},
           {"vocabulary", s.vocabulary},
           {"positions", s.positions},
           {"experts", s.experts},
           {"experts_per_token", s.experts_per_token},
           {"tied", s.tied},
           {"query_bias", s.query_bias},
           {"output_bias", s.output_bias},
           {"inner_bias", s.inner_bias},
           {"head_norms", s.head_norms},
           {"router_bias", s.router_bias},
           {"sinks", s.sinks},
           {"windows", s.windows},
           {"tokens", t.tokens},
           {"samples", t.samples},
           {"item_bytes", t.item},
           {"optimizer", name_of(t.optimizer)},
           {"masters", t.masters},
           {"attention", name_of(t.attention)},
           {"kernels", name_of(t.kernels)},
           {"device", model.device.name},
           {"peak_rate", model.device.peak},
           {"matrix_rate", model.device.matrix},
           {"memory_rate", model.device.memory},
           {"factor_forward", model.factors.forward},
           {"factor_backward_input", model.factors.backward_input},
           {"factor_backward_weight", model.factors.backward_weight}};
  return out;
}

described_model described_model_of(std::string const& text, std::string const& name) {
  json const all = json::parse(text, nullptr, false);
  auto const wrong = [&](std::string const& key, std::string const& why) {
    return usage(name + ": 'model', key '" + key + "' " + why + ". Remedy: write the file anew with chevron-plan model");
  };
  auto const at = [&](char const* key) -> json const& {
    if (!all.is_object() || !all.contains(key)) throw wrong(key, "is missing");
    return all.at(key);
  };
  auto const count = [&](char const* key, std::int64_t least) {
    json const& value = at(key);
    if (!value.is_number_integer() || value < least || value > (std::int64_t{1} << 32))
      throw wrong(key, "is " + value.dump() + ", no whole number from " + std::to_string(least) + " on");
    return value.get<std::int64_t>();
  };
  auto const flag = [&](char const* key) {
    if (!at(key).is_boolean()) throw wrong(key, "is " + at(key).dump() + ", neither true nor false");
    return at(key).get<bool>();
  };
  auto const word = [&](char const* key) {
    if (!at(key).is_string()) throw wrong(key, "is " + at(key).dump() + ", no word");
    return at(key).get<std::string>();
  };
  auto const rate = [&](char const* key, double least) {
    json const& value = at(key);
    if (!value.is_number() || !(value.get<double>() >= least) || !(value.get<double>() < 1e30))
      throw wrong(key, "is " + value.dump() + ", no rate or factor above 0");
    return value.get<double>();
  };
  described_model out;
  decoder_size& s = out.size;
  s.gpt = word("kind") == "gpt";
  s.layers = count("layers", 1);
  s.width = count("width", 1);
  s.inner = count("inner", 1);
  s.heads = count("heads", 1);
  s.key_heads = count("key_heads", 1);
  s.head_width = count("head_width", 1);
  s.vocabulary = count("vocabulary", 1);
  s.positions = count("positions", 0);
  s.experts = count("experts", 0);
  s.experts_per_token = count("experts_per_token", 0);
  s.tied = flag("tied");
  s.query_bias = flag("query_bias");
  s.output_bias = flag("output_bias");
  s.inner_bias = flag("inner_bias");
  s.head_norms = flag("head_norms");
  s.router_bias = flag("router_bias");
  s.sinks = flag("sinks");
  json const& windows = at("windows");
  bool const list = windows.is_array() && (windows.empty() || windows.size() == static_cast<std::size_t>(s.layers));
  for (std::size_t i = 0; list && i < windows.size(); ++i) {
    if (!windows[i].is_number_integer() || windows[i] < 0) throw wrong("windows", "holds " + windows[i].dump());
    s.windows.push_back(windows[i].get<std::int64_t>());
  }
  if (!list) throw wrong("windows", "is no list with one entry for each layer");
  out.setup.tokens = count("tokens", 1);
  out.setup.samples = count("samples", 1);
  out.setup.item = count("item_bytes", 1);
  out.setup.optimizer = optimizer_named(word("optimizer"), name + ": 'model', optimizer");
  out.setup.masters = flag("masters");
  out.setup.attention = attention_named(word("attention"), name + ": 'model', attention");
  out.setup.kernels = kernels_named(word("kernels"), name + ": 'model', kernels");
  out.device = {word("device"), rate("peak_rate", 0), rate("matrix_rate", 1), rate("memory_rate", 1)};
  out.factors = {rate("factor_forward", 1e-9), rate("factor_backward_input", 1e-9), rate("factor_backward_weight", 1e-9)};
  return out;
}

chevron::profile profile_of_model(described_model const& model) {
  chevron::profile out;
  std::vector<piece_figures> const pieces = decoder_pieces(model.size, model.setup);
  out.stages = static_cast<int>(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    piece_figures const& one = pieces[i];
    out.forward.push_back(model.time(one.forward) * model.factors.forward);
    out.backward_input.push_back(model.time(one.backward_input) * model.factors.backward_input);
    out.backward_weight.push_back(model.time(one.backward_weight) * model.factors.backward_weight);
    out.backward.push_back(out.backward_input.back() + out.backward_weight.back());
    out.layers.push_back(i > 0 && i + 1 < pieces.size() ? 1 : 0);
    out.static_bytes.push_back(one.fixed);
    out.activation_bytes.push_back(one.activation);
    out.kept_bytes.push_back(one.kept);
    out.input_bytes.push_back(one.input);
    out.state_bytes.push_back(one.state);
    out.gradient_bytes.push_back(one.gradient);
  }
  out.communication.assign(pieces.size() - 1, chevron::profile::not_measured);
  out.model = to_json(model).dump();
  return out;
}

}  // namespace plan_program
