#pragma once

// Tensors among an operator's arguments.

#include <optional>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

namespace tensors_in {

/// The same argument with `other(tensor)` in place of each tensor; an argument without tensors stays as it is.
template <class Other>
c10::IValue replaced(c10::IValue const& value, Other const& other) {
  if (value.isTensor()) return other(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (at::Tensor const& each : value.toTensorVector()) out.push_back(other(each));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (std::optional<at::Tensor> const& each : value.toOptionalTensorVector())
      out.push_back(each ? std::optional(other(*each)) : std::nullopt);
    return out;
  }
  return value;
}

}  // namespace tensors_in
