#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/SmallVector.h>
#include <c10/util/accumulate.h>
#include <c10/util/strides.h>

/// \file
/// Strides of tensors that are sent and received.
///
/// Kernels choose the order of sums, and layers their layout, by strides: a model cut into stages computes the same bits as the
/// whole model only if each received tensor has the strides of the sent tensor. A tensor whose elements fill its memory in some
/// order (contiguous, transposed, channels_last) is sent as one block of memory. Any other tensor is sent as a contiguous copy
/// of its elements, and the receiver copies the elements to memory with the sender's strides.

namespace chevron::detail {

/// The sizes of an expanded tensor's memory: the tensor's sizes, with 1 wherever the stride is 0.
inline std::vector<std::int64_t> sizes_in_memory(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<std::int64_t> out(sizes.begin(), sizes.end());
  for (std::size_t d = 0; d < out.size(); ++d) {
    if (strides[d] == 0 && out[d] > 1) out[d] = 1;
  }
  return out;
}

/// Limits, in elements: a tensor arrives with the gaps of its strides if its extent is at most `largest_extent`, or at most
/// `largest_spread` times its number of elements in memory. A view of a few elements of a large tensor arrives contiguous,
/// since the gaps would fill the receiver's memory.
inline constexpr std::int64_t largest_extent = std::int64_t{16} << 20, largest_spread = 16;

/// The extent of a tensor of these sizes and strides: the number of elements from its first to its last address; 0 if elements
/// overlap in memory other than along a stride of 0, since such a tensor cannot be filled.
inline std::int64_t extent_of(at::IntArrayRef sizes, at::IntArrayRef strides) {
  c10::SmallVector<std::pair<std::int64_t, std::int64_t>, 8> real;  // stride, size
  for (std::size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] > 1 && strides[d] != 0) real.emplace_back(strides[d], sizes[d]);
  }
  std::sort(real.begin(), real.end());
  std::int64_t extent = 1;
  for (auto const& [stride, size] : real) {
    if (stride < extent) return 0;
    extent += (size - 1) * stride;
  }
  return extent;
}

/// Whether a tensor of these sizes and strides arrives with its strides, gaps included.
inline bool keeps_strides(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::int64_t const extent = extent_of(sizes, strides);
  return extent > 0 &&
         (extent <= largest_extent || extent <= largest_spread * c10::multiply_integers(sizes_in_memory(sizes, strides)));
}

/// Whether the elements of a tensor fill its memory without gaps, in any order.
inline bool is_packed(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::int64_t const elements = c10::multiply_integers(sizes);
  return elements == 0 || extent_of(sizes, strides) == elements;
}

/// The strides that a sent tensor has at the receiver: its own strides, or contiguous strides if `keeps_strides` is false.
/// \param expanded whether an expanded tensor is also expanded at the receiver
inline c10::SmallVector<std::int64_t, 8> told_strides(at::Tensor const& value, bool expanded) {
  bool own = value.is_non_overlapping_and_dense() || value.numel() == 0;
  if (!own) {
    bool const repeats = sizes_in_memory(value.sizes(), value.strides()) != value.sizes();
    own = (expanded || !repeats) && keeps_strides(value.sizes(), value.strides());
  }
  if (own) return {value.strides().begin(), value.strides().end()};
  auto const contiguous = c10::contiguous_strides(value.sizes());
  return {contiguous.begin(), contiguous.end()};
}

/// Returns a tensor's elements without gaps, for sending: the tensor itself, or a contiguous copy if its memory has gaps.
inline at::Tensor packed(at::Tensor const& value) {
  return !value.defined() || value.is_non_overlapping_and_dense() || value.numel() == 0 ? value : value.contiguous();
}

/// A packed tensor's memory as a one-dimensional tensor, in memory order.
inline at::Tensor as_row(at::Tensor const& packed) {
  return packed.dim() == 1 && packed.is_contiguous() ? packed : packed.as_strided({packed.numel()}, {1});
}

/// Returns a received tensor with the sender's strides.
/// \param row contiguous tensor with the sender's sizes; its memory has the elements as `packed` sent them
inline at::Tensor laid_out(at::Tensor const& row, at::IntArrayRef strides) {
  at::IntArrayRef const sizes = row.sizes();
  if (row.strides() == strides) return row;
  if (is_packed(sizes, strides)) return row.as_strided(sizes, strides);
  auto const in_memory = sizes_in_memory(sizes, strides);
  at::Tensor const out = at::empty_strided(in_memory, strides, row.options());
  out.copy_(row.as_strided(in_memory, row.strides()));
  return out.as_strided(sizes, strides);
}

/// Returns `value` or a copy of it with these strides. \param strides by `told_strides`, of a tensor of the same sizes
inline at::Tensor with_strides(at::Tensor const& value, at::IntArrayRef strides) {
  if (value.strides() == strides) return value;
  return at::empty_strided(value.sizes(), strides, value.options()).copy_(value);
}

}  // namespace chevron::detail
