#pragma once

#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <chevron/plan/profile.hpp>

#include "common/decoder_costs.hpp"
#include "request.hpp"

/// \file
/// A model, the way it is trained and the device, and the profile by layers that follows from them.

namespace plan_program {

using chevron::train::attention_kind;
using chevron::train::decoder_size;
using chevron::train::kernel_kind;
using chevron::train::optimizer_kind;
using chevron::train::piece_figures;
using chevron::train::piece_work;
using chevron::train::training_setup;

/// Rates of one device.
struct device_rates {
  std::string name;   ///< of `--gpu`; empty: none was named
  double peak = 0;    ///< floating-point operations a second that the device can do at most; 0: not known
  double matrix = 0;  ///< that matrix products reach
  double memory = 0;  ///< bytes a second that other operators reach
};

/// Measured over predicted times, one factor for each kind of operation; 1 without a measurement.
struct calibration {
  double forward = 1, backward_input = 1, backward_weight = 1;
};

/// All from which times and bytes of a model follow.
struct described_model {
  decoder_size size;
  training_setup setup;
  device_rates device;
  calibration factors;

  /// Milliseconds of work, without a calibration.
  double time(piece_work const& of) const { return (of.matrix / device.matrix + of.moved / device.memory) * 1e3; }
};

/// Kinds by their names on the command line. \param flag for the error \throws usage for another name
attention_kind attention_named(std::string const& typed, std::string const& flag);
kernel_kind kernels_named(std::string const& typed, std::string const& flag);
optimizer_kind optimizer_named(std::string const& typed, std::string const& flag);
std::string name_of(attention_kind kind);
std::string name_of(kernel_kind kind);
std::string name_of(optimizer_kind kind);

/// The object `model` of a profile.
nlohmann::ordered_json to_json(described_model const& model);
/// \throws usage where a key is missing or of another kind \param name of the file, for the error
described_model described_model_of(std::string const& text, std::string const& name);

/// A profile of one stage for the embedding, one for each layer, and one for the head. Times of messages are not known.
chevron::profile profile_of_model(described_model const& model);

}  // namespace plan_program
