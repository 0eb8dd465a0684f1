#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>

#include <chevron/run/comm/message_signature.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/core/tensors.hpp>

/// \file
/// Appends checksums to messages (`check_messages`), so that receivers detect corrupted messages.

namespace chevron::detail {

/// A fingerprint of a message's values, independent of strides and device. A change of a single bit always changes it.
/// \throws usage_error for a tensor that is not dense
inline byte_fingerprint checksum_of(tensors const& values) {
  byte_fingerprint all;
  for (at::Tensor const& value : values) {
    if (!value.defined()) continue;
    if (value.layout() != at::kStrided || value.is_nested())
      throw usage_error("check_messages needs dense tensors between stages. Remedy: .to_dense()");
    at::Tensor const dense = materialized(value).contiguous();
    all.add(dense.const_data_ptr(), dense.nbytes());
  }
  return all;
}

/// Appends the checksum of a message's tensors. Called by the sender.
inline void add_checksum(tensors& values) {
  values.push_back(at::full({1}, static_cast<std::int64_t>(checksum_of(values).value()), at::kLong));
}

/// Removes a message's checksum and compares it with the checksum of the received values. Called by the receiver.
/// \param where rank, peer, step and action of the message
/// \throws corrupt_message_error if the checksums differ
inline void take_checksum(tensors& values, error_context const& where) {
  auto const sent = static_cast<std::uint64_t>(values.back().item<std::int64_t>());
  values.pop_back();
  byte_fingerprint const came = checksum_of(values);
  if (came.value() == sent) return;
  throw corrupt_message_error("the received message is not the message that rank " + std::to_string(where.peer) +
                                  " sent: its checksum is " + came.text() + ", and the sender's was " + hexadecimal(sent) +
                                  ". Remedy: go on from the last checkpoint, and have the memory and the network of both "
                                  "machines examined",
                              where);
}

}  // namespace chevron::detail
