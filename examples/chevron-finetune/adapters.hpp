#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

/// \file
/// Which projections of a decoder have low-rank adapters, and the adapters' sizes (LoRA: Hu et al., arXiv 2106.09685).

namespace chevron::finetune {

struct decoder_config;

/// Adapters beside frozen projections: each adds `alpha / rank` × B A x to W x. Names and meanings are those of Hugging Face's
/// peft.
struct adapters {
  int rank = 0;                      ///< rows of A and columns of B; 0: no adapters, all of the model is trained
  double alpha = 8;                  ///< lora_alpha
  std::vector<std::string> targets;  ///< projections with an adapter: `q_proj` …

  /// The factor of B A x.
  double scale() const { return alpha / rank; }
  /// Whether a projection has an adapter. \param projection such as `q_proj`
  bool on(std::string_view projection) const;
  /// Parameters of all adapters of a model. \param c of the model's folder
  std::int64_t parameters(decoder_config const& c) const;
  /// `rank 8, alpha 16, on q_proj and v_proj`: the settings that decide what is trained, in words.
  std::string words() const;
};

/// The projections of a decoder's layer: first those of attention, then those of the gated maps.
struct projections {
  static constexpr std::string_view attention[] = {"q_proj", "k_proj", "v_proj", "o_proj"};
  static constexpr std::string_view maps[] = {"gate_proj", "up_proj", "down_proj"};
};

/// The projections that the values of `--lora-targets` name: `attention`, `all`, or projections.
/// \returns each projection once, in the order of `projections`
std::vector<std::string> targets_of(std::vector<std::string> const& named);

/// Whether a parameter belongs to an adapter. \param name of a stage's parameter
bool is_of_adapter(std::string_view name);

}  // namespace chevron::finetune
