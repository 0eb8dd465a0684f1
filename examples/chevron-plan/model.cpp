#include "model.hpp"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <map>

#include <chevron/base/format.hpp>
#include <chevron/tools/search/layer_costs.hpp>
#include <chevron/tools/show/profile_file.hpp>

#include "../chevron-finetune/decoder_size.hpp"
#include "links.hpp"
#include "mixture_config.hpp"
#include "table.hpp"
#include "value_list.hpp"

namespace plan_program {
namespace {

/// Dense rates of a device, by its maker's data sheet: operations a second in half precision and in float32, and bytes a second.
struct device_sheet {
  double half, single, memory;
};
std::map<std::string, device_sheet> const devices = {{"a100", {312e12, 19.5e12, 2.039e12}},
                                                     {"h100", {989.4e12, 66.9e12, 3.35e12}},
                                                     {"h200", {989.4e12, 66.9e12, 4.8e12}},
                                                     {"b200", {2250e12, 75e12, 7.7e12}}};
/// Share of the memory's rate that operators reach which only read and write.
constexpr double memory_share = 0.8;

std::int64_t size_of(std::string const& typed, std::string const& flag, std::int64_t otherwise, int most = 1 << 24) {
  return typed.empty() ? otherwise : whole_number(typed, flag, 1, most);
}

/// The sizes that a Hugging Face folder has.
decoder_size size_in_folder(std::string const& named) {
  std::filesystem::path folder = named;
  if (folder.filename() == "config.json") folder = folder.parent_path();
  if (folder.empty()) folder = ".";
  chevron::finetune::decoder_config c;
  try {
    if (auto const mixture = mixture_in_folder(folder)) return *mixture;
    c = chevron::finetune::read_decoder_config(folder);
  } catch (std::runtime_error const& wrong) {  // a usage_error of the run side
    std::string const words = wrong.what();
    bool const other_kind = words.find("`model_type`") != std::string::npos;
    throw usage(words + (other_kind ? "; with experts mixtral, qwen3_moe and gpt_oss" : "") +
                "; or give the model's sizes by --layers, --width and their like");
  }
  return chevron::finetune::size_of(c);
}

decoder_size size_of(model_request const& typed, std::int64_t tokens) {
  decoder_size out;
  bool const folder = !typed.config.empty();
  if (folder) {
    out = size_in_folder(typed.config);
    if (!typed.kind.empty()) throw usage("--kind " + typed.kind + " does not go with " + typed.config + ", which names its kind");
  } else {
    if (typed.layers.empty() || typed.width.empty())
      throw usage("no model is given: give the config.json of a Hugging Face folder, or at least --layers and --width");
    if (!typed.kind.empty() && typed.kind != "gpt" && typed.kind != "llama")
      throw usage("--kind " + quoted(typed.kind) + " is not known: choose one of gpt, llama");
    out.gpt = typed.kind == "gpt";
    if (out.gpt) out.query_bias = out.output_bias = out.inner_bias = true;
  }
  out.layers = size_of(typed.layers, "--layers", out.layers, 4000);
  out.width = size_of(typed.width, "--width", out.width);
  bool const new_heads = !typed.heads.empty() || !folder;
  if (new_heads) {
    out.heads = size_of(typed.heads, "--heads", std::max<std::int64_t>(out.width / 128, 1));
    out.key_heads = out.heads;
    if (typed.head_width.empty() && out.width % out.heads != 0) {
      throw usage("--heads " + std::to_string(out.heads) + " does not divide --width " + std::to_string(out.width) +
                  ": give another number of heads, or --head-width");
    }
    out.head_width = out.width / out.heads;
  }
  out.key_heads = size_of(typed.key_heads, "--key-heads", out.key_heads);
  out.head_width = size_of(typed.head_width, "--head-width", out.head_width);
  if (out.heads % out.key_heads != 0) {
    throw usage("--key-heads " + std::to_string(out.key_heads) + " does not divide the number of heads, " +
                std::to_string(out.heads) + ": each key is shared by equally many queries");
  }
  // Of Llama: two thirds of four widths, in multiples of 256 (Touvron et al., arXiv 2302.13971, section 2.2).
  std::int64_t const usual = out.gpt ? 4 * out.width : (8 * out.width / 3 + 255) / 256 * 256;
  out.inner = size_of(typed.inner, "--inner", folder ? out.inner : usual);
  out.vocabulary = size_of(typed.vocabulary, "--vocabulary", folder ? out.vocabulary : 32000);
  if (out.gpt) out.positions = tokens;
  if (typed.tied) out.tied = true;
  if (!typed.window.empty())
    out.windows.assign(static_cast<std::size_t>(out.layers), whole_number(typed.window, "--window", 1, 1 << 24));
  else if (out.windows.size() != static_cast<std::size_t>(out.layers) && !out.windows.empty())
    out.windows.resize(static_cast<std::size_t>(out.layers), out.windows.back());
  if (typed.experts.empty() != typed.experts_per_token.empty())
    throw usage("--experts and --experts-per-token belong together: give both, or neither");
  if (!typed.experts.empty()) {
    out.experts = whole_number(typed.experts, "--experts", 1, 1 << 16);
    out.experts_per_token = whole_number(typed.experts_per_token, "--experts-per-token", 1, static_cast<int>(out.experts));
  }
  return out;
}

training_setup setup_of(model_request const& typed) {
  training_setup out;
  out.tokens = whole_number(typed.tokens, "--tokens", 1, 1 << 24);
  out.samples = whole_number(typed.samples, "--samples", 1, 1 << 16);
  static std::map<std::string, int> const items = {{"bf16", 2},    {"bfloat16", 2}, {"fp16", 2},
                                                   {"float16", 2}, {"fp32", 4},     {"float32", 4}};
  auto const item = items.find(typed.dtype);
  if (item == items.end()) throw usage("--dtype " + quoted(typed.dtype) + " is not known: choose one of bf16, fp16, fp32");
  out.item = item->second;
  out.optimizer = optimizer_named(typed.optimizer, "--optimizer");
  out.masters = typed.masters;
  if (out.masters && out.item >= 4)
    throw usage("--masters has no effect with --dtype " + typed.dtype +
                ": masters are float32 copies of half-precision parameters");
  out.attention = attention_named(typed.attention, "--attention");
  out.kernels = kernels_named(typed.kernels, "--kernels");
  return out;
}

device_rates device_of(model_request const& typed, std::int64_t item) {
  device_rates out;
  if (typed.gpu.empty()) {
    if (typed.tflops.empty() || typed.bandwidth.empty())
      throw usage("the device is not given: give --gpu, such as --gpu h100, or both --tflops and --bandwidth");
  } else {
    auto const found = devices.find(typed.gpu);
    if (found == devices.end()) {
      std::string known;
      for (auto const& [name, sheet] : devices) known += (known.empty() ? "" : ", ") + name;
      throw usage("--gpu " + quoted(typed.gpu) + " is not known: choose one of " + known + ", or give --tflops and --bandwidth");
    }
    out.name = found->first;
    out.peak = item < 4 ? found->second.half : found->second.single;
    double const share = share_number(typed.efficiency, "--efficiency");
    if (!(share > 0)) throw usage("--efficiency " + quoted(typed.efficiency) + " is not usable: give a share above 0");
    out.matrix = out.peak * share;
    out.memory = found->second.memory * memory_share;
  }
  if (!typed.tflops.empty()) {
    auto const rate = number_in(typed.tflops);
    if (!rate || !(*rate > 0) || !(*rate < 1e9))
      throw usage("--tflops " + quoted(typed.tflops) +
                  " is no rate: give the 10^12 operations a second that matrix products reach");
    out.matrix = *rate * 1e12;
  }
  if (!typed.bandwidth.empty()) out.memory = bandwidth_number(typed.bandwidth, "--bandwidth") * 1e3;
  return out;
}

/// Of the layers' predicted times the means, in milliseconds.
chevron::search::piece_costs mean_layer(described_model const& model) {
  chevron::search::piece_costs out;
  std::vector<piece_figures> const pieces = decoder_pieces(model.size, model.setup);
  auto const count = static_cast<double>(model.size.layers);
  for (std::size_t i = 1; i + 1 < pieces.size(); ++i) {
    out.forward += model.time(pieces[i].forward) / count;
    out.backward_input += model.time(pieces[i].backward_input) / count;
    out.backward_weight += model.time(pieces[i].backward_weight) / count;
  }
  return out;
}

/// Compares a measured profile's layers with the predicted ones.
calibration calibrated(request const& asked, described_model const& model) {
  model_request const& typed = asked.model;
  calibration out;
  if (typed.calibrate.empty()) {
    if (!typed.calibrate_model.empty())
      throw usage("--calibrate-model has no effect without --calibrate: add --calibrate, a measured profile");
    return out;
  }
  auto const read = [&](std::string const& flag, std::string const& file) {
    request one = asked;
    one.profile = file;
    one.cost_flag.clear();
    try {
      return *profile_of(one);
    } catch (usage const& wrong) {
      throw usage(flag + ": " + wrong.what());
    }
  };
  chevron::profile const measured = read("--calibrate", typed.calibrate);
  described_model predicted = model;
  if (!typed.calibrate_model.empty()) {
    std::string const name = "--calibrate-model " + quoted(typed.calibrate_model);
    predicted = described_model_of(read("--calibrate-model", typed.calibrate_model).model, name);
    predicted.device = model.device;
  }
  bool const split =
      std::none_of(measured.backward_weight.begin(), measured.backward_weight.end(), [](double w) { return w < 0; });
  auto const costs = chevron::search::layer_costs_of(measured, split);
  if (!costs.problem.empty()) throw usage("--calibrate " + quoted(typed.calibrate) + ": " + costs.problem);
  if (costs.layers.size() != static_cast<std::size_t>(predicted.size.layers)) {
    throw usage("--calibrate " + quoted(typed.calibrate) + " was measured with " + std::to_string(costs.layers.size()) +
                " layers, and the model has " + std::to_string(predicted.size.layers) +
                ": describe the measured model with chevron-plan model, and name that file by --calibrate-model");
  }
  chevron::search::piece_costs sum, expected = mean_layer(predicted);
  for (auto const& one : costs.layers) {
    sum.forward += one.forward / static_cast<double>(costs.layers.size());
    sum.backward_input += one.backward_input / static_cast<double>(costs.layers.size());
    sum.backward_weight += one.backward_weight / static_cast<double>(costs.layers.size());
  }
  if (!split) {
    sum.backward_weight = 0;
    out.backward_input = out.backward_weight =
        sum.backward_input / (expected.backward_input + expected.backward_weight);
  } else {
    out.backward_input = sum.backward_input / expected.backward_input;
    out.backward_weight = sum.backward_weight / expected.backward_weight;
  }
  out.forward = sum.forward / expected.forward;
  for (double const factor : {out.forward, out.backward_input, out.backward_weight}) {
    if (!(factor > 0)) throw usage("--calibrate " + quoted(typed.calibrate) + ": its layers took no time");
  }
  return out;
}

std::string words_of(request const& asked, described_model const& model, chevron::profile const& made) {
  auto const count = [](std::int64_t n) { return std::to_string(n); };
  decoder_size const& s = model.size;
  training_setup const& t = model.setup;
  std::string out =
      count(s.parameters()) + " parameters: " + count(s.layers) + " layers of width " + count(s.width) + ", " + count(s.heads) +
      " heads of " + count(s.head_width) + (s.key_heads < s.heads ? ", " + count(s.key_heads) + " of keys" : "") +
      ", inner width " + count(s.inner) +
      (s.experts > 0 ? " in " + count(s.experts) + " experts, " + count(s.experts_per_token) + " for a token" : "") +
      ", vocabulary " + count(s.vocabulary) + (s.tied ? ", tied" : "") + ".\n";
  out += "A microbatch: " + count(t.samples) + (t.samples == 1 ? " sequence" : " sequences") + " of " + count(t.tokens) +
         " tokens. " + name_of(t.optimizer) + (t.masters ? " with float32 masters" : "") + ", " + count(t.item) +
         " bytes a number, attention " + name_of(t.attention) + ", kernels of " + name_of(t.kernels) + ".\n";
  out += "Matrix products at " + number(model.device.matrix / 1e12) + " TFLOP/s" +
         (model.device.peak > 0 && asked.model.tflops.empty()
              ? " (" + asked.model.efficiency + " of the peak, assumed unless --efficiency or --calibrate says otherwise)"
              : "") +
         ", other operators at " + number(model.device.memory / 1e9) + " GB/s.\n";
  if (!asked.model.calibrate.empty()) {
    out += "Calibrated by " + asked.model.calibrate + ": F × " + number(model.factors.forward, 4) + ", I × " +
           number(model.factors.backward_input, 4) + ", W × " + number(model.factors.backward_weight, 4) + ".\n";
  }
  std::vector<table_row> rows{{"", "F ms", "I ms", "W ms", "parameters", "static", "activations", "kept for W", "input"}};
  std::vector<piece_figures> const pieces = decoder_pieces(s, t);
  auto const row = [&](std::string const& name, std::size_t i) {
    rows.push_back({name, number(made.forward[i], 5), number(made.backward_input[i], 5), number(made.backward_weight[i], 5),
                    count(pieces[i].parameters), bytes(made.static_bytes[i]), bytes(made.activation_bytes[i]),
                    bytes(made.kept_bytes[i]), bytes(made.input_bytes[i])});
  };
  auto const layers = static_cast<std::size_t>(s.layers);
  row("embedding", 0);
  for (std::size_t i = 1; i <= layers;) {
    std::size_t last = i;
    while (last < layers && made.forward[last + 1] == made.forward[i]) ++last;
    row(i == last
            ? "layer " + count(static_cast<std::int64_t>(i) - 1)
            : "each of layers " + count(static_cast<std::int64_t>(i) - 1) + "-" + count(static_cast<std::int64_t>(last) - 1),
        i);
    i = last + 1;
  }
  row("head", layers + 1);
  out += "\n" + table_text(rows, {align::left, align::right});
  return out + "\nA message between stages has " + bytes(message_bytes(s, t)) + ": --message-bytes " +
         count(message_bytes(s, t)) + " with --bandwidth, or --link.\n";
}

}  // namespace

int run_model(request const& asked) {
  std::string const format = format_of(asked, model_formats);
  described_model model;
  model.setup = setup_of(asked.model);
  model.size = size_of(asked.model, model.setup.tokens);
  model.device = device_of(asked.model, model.setup.item);
  model.factors = calibrated(asked, model);
  chevron::profile made = profile_of_model(model);
  if (made.stages > chevron::max_stages)
    throw usage("--layers " + std::to_string(model.size.layers) + " makes more pieces than " +
                std::to_string(chevron::max_stages));
  if (!asked.model.link.empty()) {
    double const time =
        static_cast<double>(message_bytes(model.size, model.setup)) / bandwidth_number(asked.model.link, "--link");
    std::fill(made.communication.begin(), made.communication.end(), time);
  }
  std::string const words = words_of(asked, model, made);
  write(asked, format == "json" ? chevron::write_profile(made) : words);
  if (!asked.output.empty()) std::cout << words;
  return exit_ok;
}

}  // namespace plan_program
