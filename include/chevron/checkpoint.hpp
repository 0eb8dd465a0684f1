#pragma once

/// \file
/// Includes <chevron/run.hpp> and adds files: saves and loads checkpoints, and tensors by name in Hugging Face's format
/// (safetensors). Needs nlohmann-json.

#include <chevron/run.hpp>
#include <chevron/run/checkpoint/checkpoint.hpp>
#include <chevron/run/checkpoint/load_weights.hpp>
#include <chevron/run/checkpoint/safetensors.hpp>
#include <chevron/run/checkpoint/save_weights.hpp>
