#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>

#include <ATen/core/Tensor.h>

#include <chevron/run/comm/message_signature.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/transports/gloo/bounded_wait.hpp>
#include <chevron/transports/shared_memory/shared_memory.hpp>

/// \file
/// Messages between ranks of one machine, through shared memory.

namespace chevron::detail {

/// The state, on the sender or on the receiver, of a message that is sent in every step.
struct shared_slot {
  std::size_t strides = 0;          // number of strides that precede the tensors' elements
  std::size_t bytes = 0;            // bytes of strides and elements
  shared_message* place = nullptr;  // null: the message goes over Gloo
  std::uint64_t count = 0;          // transfers so far; on a receiver, receives posted so far
};

/// Sends messages of up to 1 MiB through shared memory: the sender copies a message into its file, and the receiver copies it
/// from there. For each message the sender may be two transfers ahead of the receiver.
class shared_memory_channel {
 public:
  shared_memory_channel(shared_memory& memory, topology const& where, bounded_wait& waits)
      : memory_(memory), where_(where), waits_(waits) {}

  /// Decides, on the sender, whether a message of tensors of these sizes goes through shared memory from its second transfer on.
  /// \param strides the number of strides that are sent with the tensors
  /// \returns the slot; its `place` is null for a message over Gloo
  shared_slot to(int peer, std::size_t strides, std::span<at::Tensor const> values) {
    shared_slot out{.strides = strides, .bytes = bytes_of(strides, values)};
    if (memory_.shares_memory_with(peer) && out.bytes <= shared_memory::largest_message) out.place = memory_.new_message();
    return out;
  }
  /// The message's offset in the sender's memory, for the receiver; 0 for a message over Gloo.
  std::int64_t place_of(shared_slot const& message) const {
    return message.place == nullptr ? 0 : memory_.offset_of(*message.place);
  }
  /// Returns the receiver's slot of a message.
  /// \param place the offset that the sender's `place_of` returned; 0 for a message over Gloo
  shared_slot from(int peer, std::size_t strides, std::span<at::Tensor const> values, std::int64_t place) const {
    shared_slot out{.strides = strides, .bytes = bytes_of(strides, values)};
    if (place != 0) out.place = memory_.message_of(peer, static_cast<std::uint64_t>(place));
    return out;
  }

  /// Sends a message. Waits only if the receiver has not taken the last two transfers, or if 256 MiB of messages are not taken
  /// yet. During a wait, `drain_arrived()` takes messages sent to this rank, since their senders may also wait for room.
  template <class TakeWhatCame>
  void hand_over(shared_slot& message, message_strides const& strides, std::span<at::Tensor const> values, awaited const& mine,
                 TakeWhatCame const& drain_arrived) {
    shared_message& place = *message.place;
    auto const number = ++message.count;
    shared_memory::block* room = nullptr;
    auto const is_room = [&] { return read(place.taken) + 2 >= number && (room = memory_.free_block(message.bytes)) != nullptr; };
    waits_.memory(memory_, mine, [&] {
      if (is_room()) return true;
      drain_arrived();
      return is_room();
    });
    std::byte* to = memory_.at(where_.global_rank, room->offset);
    if (!strides.empty()) std::memcpy(to, strides.data(), strides.size() * sizeof(std::int64_t));
    to += strides.size() * sizeof(std::int64_t);
    for (at::Tensor const& value : values) {
      if (!value.defined() || value.numel() == 0) continue;
      std::memcpy(to, value.const_data_ptr(), value.nbytes());
      to += value.nbytes();
    }
    room->message = &place;
    room->number = number;
    place.offset[number % 2] = room->offset;
    publish(place.sent, number);
    memory_.notify(mine.peer);
  }

  static bool has_come(shared_slot const& message, std::uint64_t number) { return read(message.place->sent) >= number; }
  void wait_for(shared_slot const& message, std::uint64_t number, awaited const& mine) {
    waits_.memory(memory_, mine, [&] { return has_come(message, number); });
  }
  /// Copies a received message into `strides` and `values`, tensors of the message's shapes. \param number the transfer's
  /// number, from 1
  void take(shared_slot const& message, std::uint64_t number, int peer, message_strides& strides,
            std::span<at::Tensor const> values) {
    std::byte const* from = memory_.at(peer, message.place->offset[number % 2]);
    strides.resize(message.strides);
    if (!strides.empty()) std::memcpy(strides.data(), from, strides.size() * sizeof(std::int64_t));
    from += strides.size() * sizeof(std::int64_t);
    for (at::Tensor const& value : values) {
      if (!value.defined() || value.numel() == 0) continue;
      std::memcpy(value.mutable_data_ptr(), from, value.nbytes());
      from += value.nbytes();
    }
    publish(message.place->taken, number);
    memory_.notify(peer);
  }

  /// Waits until the receivers have taken all messages, then frees the messages' memory for other messages.
  void forget(long step) {
    waits_.memory(memory_, {.words = "the receivers to take sent messages", .step = step}, [&] { return memory_.all_taken(); });
    memory_.start_anew();
  }

 private:
  static std::size_t bytes_of(std::size_t strides, std::span<at::Tensor const> values) {
    return std::accumulate(values.begin(), values.end(), strides * sizeof(std::int64_t),
                           [](std::size_t sum, at::Tensor const& value) { return sum + (value.defined() ? value.nbytes() : 0); });
  }

  shared_memory& memory_;
  topology where_;
  bounded_wait& waits_;
};

}  // namespace chevron::detail
