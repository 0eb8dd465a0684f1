#pragma once

#include <filesystem>
#include <optional>

#include "model.hpp"

/// \file
/// Sizes of Hugging Face models with experts.

namespace plan_program {

/// Reads the sizes from `config.json` of a folder whose `model_type` is mixtral, qwen3_moe or gpt_oss; keys and defaults of
/// missing ones are those of transformers 5.23. Every layer has experts.
/// \returns nothing for another `model_type`
/// \throws chevron::usage_error, with the key and its value, where a key has a wrong type, and for layers without experts
std::optional<decoder_size> mixture_in_folder(std::filesystem::path const& folder);

}  // namespace plan_program
