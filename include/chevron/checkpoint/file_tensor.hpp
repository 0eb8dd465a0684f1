#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

/// \file
/// Describes a tensor that is written to a file, and locates the bytes of a part of a tensor in a file.

namespace chevron::detail {

/// A part of a tensor of a file: elements along one dimension, in ranges that ascend and do not overlap.
struct tensor_part {
  struct range {
    std::int64_t begin = 0, size = 0;
  };
  std::int64_t along = 0;
  std::vector<range> ranges;

  /// The number of elements along the dimension.
  std::int64_t size() const {
    std::int64_t sum = 0;
    for (range const& one : ranges) sum += one.size;
    return sum;
  }
};

/// The bytes of a part within its tensor. A row of the tensor has `distance` bytes, of which the part has the bytes of `runs`, in
/// each of `count` rows.
struct byte_runs {
  struct run {
    std::uint64_t begin = 0, size = 0;  // begin: within a row
  };
  std::vector<run> runs;
  std::uint64_t distance = 0, count = 1;

  /// The part's bytes in one row.
  std::uint64_t of_row() const {
    std::uint64_t sum = 0;
    for (run const& one : runs) sum += one.size;
    return sum;
  }
  /// The number of the part's bytes.
  std::uint64_t bytes() const { return count * of_row(); }
  /// Locates one byte of the part. \param at number of the byte in the part, below `bytes()`
  /// \returns `begin`: the byte's place in the tensor; `size`: how many bytes of the part lie there in a row
  run place(std::uint64_t at) const {
    std::uint64_t const row = at / of_row();
    std::uint64_t within = at % of_row();
    auto here = runs.begin();
    for (; within >= here->size; ++here) within -= here->size;
    return {row * distance + here->begin + within, here->size - within};
  }
};

/// Locates the bytes of a part. \param shape shape of the whole tensor \param part empty: the whole tensor, in one row
inline byte_runs runs_of(std::vector<std::int64_t> const& shape, at::ScalarType type, std::optional<tensor_part> const& part) {
  std::size_t const along = part ? static_cast<std::size_t>(part->along) : 0;
  std::uint64_t before = 1, element = c10::elementSize(type);
  for (std::size_t d = 0; d < shape.size(); ++d) (part && d < along ? before : element) *= static_cast<std::uint64_t>(shape[d]);
  if (!part) return {{{0, element}}, element, 1};
  std::uint64_t const row = shape[along] == 0 ? 0 : element / static_cast<std::uint64_t>(shape[along]);
  byte_runs out{{}, element, before};
  for (tensor_part::range const& one : part->ranges)
    out.runs.push_back({row * static_cast<std::uint64_t>(one.begin), row * static_cast<std::uint64_t>(one.size)});
  return out;
}

/// A whole tensor to be written. The writer calls `values` tensor by tensor, so that memory holds one gathered tensor at a
/// time.
struct file_tensor {
  std::string name;
  at::ScalarType type;
  std::vector<std::int64_t> shape;
  std::function<at::Tensor()> values;  ///< returns the tensor, on any device and of any layout
  bool gathered = false;               ///< whether `values` is a collective over the shards

  file_tensor(std::string called, at::Tensor const& value)
      : name(std::move(called)), type(value.scalar_type()), shape(value.sizes().vec()), values([value] { return value; }) {}

  std::uint64_t bytes() const { return runs_of(shape, type, {}).bytes(); }
};

}  // namespace chevron::detail
