#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/core/host_copy.hpp>

/// \file
/// Fingerprints of the values of tensors, bit for bit, equal on all devices.

namespace chevron {

namespace detail {

/// Two sums modulo 2^64 over the 8-byte words of a tensor's values, the last word padded with zeros. `plain` sums the words, so
/// it changes with any single word; `placed` sums (word + place × by_place)², so it depends on the words' order.
struct word_sums {
  /// Factor of a word's place; places count from 1.
  static constexpr std::uint64_t by_place = 0x9e3779b97f4a7c15u;

  std::uint64_t plain = 0, placed = 0;

  void add(void const* bytes, std::size_t count) {
    auto const* from = static_cast<unsigned char const*>(bytes);
    std::uint64_t place = 0;
    for (; count > 0; from += 8) {
      std::uint64_t word = 0;
      std::size_t const here = std::min<std::size_t>(count, 8);
      if (here == 8) {
        std::memcpy(&word, from, 8);
      } else {
        std::memcpy(&word, from, here);
      }
      count -= here;
      std::uint64_t const both = word + (place += by_place);
      plain += word;
      placed += both * both;
    }
  }
  std::uint64_t fingerprint(std::size_t count) const {
    byte_fingerprint out;
    std::uint64_t const all[] = {plain, placed, count};
    out.add(all, sizeof all);
    return out.value();
  }
};

inline at::Tensor in_a_row(at::Tensor const& t) { return t.detach().resolve_conj().resolve_neg().contiguous().view(-1); }

/// Computes `word_sums` of a one-dimensional tensor on the tensor's device, piece by piece. \param piece 8-byte words per
/// piece; temporary memory has the size of a piece \returns `plain` and `placed`
inline at::Tensor sums_on_device(at::Tensor const& row, std::int64_t piece = std::int64_t{16} << 20) {
  at::Tensor bytes = (row.is_complex() ? at::view_as_real(row).view(-1) : row).view(at::kByte);
  if (std::int64_t const more = bytes.numel() % 8; more != 0) bytes = at::constant_pad_nd(bytes, {0, 8 - more});
  if (bytes.storage_offset() % 8 != 0) bytes = bytes.clone();
  at::Tensor const words = bytes.view(at::kLong);
  at::Tensor total = at::zeros({2}, words.options());
  for (std::int64_t from = 0; from < words.numel(); from += piece) {
    at::Tensor const some = words.narrow(0, from, std::min(piece, words.numel() - from));
    at::Tensor both = at::empty_like(some);  // allocated in full, since some devices cannot resize tensors
    at::arange_out(both, from + 1, from + some.numel() + 1, 1);
    both.mul_(static_cast<std::int64_t>(word_sums::by_place)).add_(some);
    total.add_(at::stack({some.sum(), both.mul_(both).sum()}));
  }
  return total;
}

}  // namespace detail

/// The fingerprint of each tensor's values; 0 for an undefined, a sparse or a meta tensor. The host waits once for all tensors
/// on an accelerator.
inline std::vector<std::uint64_t> fingerprints(std::span<at::Tensor const> values) {
  at::NoGradGuard const off;
  std::vector<std::uint64_t> out(values.size());
  std::vector<at::Tensor> on_device;
  std::vector<std::size_t> places;
  for (std::size_t i = 0; i < values.size(); ++i) {
    at::Tensor const& t = values[i];
    if (!t.defined() || t.layout() != at::kStrided || t.is_meta()) continue;
    at::Tensor const row = detail::in_a_row(t);
    detail::word_sums sums;
    if (row.is_cpu()) {
      sums.add(row.const_data_ptr(), row.nbytes());
      out[i] = sums.fingerprint(row.nbytes());
    } else {
      on_device.push_back(detail::sums_on_device(row));
      places.push_back(i);
    }
  }
  if (on_device.empty()) return out;
  at::Tensor const here = detail::host_copy(at::stack(on_device));
  for (std::size_t k = 0; k < places.size(); ++k) {
    auto const* const both = here.const_data_ptr<std::int64_t>() + 2 * k;
    detail::word_sums const sums{static_cast<std::uint64_t>(both[0]), static_cast<std::uint64_t>(both[1])};
    out[places[k]] = sums.fingerprint(values[places[k]].nbytes());
  }
  return out;
}

/// The fingerprint of one tensor.
inline std::uint64_t fingerprint(at::Tensor const& t) { return fingerprints(std::span(&t, 1)).front(); }

}  // namespace chevron
