#pragma once

/// \file
/// <chevron/run.hpp>, and files: checkpoints, and tensors by name as Hugging Face keeps them (safetensors). Needs nlohmann-json.

#include <chevron/run.hpp>
#include <chevron/run/checkpoint/checkpoint.hpp>
#include <chevron/run/checkpoint/load_weights.hpp>
#include <chevron/run/checkpoint/safetensors.hpp>
#include <chevron/run/checkpoint/save_weights.hpp>
