#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <chevron/plan/action.hpp>
#include <chevron/run/error.hpp>
#include <chevron/run/failure.hpp>
#include <chevron/run/watch.hpp>

/// \file
/// What transports between processes say of a message: its tag, and the shapes and dtypes both sides agree on.

namespace chevron::detail {

/// [numbers in all, tensors, then for each: dtype, dimensions, sizes…]: what both sides of a message keep of its first time.
using message_shapes = std::vector<std::int64_t>;

/// No message has this tag: microbatches stay below 65535.
inline constexpr int never_sent = 0x7fffffff;

/// One number a message of this pair of ranks, equal on both sides: direction, producing stage, microbatch; the three low bits
/// are for the turn and the tensors.
inline std::uint32_t tag_of(action what) {
  auto stage = static_cast<std::uint32_t>(what.stage);
  std::uint32_t direction = 0;
  switch (what.what) {
    case kind::send_forward:
      break;
    case kind::receive_forward:
      stage -= 1;
      break;
    case kind::send_backward:
      direction = 1;
      break;
    case kind::receive_backward:
      direction = 1, stage += 1;
      break;
    default:
      throw usage_error(to_text(what).str() + " is neither a send nor a receive");
  }
  return (direction << 30) | ((stage & 0x7ffu) << 19) | (static_cast<std::uint32_t>(what.micro_batch) << 3);
}

/// How often shapes were agreed anew, odd or even: a rank that missed it (it was given another batch) waits for a message that does not
/// come, and never takes tensors of other shapes for its own.
inline std::uint32_t tag_in_turn(std::uint32_t tag, unsigned turn) { return tag | (turn & 1u) << 2; }

// 0 is the header, 1 and 2 the first tensors; Gloo keeps the order of what shares a tag, here the third and all after it.
inline int tag_of_tensor(std::uint32_t tag, std::size_t index) {
  return static_cast<int>(tag | static_cast<std::uint32_t>(std::min<std::size_t>(index, 3)));
}

/// Dense, contiguous, on the device `here`; the caller's own memory whenever it is so already. An undefined tensor stays one.
/// \param who the transport, for its error
inline at::Tensor sendable(at::Tensor const& value, awaited const& mine, at::Device here, char const* who) {
  if (!value.defined()) return value;
  if (value.device() != here || value.layout() != at::kStrided) {
    throw usage_error(mine.action_text() + ": " + who + " sends dense tensors " +
                      (here.is_cpu() ? "in main memory" : "on " + here.str()) + ", not " +
                      (value.device() == here ? "a sparse one" : "one on " + value.device().str()) + ". Remedy: " +
                      (here.is_cpu() ? ".cpu()" : ".to() that device") + ", or another transport");
  }
  if (!value.requires_grad() && value.is_contiguous()) return value;
  return value.detach().contiguous();
}

inline message_shapes shapes_of(std::vector<at::Tensor> const& values) {
  message_shapes out{0, static_cast<std::int64_t>(values.size())};
  for (auto const& value : values) {
    out.push_back(static_cast<std::int64_t>(value.scalar_type()));  // Undefined is one, too
    out.push_back(value.defined() ? value.dim() : 0);
    if (value.defined()) out.insert(out.end(), value.sizes().begin(), value.sizes().end());
  }
  out[0] = static_cast<std::int64_t>(out.size());
  return out;
}

/// Memory on the device `here` for a message of these shapes, in what `values` has as far as it will do.
inline void make_room(std::vector<at::Tensor>& values, message_shapes const& shapes, at::Device here) {
  values.resize(static_cast<std::size_t>(shapes[1]));
  std::size_t at = 2;
  for (at::Tensor& value : values) {
    auto const type = static_cast<at::ScalarType>(shapes[at]);
    at::IntArrayRef const sizes(shapes.data() + at + 2, static_cast<std::size_t>(shapes[at + 1]));
    at += 2 + sizes.size();
    if (type == at::ScalarType::Undefined) {
      value = at::Tensor();
      continue;
    }
    // Memory that the caller still holds (a graph does) is not written again.
    bool const reusable = value.defined() && value.use_count() == 1 && value.storage().use_count() == 1 &&
                          value.scalar_type() == type && value.sizes() == sizes;
    if (!reusable) value = at::empty(sizes, at::TensorOptions().dtype(type).device(here));
  }
}

inline bool fits(std::vector<at::Tensor> const& values, message_shapes const& shapes) {
  if (shapes[1] != static_cast<std::int64_t>(values.size())) return false;
  std::size_t at = 2;
  for (auto const& value : values) {
    if (shapes[at] != static_cast<std::int64_t>(value.scalar_type())) return false;
    if (shapes[at + 1] != (value.defined() ? value.dim() : 0)) return false;
    at += 2;
    if (!value.defined()) continue;
    if (!std::equal(value.sizes().begin(), value.sizes().end(), shapes.begin() + static_cast<std::ptrdiff_t>(at))) return false;
    at += value.sizes().size();
  }
  return true;
}

/// For people: `Float[2,8], no tensor, Long[2]`.
inline std::string text_of(message_shapes const& shapes) {
  std::string out;
  std::size_t at = 2;
  for (std::int64_t i = 0; i < shapes[1]; ++i) {
    auto const type = static_cast<at::ScalarType>(shapes[at]);
    auto const dimensions = shapes[at + 1];
    at += 2;
    out += i == 0 ? "" : ", ";
    if (type == at::ScalarType::Undefined) {
      out += "no tensor";
      continue;
    }
    out += std::string(c10::toString(type)) + "[";
    for (std::int64_t d = 0; d < dimensions; ++d) out += (d == 0 ? "" : ",") + std::to_string(shapes[at++]);
    out += "]";
  }
  return out.empty() ? "nothing" : out;
}

/// A sender whose tensors are no longer those that both sides agreed on tells everybody, and throws.
[[noreturn]] inline void refuse_shapes(failure_watch& watch, awaited const& mine, int rank, message_shapes const& agreed,
                                       message_shapes const& actual) {
  std::string const sentence = text_of(actual) + " to rank " + std::to_string(mine.peer) + ", but the first step agreed on " +
                               text_of(agreed) + ". Remedy: keep the shapes of each microbatch, or open the executor anew";
  auto const first =
      watch.report({.code = static_cast<int>(exit_code::preflight),
                    .rank = rank,
                    .step = mine.step,
                    .action = mine.action_text(),
                    .reason = "rank " + std::to_string(rank) + " would send in " + mine.action_text() + ": " + sentence});
  if (first.rank != rank) throw_failure(first, mine, rank);
  throw preflight_error("would send " + sentence, {.rank = rank, .peer = mine.peer, .step = mine.step, .action = mine.action_text()});
}

}  // namespace chevron::detail
