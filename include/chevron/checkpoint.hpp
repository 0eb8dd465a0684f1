#pragma once

/// \file
/// Includes <chevron/run.hpp> and adds files: saves and loads checkpoints, and tensors by name in Hugging Face's format
/// (safetensors). Needs nlohmann-json.

#include <chevron/checkpoint/checkpoint.hpp>
#include <chevron/checkpoint/load_weights.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/checkpoint/save_weights.hpp>
#include <chevron/run.hpp>
