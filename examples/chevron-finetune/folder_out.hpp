#pragma once

#include <filesystem>
#include <string>

#include <c10/core/ScalarType.h>

#include "chevron-finetune/decoder_config.hpp"
#include "chevron-finetune/options.hpp"

/// \file
/// The Hugging Face folder that comes out, besides its weights.

namespace chevron::finetune {

/// The dtype of the saved tensors: `--out-dtype`, or what the model's config.json says, or float32; of adapters float32 without
/// `--out-dtype`, as peft stores them beside a model in half precision.
at::ScalarType dtype_of_out(options const& o, decoder_config const& model);
/// The same in the words of config.json.
std::string name_of_out(options const& o, decoder_config const& model);

/// Before anything is trained: can each of the folder's files be written, and has its disk room for the weights? A `usage_error`
/// if not, if the model has a link into the folder, and if the folder would hold a model and adapters.
void check_out(options const& o, decoder_config const& model);

/// Copies configuration and tokenizer of the model's folder to new files (chevron/base/new_file.hpp), and says in config.json
/// of which dtype the tensors are now. Beside adapters the model's own configuration is left out: config.json would make the
/// folder that of a model.
void write_other_files(options const& o, decoder_config const& model);

/// The folder, inside of that of `--out`, into which ranks save their adapters before `write_adapter_files`.
std::filesystem::path adapter_parts(options const& o);

/// Writes `adapter_model.safetensors` of the adapters in `adapter_parts`, which is removed, and `adapter_config.json`, as peft
/// names and reads them.
void write_adapter_files(options const& o);

}  // namespace chevron::finetune
