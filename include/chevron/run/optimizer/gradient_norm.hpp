#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_real.h>

#include <chevron/run/core/tensors.hpp>

/// \file
/// The squared norms of gradients.

namespace chevron {

namespace detail {

/// Eight running sums, so that the order of additions is the same on every machine, whatever the number of threads.
template <class Scalar>
double sum_of_squares(Scalar const* values, std::int64_t count) {
  double lanes[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    for (int lane = 0; lane < 8; ++lane)
      lanes[lane] += static_cast<double>(values[i + lane]) * static_cast<double>(values[i + lane]);
  }
  for (int lane = 0; i < count; ++i, ++lane) lanes[lane] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

}  // namespace detail

/// The norms of gradients on an accelerator, one double each, there. One call of LibTorch serves all gradients of a dtype: its
/// kernels for lists take one dtype, and copy no gradient. The host does not wait.
inline tensors norms_of(tensors const& gradients) {
  struct list {
    tensors values;
    std::vector<std::size_t> places;
  };
  std::map<at::ScalarType, list> by_dtype;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    at::Tensor const& g = gradients[i];
    at::Tensor const numbers = g.is_complex() ? at::view_as_real(g) : g;
    list& of = by_dtype[numbers.scalar_type()];
    of.values.push_back(numbers);
    of.places.push_back(i);
  }
  tensors norms(gradients.size());
  for (auto const& [dtype, of] : by_dtype) {
    tensors const made = at::_foreach_norm(of.values, 2, at::kDouble);
    for (std::size_t k = 0; k < made.size(); ++k) norms[of.places[k]] = made[k];
  }
  return norms;
}

/// The squared norm of a gradient in main memory.
inline double sum_of_squares(at::Tensor const& gradient) {
  if (gradient.is_non_overlapping_and_dense()) {
    if (gradient.scalar_type() == at::kFloat) return detail::sum_of_squares(gradient.const_data_ptr<float>(), gradient.numel());
    if (gradient.scalar_type() == at::kDouble) return detail::sum_of_squares(gradient.const_data_ptr<double>(), gradient.numel());
  }
  at::Tensor const numbers = gradient.is_complex() ? at::view_as_real(gradient) : gradient;
  return at::sum(at::square(numbers.to(at::kDouble))).item<double>();
}

}  // namespace chevron
