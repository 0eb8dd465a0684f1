#include "folder_out.hpp"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include <nlohmann/json.hpp>

#include <chevron/run/core/error.hpp>
#include <chevron/show/format.hpp>

namespace chevron::finetune {
namespace fs = std::filesystem;
namespace {

/// What belongs to a model and is neither weights nor somebody's notes.
bool belongs_to_model(fs::path const& file) {
  std::string const name = file.filename().string(), ending = file.extension().string();
  if (name.ends_with(".index.json")) return false;
  return ending == ".json" || ending == ".txt" || ending == ".model" || ending == ".jinja";
}

}  // namespace

std::string name_of_out(options const& o, decoder_config const& model) {
  if (!o.out_dtype.empty()) return o.out_dtype;
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
  fs::path const probe = fs::path(o.out) / ".chevron-finetune";
  if (!failed && !(std::ofstream(probe) << "?").flush()) failed = std::make_error_code(std::errc::permission_denied);
  if (failed) throw usage_error("--out " + o.out + " cannot be written to: " + failed.message() + ". Remedy: another folder");
  fs::remove(probe, failed);
  // Weights that the folder holds go only once the new ones are whole.
  auto const bytes = model.parameters() * static_cast<std::int64_t>(c10::elementSize(dtype_of_out(o, model)));
  fs::space_info const room = fs::space(o.out, failed);
  if (!failed && room.available < static_cast<std::uintmax_t>(bytes)) {
    throw usage_error("--out " + o.out + " will take " + show::bytes(bytes) + ", and its disk has " +
                      show::bytes(static_cast<std::int64_t>(room.available)) + " left. Remedy: make room, or choose another folder");
  }
}

void write_other_files(options const& o, decoder_config const& model) {
  try {
    for (auto const& entry : fs::directory_iterator(o.model)) {
      if (entry.is_regular_file() && belongs_to_model(entry.path()))
        fs::copy_file(entry.path(), fs::path(o.out) / entry.path().filename(), fs::copy_options::overwrite_existing);
    }
  } catch (fs::filesystem_error const& e) {
    throw usage_error("--out " + o.out + ": " + e.what() + ". Remedy: copy configuration and tokenizer of " + o.model +
                      " by hand");
  }
  std::string const dtype = name_of_out(o, model);
  if (dtype == model.dtype) return;
  fs::path const file = fs::path(o.out) / "config.json";
  nlohmann::ordered_json config;
  std::ifstream(file) >> config;
  // Of both keys `dtype` counts.
  bool const older = config.contains("torch_dtype") && (!config.contains("dtype") || config["dtype"].is_null());
  config[older ? "torch_dtype" : "dtype"] = dtype;
  std::ofstream written(file);
  written << config.dump(2) << "\n";
  if (!written.flush()) throw usage_error(file.string() + " could not be written. Remedy: is the disk full?");
}

}  // namespace chevron::finetune
