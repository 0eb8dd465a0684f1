#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <chevron/plan/action.hpp>
#include <chevron/run/comm/tensor_strides.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>

/// \file
/// The identity of a message in transports between processes: its tag, and the shapes and dtypes that both sides agree on.

namespace chevron::detail {

/// The shapes and dtypes of a message, stored by both sides: [length of this list, number of tensors, then for each tensor:
/// dtype, number of dimensions, sizes].
using message_shapes = std::vector<std::int64_t>;

/// A tag that no message has, since microbatch numbers are below 65535.
inline constexpr int never_sent = 0x7fffffff;

/// A number that identifies a message between two ranks, equal on both sides: direction, producing stage, microbatch. The three
/// low bits are free for the turn and the tensor's index.
/// \param what a SEND or RECV action
inline std::uint32_t tag_of(action what) {
  auto stage = static_cast<std::uint32_t>(what.stage);
  std::uint32_t direction = 0;
  switch (what.kind) {
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

/// Adds the parity of the turn (the number of `open` calls) to a tag. A rank that missed an `open` then waits for a message
/// that no rank sends, instead of receiving a message with other shapes.
inline std::uint32_t tag_in_turn(std::uint32_t tag, unsigned turn) { return tag | (turn & 1u) << 2; }

// The tag of one part of a message: index 0 is the header, 1 and 2 are the first two tensors. The third and all later tensors
// have one tag: Gloo delivers parts with equal tags in order.
inline int tag_of_tensor(std::uint32_t tag, std::size_t index) {
  return static_cast<int>(tag | static_cast<std::uint32_t>(std::min<std::size_t>(index, 3)));
}

/// A tensor with its values in memory: resolves conjugate, negative and zero bits.
inline at::Tensor materialized(at::Tensor const& value) {
  if (value._is_zerotensor()) return at::zeros(value.sizes(), value.options());
  bool const as_it_is = !value.requires_grad() && !value.is_conj() && !value.is_neg();
  return as_it_is ? value : value.detach().resolve_conj().resolve_neg();
}

/// Prepares a tensor for sending: checks that it is on the device `here`, and resolves its values in memory. An undefined
/// tensor is returned unchanged.
/// \param who the transport's name, for the error
/// \throws usage_error for a tensor on another device, a sparse tensor or a nested tensor
inline at::Tensor sendable(at::Tensor const& value, awaited const& mine, at::Device here, char const* who) {
  if (!value.defined()) return value;
  if (value.device() != here || value.layout() != at::kStrided || value.is_nested()) {
    throw usage_error(mine.action_text() + ": " + who + " sends dense tensors " +
                      (here.is_cpu() ? "in main memory" : "on " + here.str()) + ", not " +
                      (value.device() != here ? "one on " + value.device().str()
                       : value.is_nested()    ? "a nested one"
                                              : "a sparse one") +
                      ". Remedy: " + (here.is_cpu() ? ".cpu()" : ".to() that device") + ", or another transport");
  }
  return materialized(value);
}

inline message_shapes shapes_of(std::vector<at::Tensor> const& values) {
  message_shapes out{0, static_cast<std::int64_t>(values.size())};
  for (auto const& value : values) {
    out.push_back(static_cast<std::int64_t>(value.scalar_type()));  // an undefined tensor has the dtype Undefined
    out.push_back(value.defined() ? value.dim() : 0);
    if (value.defined()) out.insert(out.end(), value.sizes().begin(), value.sizes().end());
  }
  out[0] = static_cast<std::int64_t>(out.size());
  return out;
}

/// The strides of all tensors of a message, concatenated. Unlike shapes, strides may change from step to step: the zero
/// gradient of a microbatch with weight 0 may have other strides than a computed gradient.
using message_strides = std::vector<std::int64_t>;

/// Writes to `out` the strides that a message's tensors have at the receiver. \param expanded see `told_strides`
inline void strides_of(std::vector<at::Tensor> const& values, bool expanded, message_strides& out) {
  out.clear();
  for (auto const& value : values) {
    if (!value.defined()) continue;
    auto const strides = told_strides(value, expanded);
    out.insert(out.end(), strides.begin(), strides.end());
  }
}

/// The dtype and sizes of one tensor of a message.
struct told_tensor {
  at::ScalarType type = at::ScalarType::Undefined;
  at::IntArrayRef sizes;
};

/// Calls `see(i, told)` for each tensor of a message; i counts from 0.
template <class See>
void for_each_told(message_shapes const& shapes, See const& see) {
  std::size_t at = 2;
  for (std::int64_t i = 0; i < shapes[1]; ++i) {
    auto const dimensions = static_cast<std::size_t>(shapes[at + 1]);
    see(static_cast<std::size_t>(i), told_tensor{static_cast<at::ScalarType>(shapes[at]), {shapes.data() + at + 2, dimensions}});
    at += 2 + dimensions;
  }
}

/// The number of strides of all tensors in a message of these shapes.
inline std::size_t strides_in(message_shapes const& shapes) {
  std::size_t count = 0;
  for_each_told(shapes, [&](std::size_t, told_tensor const& told) { count += told.sizes.size(); });
  return count;
}

/// Allocates tensors on the device `here` for a message of these shapes; reuses tensors in `values` that fit.
inline void make_room(std::vector<at::Tensor>& values, message_shapes const& shapes, at::Device here) {
  values.resize(static_cast<std::size_t>(shapes[1]));
  for_each_told(shapes, [&](std::size_t i, told_tensor const& told) {
    at::Tensor& value = values[i];
    if (told.type == at::ScalarType::Undefined) {
      value = at::Tensor();
      return;
    }
    // Memory that the caller still uses (for example in an autograd graph) must not be overwritten.
    bool const reusable = value.defined() && value.use_count() == 1 && value.storage().use_count() == 1 &&
                          value.scalar_type() == told.type && value.sizes() == told.sizes && value.is_contiguous();
    if (!reusable) value = at::empty(told.sizes, at::TensorOptions().dtype(told.type).device(here));
  });
}

/// Replaces each tensor of a message by `made(tensor, strides of the tensor)`: the receiver passes `laid_out`, the sender
/// `with_strides`.
template <class Make>
void replace_by_strides(std::vector<at::Tensor>& values, message_strides const& strides, Make const& made) {
  std::size_t at = 0;
  for (at::Tensor& value : values) {
    if (!value.defined()) continue;
    auto const dimensions = static_cast<std::size_t>(value.dim());
    value = made(value, at::IntArrayRef(strides.data() + at, dimensions));
    at += dimensions;
  }
}

inline bool fits(std::vector<at::Tensor> const& values, message_shapes const& shapes) {
  if (shapes[1] != static_cast<std::int64_t>(values.size())) return false;
  bool all = true;
  for_each_told(shapes, [&](std::size_t i, told_tensor const& told) {
    at::Tensor const& value = values[i];
    all = all && value.scalar_type() == told.type && (!value.defined() || value.sizes() == told.sizes);
  });
  return all;
}

/// Shapes and dtypes as errors print them: `Float[2,8], no tensor, Long[2]`.
inline std::string text_of(message_shapes const& shapes) {
  std::string out;
  for_each_told(shapes, [&](std::size_t i, told_tensor const& told) {
    out += i == 0 ? "" : ", ";
    if (told.type == at::ScalarType::Undefined) {
      out += "no tensor";
      return;
    }
    out += std::string(c10::toString(told.type)) + "[";
    for (std::size_t d = 0; d < told.sizes.size(); ++d) out += (d == 0 ? "" : ",") + std::to_string(told.sizes[d]);
    out += "]";
  });
  return out.empty() ? "nothing" : out;
}

/// Publishes that a sender's tensors differ from the agreed shapes, and throws.
/// \param tell called as tell(failure): publishes the failure, and returns the failure that any rank published first
/// \throws preflight_error, or the error of another rank's failure if that was published first
template <class Tell>
[[noreturn]] void refuse_shapes(Tell const& tell, awaited const& mine, int rank, message_shapes const& agreed,
                                message_shapes const& actual) {
  preflight_error const found("would send " + text_of(actual) + " to rank " + std::to_string(mine.peer) +
                                  ", but the first step agreed on " + text_of(agreed) +
                                  ". Remedy: a stage whose outputs' shapes follow from the batch's shapes alone; a tensor whose "
                                  "size depends on values is padded to one size, and sent with a mask",
                              {.rank = rank, .peer = mine.peer, .step = mine.step, .action = mine.action_text()});
  failure const first = tell(failure_by(rank, found));
  if (first.rank != rank) throw_failure(first, mine, rank);
  throw found;
}

}  // namespace chevron::detail
