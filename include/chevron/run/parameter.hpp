#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

/// \file
/// Tensors that have a name.

namespace chevron {

using tensors = std::vector<at::Tensor>;

/// One parameter (a leaf tensor), with its name within its stage.
struct parameter {
  std::string name;
  at::Tensor value;
  std::string tied_as = {};  ///< parameters of several stages with the same word here are one; empty: tied to none
};

}  // namespace chevron
