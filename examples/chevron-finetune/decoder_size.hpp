#pragma once

#include "chevron-finetune/decoder_config.hpp"
#include "common/decoder_costs.hpp"

/// \file
/// The sizes of a folder's decoder, as formulas of times and bytes take them.

namespace chevron::finetune {

/// The sizes that decide a model's times and bytes.
/// \param c of a folder
inline train::decoder_size size_of(decoder_config const& c) {
  train::decoder_size out;
  out.layers = c.layers;
  out.width = c.width;
  out.inner = c.inner;
  out.heads = c.heads;
  out.key_heads = c.key_heads;
  out.head_width = c.head_width;
  out.vocabulary = c.vocabulary;
  out.tied = c.tied;
  out.query_bias = c.query_bias;
  out.output_bias = c.output_bias;
  out.inner_bias = c.inner_bias;
  out.head_norms = c.head_norms;
  out.windows = c.windows;
  return out;
}

}  // namespace chevron::finetune
