#include "folder_out.hpp"

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

#include <ATen/ops/empty.h>
#include <nlohmann/json.hpp>

#include <chevron/base/format.hpp>
#include <chevron/base/new_file.hpp>
#include <chevron/checkpoint/file_tensor.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/checkpoint/weight_folder.hpp>
#include <chevron/run/core/error.hpp>

namespace chevron::finetune {
namespace fs = std::filesystem;
namespace {

/// What belongs to a model and is neither weights nor somebody's notes.
bool belongs_to_model(fs::path const& file) {
  std::string const name = file.filename().string(), ending = file.extension().string();
  if (name.ends_with(".index.json")) return false;
  return ending == ".json" || ending == ".txt" || ending == ".model" || ending == ".jinja";
}

constexpr char const* adapter_config = "adapter_config.json";
constexpr char const* adapter_weights = "adapter_model.safetensors";

/// The names of the files that `write_other_files` writes.
std::vector<std::string> other_files(options const& o) {
  std::vector<std::string> out;
  for (auto const& entry : fs::directory_iterator(o.model)) {
    if (!entry.is_regular_file() || !belongs_to_model(entry.path())) continue;
    std::string const name = entry.path().filename().string();
    bool const of_model = name == "config.json" || name == "generation_config.json";
    if (o.adapters.rank == 0 || !of_model) out.push_back(name);
  }
  return out;
}

std::string content_of(fs::path const& file) {
  std::ifstream in(file, std::ios::binary);
  std::string out((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  if (!in.is_open() || in.bad()) throw usage_error(file.string() + " cannot be read. Remedy: see whether the --model is whole");
  return out;
}

[[noreturn]] void refuse_out(options const& o, std::string const& why) {
  throw usage_error("--out " + o.out + " cannot be written to: " + why + ". Remedy: another folder");
}

/// Saving removes the weights that the folder holds: the model's must not be among them.
void refuse_links_into_out(options const& o) {
  std::error_code ignored;
  fs::path const out = fs::canonical(o.out, ignored);
  for (auto const& entry : fs::directory_iterator(o.model)) {
    fs::path const there = fs::canonical(entry.path(), ignored);
    if (there.parent_path() == out) {
      throw usage_error("--out " + o.out + " holds " + there.filename().string() + ", to which " + entry.path().string() +
                        " of the --model is a link. Remedy: another folder");
    }
  }
}

/// Readers of a folder with both files take it for one or the other.
void refuse_model_beside_adapters(options const& o) {
  std::string const other = o.adapters.rank > 0 ? "config.json" : adapter_config;
  std::error_code ignored;
  if (!fs::exists(fs::path(o.out) / other, ignored)) return;
  throw usage_error("--out " + o.out + " holds " + other + " of " + (o.adapters.rank > 0 ? "a model" : "adapters") +
                    ", and is to receive " + (o.adapters.rank > 0 ? "adapters" : "a model") + ". Remedy: another folder");
}

}  // namespace

std::string name_of_out(options const& o, decoder_config const& model) {
  if (!o.out_dtype.empty()) return o.out_dtype;
  if (o.adapters.rank > 0) return "float32";
  return model.dtype.empty() ? "float32" : model.dtype;
}

at::ScalarType dtype_of_out(options const& o, decoder_config const& model) {
  std::string const name = name_of_out(o, model);
  return name == "bfloat16" ? at::kBFloat16 : name == "float16" ? at::kHalf : name == "float64" ? at::kDouble : at::kFloat;
}

void check_out(options const& o, decoder_config const& model) {
  std::error_code failed;
  fs::create_directories(o.out, failed);
  if (!failed && !fs::is_directory(o.out, failed)) failed = std::make_error_code(std::errc::not_a_directory);
  if (failed) refuse_out(o, failed.message());
  refuse_links_into_out(o);
  refuse_model_beside_adapters(o);
  for (auto const& entry : fs::directory_iterator(o.out)) {
    std::string const name = entry.path().filename().string();
    if (detail::is_weight_file(name) && entry.is_directory() && !entry.is_symlink()) refuse_out(o, name + " there is a folder");
  }
  std::vector<std::string> names = other_files(o);
  if (o.adapters.rank > 0) names.insert(names.end(), {adapter_config, adapter_weights});
  for (std::string const& name : names) {
    fs::path const file = fs::path(o.out) / name;
    if (detail::is_stream(file)) refuse_out(o, name + " there is no file");
    if (auto const fault = detail::fault_of_writing(file)) refuse_out(o, name + ": " + fault.message());
  }
  // Weights that the folder holds go only once the new ones are whole; adapters are saved twice before the first go.
  std::int64_t const numbers = o.adapters.rank > 0 ? 2 * o.adapters.parameters(model) : model.parameters();
  auto const bytes = numbers * static_cast<std::int64_t>(c10::elementSize(dtype_of_out(o, model)));
  fs::space_info const room = fs::space(o.out, failed);
  if (!failed && room.available < static_cast<std::uintmax_t>(bytes)) {
    throw usage_error("--out " + o.out + " will take " + show::bytes(bytes) + ", and its disk has " +
                      show::bytes(static_cast<std::int64_t>(room.available)) +
                      " left. Remedy: make room, or choose another folder");
  }
}

void write_other_files(options const& o, decoder_config const& model) {
  std::string const dtype = name_of_out(o, model);
  try {
    for (std::string const& name : other_files(o)) {
      std::string content = content_of(fs::path(o.model) / name);
      if (name == "config.json" && dtype != model.dtype) {
        auto config = nlohmann::ordered_json::parse(content);
        // Of both keys `dtype` counts.
        bool const older = config.contains("torch_dtype") && (!config.contains("dtype") || config["dtype"].is_null());
        config[older ? "torch_dtype" : "dtype"] = dtype;
        content = config.dump(2) + "\n";
      }
      detail::write_file(fs::path(o.out) / name, content);
    }
  } catch (std::system_error const& e) {
    throw usage_error("--out " + o.out + ": " + e.code().message() + ". Remedy: copy configuration and tokenizer of " + o.model +
                      " by hand");
  }
}

fs::path adapter_parts(options const& o) { return fs::path(o.out) / "adapter_model.parts"; }

void write_adapter_files(options const& o) {
  fs::path const out = o.out, parts = adapter_parts(o);
  try {
    {
      detail::weight_folder saved(parts);
      std::vector<detail::file_tensor> all;
      for (std::string const& name : saved.names()) {
        at::Tensor const value = at::empty(saved.shape(name), saved.dtype(name));
        saved.copy(name, value);
        all.emplace_back(name, value);
      }
      detail::unnamed_safetensors(out / adapter_weights, all, {{"format", "pt"}}).give_name();
    }
    std::vector<fs::path> old;
    for (auto const& entry : fs::directory_iterator(parts)) {
      if (detail::is_weight_file(entry.path().filename().string())) old.push_back(entry.path());
    }
    for (fs::path const& file : old) fs::remove(file);
    std::error_code ignored;
    fs::remove(parts, ignored);  // but for files of others in it
    // peft declares a whole number.
    bool const whole = o.adapters.alpha == std::floor(o.adapters.alpha);
    nlohmann::ordered_json const alpha =
        whole ? nlohmann::ordered_json(static_cast<std::int64_t>(o.adapters.alpha)) : nlohmann::ordered_json(o.adapters.alpha);
    nlohmann::ordered_json const config{{"peft_type", "LORA"},
                                        {"task_type", "CAUSAL_LM"},
                                        {"base_model_name_or_path", fs::canonical(o.model).string()},
                                        {"r", o.adapters.rank},
                                        {"lora_alpha", alpha},
                                        {"lora_dropout", 0.0},
                                        {"target_modules", o.adapters.targets},
                                        {"bias", "none"},
                                        {"fan_in_fan_out", false},
                                        {"use_rslora", false},
                                        {"use_dora", false},
                                        {"modules_to_save", nullptr},
                                        {"inference_mode", true}};
    detail::write_file(out / adapter_config, config.dump(2) + "\n");
  } catch (std::system_error const& e) {
    throw usage_error("--out " + o.out + ": " + e.code().message() + ". Remedy: another folder, or --resume from a checkpoint");
  }
}

}  // namespace chevron::finetune
