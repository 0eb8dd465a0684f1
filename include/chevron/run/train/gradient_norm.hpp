#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/square.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <chevron/run/core/tensors.hpp>

/// \file
/// The squared norms of gradients.

namespace chevron {

namespace detail {

/// Sums the squares of `count` values in eight running sums, on one thread: additions have the same order on every machine.
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

/// Computes the norms of gradients on an accelerator, and returns for each gradient a double scalar on its device. Calls
/// LibTorch once per dtype, since LibTorch's list kernels take one dtype; no gradient is copied. The host does not wait.
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

/// The number of elements in each block of a parameter; the norm sums squares block by block. A multiple of 64, with at most
/// 256 blocks per parameter. Blocks depend on the parameter's size alone, and a gradient is divided between replicas only at
/// the end of a block, so replicas with a share each compute the same bits as one replica with the whole gradient.
/// \param elements number of elements of the parameter
constexpr std::int64_t norm_block(std::int64_t elements) {
  constexpr std::int64_t least = 1024, most_blocks = 256, lines = 64;
  std::int64_t const each = (elements + most_blocks - 1) / most_blocks;
  return each <= least ? least : (each + lines - 1) / lines * lines;
}

/// The largest finite number of a half-precision dtype; infinity for all other dtypes.
inline double largest_of(at::ScalarType dtype) {
  if (dtype == at::kHalf) return std::numeric_limits<c10::Half>::max();
  if (dtype == at::kBFloat16) return std::numeric_limits<c10::BFloat16>::max();
  return std::numeric_limits<double>::infinity();
}

/// A gradient, or a block of a gradient, that a rank contributes to the norm.
struct counted_gradient {
  at::Tensor values;
  std::size_t number = 0;  ///< index of the block in its gradient
  bool is_block = false;
};

/// The squared norm of one block of a gradient in main memory.
/// \param row the gradient in the order of its memory \param begin, count the block, in elements
inline double squares_of_block(at::Tensor const& row, std::int64_t begin, std::int64_t count) {
  if (row.scalar_type() == at::kFloat) return detail::sum_of_squares(row.const_data_ptr<float>() + begin, count);
  if (row.scalar_type() == at::kDouble) return detail::sum_of_squares(row.const_data_ptr<double>() + begin, count);
  at::Tensor const block = row.narrow(0, begin, count);
  at::Tensor const numbers = block.is_complex() ? at::view_as_real(block) : block;
  return at::sum(at::square(numbers.to(at::kDouble))).item<double>();
}

/// The squared norm of a gradient in main memory: sums the squares block by block, in the order of its memory.
inline double sum_of_squares(at::Tensor const& gradient) {
  bool const dense = gradient.is_non_overlapping_and_dense();
  at::Tensor const row = dense ? gradient.as_strided({gradient.numel()}, {1}) : gradient.contiguous().flatten();
  std::int64_t const block = norm_block(row.numel());
  double sum = 0;
  for (std::int64_t begin = 0; begin < row.numel(); begin += block)
    sum += squares_of_block(row, begin, std::min(block, row.numel() - begin));
  return sum;
}

}  // namespace chevron
