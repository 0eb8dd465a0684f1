#pragma once

#include <string>

#include <c10/core/ScalarType.h>

#include "chevron-finetune/decoder_config.hpp"
#include "chevron-finetune/options.hpp"

/// \file
/// The Hugging Face folder that comes out, besides its weights.

namespace chevron::finetune {

/// The dtype of the saved tensors: `--out-dtype`, or what the model's config.json says, or float32.
at::ScalarType dtype_of_out(options const& o, decoder_config const& model);
/// The same in the words of config.json.
std::string name_of_out(options const& o, decoder_config const& model);

/// Before anything is trained: can each of the folder's files be written, and has its disk room for the weights? A `usage_error`
/// if not, and if the model has a link into the folder.
void check_out(options const& o, decoder_config const& model);

/// Copies configuration and tokenizer of the model's folder to new files (chevron/base/new_file.hpp), and says in config.json
/// of which dtype the tensors are now.
void write_other_files(options const& o, decoder_config const& model);

}  // namespace chevron::finetune
