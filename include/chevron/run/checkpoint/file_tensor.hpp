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

/// A part of a tensor of a file: the elements [begin, begin + size) along one dimension.
struct tensor_part {
  std::int64_t along = 0, begin = 0, size = 0;
};

/// The bytes of a part within its tensor: `count` runs of `each` bytes, the first run at byte `begin`, and each next run
/// `distance` bytes after the run before.
struct byte_runs {
  std::uint64_t begin = 0, each = 0, distance = 0, count = 1;
};

/// Locates the bytes of a part. \param shape shape of the whole tensor \param part empty: the whole tensor, in one run
inline byte_runs runs_of(std::vector<std::int64_t> const& shape, at::ScalarType type, std::optional<tensor_part> const& part) {
  std::size_t const along = part ? static_cast<std::size_t>(part->along) : 0;
  std::uint64_t before = 1, element = c10::elementSize(type);
  for (std::size_t d = 0; d < shape.size(); ++d) (part && d < along ? before : element) *= static_cast<std::uint64_t>(shape[d]);
  if (!part) return {0, element, element, 1};
  std::uint64_t const row = shape[along] == 0 ? 0 : element / static_cast<std::uint64_t>(shape[along]);
  return {row * static_cast<std::uint64_t>(part->begin), row * static_cast<std::uint64_t>(part->size), element, before};
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

  std::uint64_t bytes() const {
    byte_runs const all = runs_of(shape, type, {});
    return all.each;
  }
};

}  // namespace chevron::detail
