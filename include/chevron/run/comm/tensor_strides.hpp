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
/// How tensors lie in memory, and how a message keeps that.
///
/// Kernels choose their order of adding, and layers their layout, by strides: a model cut into stages gives the numbers of the
/// whole one only if a tensor arrives with the strides it was sent with. A tensor whose elements fill its memory in some order
/// (contiguous, transposed, channels_last) is sent as it lies. Of others only the elements are sent, and the receiver spreads
/// them.

namespace chevron::detail {

/// What an expanded tensor has memory for: its sizes, with 1 wherever the stride is 0.
inline std::vector<std::int64_t> sizes_in_memory(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::vector<std::int64_t> out(sizes.begin(), sizes.end());
  for (std::size_t d = 0; d < out.size(); ++d) {
    if (strides[d] == 0 && out[d] > 1) out[d] = 1;
  }
  return out;
}

/// A tensor arrives with its gaps if its memory is at most so many elements, or so many times its own; else (a few elements of a
/// large tensor) it arrives contiguous, since the gaps would fill the receiver's memory.
inline constexpr std::int64_t largest_extent = std::int64_t{16} << 20, largest_spread = 16;

/// How many elements' memory tensors of these sizes and strides lie in; 0 where two elements share memory otherwise than along a
/// stride of 0, so that no such tensor can be filled.
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

/// Whether a tensor of these sizes and strides arrives with its strides.
inline bool keeps_strides(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::int64_t const extent = extent_of(sizes, strides);
  return extent > 0 &&
         (extent <= largest_extent || extent <= largest_spread * c10::multiply_integers(sizes_in_memory(sizes, strides)));
}

/// Whether its elements fill its memory, in whatever order.
inline bool is_packed(at::IntArrayRef sizes, at::IntArrayRef strides) {
  std::int64_t const elements = c10::multiply_integers(sizes);
  return elements == 0 || extent_of(sizes, strides) == elements;
}

/// The strides with which a tensor arrives: its own, wherever it can.
/// \param expanded whether an expanded tensor is to arrive as one
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

/// A tensor's elements without gaps, as they are sent: its own memory, where it has none.
inline at::Tensor packed(at::Tensor const& value) {
  return !value.defined() || value.is_non_overlapping_and_dense() || value.numel() == 0 ? value : value.contiguous();
}

/// A packed tensor's memory as a row of elements, in the order in which they lie there.
inline at::Tensor as_row(at::Tensor const& packed) {
  return packed.dim() == 1 && packed.is_contiguous() ? packed : packed.as_strided({packed.numel()}, {1});
}

/// The tensor whose packed elements have come into `row`, which is contiguous and of its sizes.
inline at::Tensor laid_out(at::Tensor const& row, at::IntArrayRef strides) {
  at::IntArrayRef const sizes = row.sizes();
  if (row.strides() == strides) return row;
  if (is_packed(sizes, strides)) return row.as_strided(sizes, strides);
  auto const in_memory = sizes_in_memory(sizes, strides);
  at::Tensor const out = at::empty_strided(in_memory, strides, row.options());
  out.copy_(row.as_strided(in_memory, row.strides()));
  return out.as_strided(sizes, strides);
}

/// A tensor of these values that arrives with these strides, as `told_strides` gave them of another one of its sizes.
inline at::Tensor with_strides(at::Tensor const& value, at::IntArrayRef strides) {
  if (value.strides() == strides) return value;
  return at::empty_strided(value.sizes(), strides, value.options()).copy_(value);
}

}  // namespace chevron::detail
