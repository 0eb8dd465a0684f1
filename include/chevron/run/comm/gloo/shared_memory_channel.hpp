#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/comm/gloo/bounded_wait.hpp>
#include <chevron/run/comm/message_signature.hpp>
#include <chevron/run/comm/shared_memory/shared_memory.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/failure/failure.hpp>

/// \file
/// Messages between ranks of one machine, in the memory they share.

namespace chevron::detail {

/// A message that comes again, as one of its two ranks knows it.
struct shared_slot {
  std::size_t strides = 0;          // how many numbers stand before the tensors' elements
  std::size_t bytes = 0;            // of all
  shared_message* place = nullptr;  // null: it goes another way
  std::uint64_t count = 0;          // how often it went, or was to come
};

/// A message of up to 1 MiB is copied into the sender's memory, and out of it by the receiver; of each a sender may be two ahead.
class shared_memory_channel {
 public:
  shared_memory_channel(shared_memory& memory, topology const& where, bounded_wait& waits)
      : memory_(memory), where_(where), waits_(waits) {}

  /// As the sender: decides whether a message of tensors of these sizes goes this way from its second time on, and where.
  shared_slot to(int peer, std::size_t strides, std::span<at::Tensor const> values) {
    shared_slot out{.strides = strides, .bytes = bytes_of(strides, values)};
    if (memory_.shares_memory_with(peer) && out.bytes <= shared_memory::largest_message) out.place = memory_.new_message();
    return out;
  }
  /// For the receiver; 0 for a message that goes another way.
  std::int64_t place_of(shared_slot const& message) const {
    return message.place == nullptr ? 0 : memory_.offset_of(*message.place);
  }
  /// As the receiver, told the place.
  shared_slot from(int peer, std::size_t strides, std::span<at::Tensor const> values, std::int64_t place) const {
    shared_slot out{.strides = strides, .bytes = bytes_of(strides, values)};
    if (place != 0) out.place = memory_.message_of(peer, static_cast<std::uint64_t>(place));
    return out;
  }

  /// Sends. Waits only if the receiver is two whole steps behind, or 256 MiB of messages wait to be taken; then
  /// `take_what_came()` is called: another may wait for the same, from us.
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
  /// Copies what has come into tensors of its shapes.
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

  /// Before other messages get the memory of these: waits until all have been taken.
  void forget(long step) {
    waits_.memory(memory_, {.words = "the others to take what was sent", .step = step}, [&] { return memory_.all_taken(); });
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
