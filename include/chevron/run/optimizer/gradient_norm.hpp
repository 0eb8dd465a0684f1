#pragma once

#include <algorithm>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_real.h>

/// \file
/// The squared norm of a gradient.

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

/// The squared norm of a gradient, in double, where the gradient is. On an accelerator a large one is squared in pieces: its copy
/// in double and the squares would take sixteen bytes an element. \param piece elements of a piece
inline at::Tensor squared_norm(at::Tensor const& gradient, std::int64_t piece = std::int64_t{16} << 20) {
  at::Tensor const numbers = gradient.is_complex() ? at::view_as_real(gradient) : gradient;
  auto const of = [](at::Tensor const& part) { return at::sum(at::square(part.to(at::kDouble))); };
  if (numbers.is_cpu() || numbers.numel() <= piece) return of(numbers);
  at::Tensor const row =
      numbers.is_non_overlapping_and_dense() ? numbers.as_strided({numbers.numel()}, {1}) : numbers.reshape(-1);
  at::Tensor total = of(row.narrow(0, 0, piece));
  for (std::int64_t at = piece; at < row.numel(); at += piece)
    total.add_(of(row.narrow(0, at, std::min(piece, row.numel() - at))));
  return total;
}

/// The same as a number.
inline double sum_of_squares(at::Tensor const& gradient) {
  if (gradient.is_cpu() && gradient.is_non_overlapping_and_dense()) {
    if (gradient.scalar_type() == at::kFloat) return detail::sum_of_squares(gradient.const_data_ptr<float>(), gradient.numel());
    if (gradient.scalar_type() == at::kDouble) return detail::sum_of_squares(gradient.const_data_ptr<double>(), gradient.numel());
  }
  return squared_norm(gradient).item<double>();
}

}  // namespace chevron
