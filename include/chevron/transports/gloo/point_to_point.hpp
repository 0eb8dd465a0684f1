#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/run/comm/message_signature.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/transports/gloo/bounded_wait.hpp>
#include <chevron/transports/gloo/process_group.hpp>
#include <chevron/transports/gloo/shared_memory_channel.hpp>
#include <chevron/transports/message_agreement.hpp>

/// \file
/// Messages of `gloo_transport`.

namespace chevron::detail {

/// Sends and receives messages over Gloo, and between ranks of one machine through shared memory.
///
/// Gloo does not check messages: it aborts the process if a receive buffer is too small, fills only a part of a buffer that is
/// too large, and does not compare dtypes. So a header with the message's shapes and dtypes, which both sides store, precedes
/// the first transfer of each message (direction, stage, microbatch; message_agreement.hpp). Every message has its own tag, so
/// that a receive never gets a different message. Within one machine the header also has the offset at which a message of up to
/// 1 MiB goes through shared memory from its second transfer on (shared_memory_channel.hpp).
class point_to_point {
 public:
  /// \param world  connections for messages; first used by the first message, and alive until `clear`
  point_to_point(topology const& where, gloo_group const& world, bounded_wait& waits, failure_monitor& watch)
      : topology_(where), world_(world), waits_(waits), watch_(watch), agreement_(watch, where.global_rank) {}

  /// Sends later messages through shared memory, if possible.
  void share(shared_memory& memory) { shared_memory_ = std::make_unique<shared_memory_channel>(memory, topology_, waits_); }

  // The functions of `transport` with the same names; `mine` describes the message.

  void open(slot_counts const& slots, long step) {
    finish_first_sends();
    if (shared_memory_ != nullptr) shared_memory_->forget(step);
    agreement_.open();
    clear();
    sends_.resize(static_cast<std::size_t>(slots.send));
    receives_.resize(static_cast<std::size_t>(slots.receive));
  }
  void finish_first_sends() {
    agreement_.finish_first_sends([&](outgoing& sent) { wait_for(sent); });
  }
  /// Releases all slots.
  void clear() {
    sends_.clear();
    receives_.clear();
  }

  void post_send(awaited const& mine, std::uint16_t send_slot, std::span<at::Tensor const> values) {
    watch_.throw_if_failed(mine);
    auto& slot = sends_.at(send_slot);
    slot.about = mine;
    slot.works.clear();
    slot.values.clear();
    for (auto const& value : values) slot.values.push_back(sendable(value, mine, at::kCPU, "Gloo"));
    auto const tag = agreement_.tag(mine.what);
    terms* const known = agreement_.known_for(tag, slot.values, mine);
    strides_of(slot.values, true, strides_);
    for (auto& value : slot.values) value = packed(value);
    if (known != nullptr && known->near.place != nullptr) {
      shared_memory_->hand_over(known->near, strides_, slot.values, mine, [&] { drain_arrived(); });
      slot.values.clear();
      return;
    }
    if (known == nullptr) {
      agreement_.copy(slot.values);
      send_header(slot, tag);
    }
    send_numbers(slot, strides_, tag);
    for (std::size_t i = 0; i < slot.values.size(); ++i) send(slot, slot.values[i], tag, i + 1);
    if (known == nullptr) agreement_.first_sent(std::exchange(slot, {}));
  }

  void post_receive(awaited const& mine, std::uint16_t receive_slot) {
    watch_.throw_if_failed(mine);
    auto& slot = receives_.at(receive_slot);
    slot.about = mine;
    slot.tag = agreement_.tag(mine.what);
    slot.works.clear();
    slot.comes = nullptr;
    terms* const known = agreement_.known(slot.tag);
    slot.header_comes = known == nullptr;
    if (slot.header_comes) {
      slot.header = at::empty({header_words + 1}, at::kLong);
      slot.header_work = post_one(slot.about, slot.header, slot.tag, 0);
    } else if (known->near.place != nullptr) {
      slot.comes = known;
      slot.number = ++known->near.count;
    } else {
      post_values(slot, known->shapes);
    }
  }

  std::span<at::Tensor> receive(std::uint16_t receive_slot) {
    auto& slot = receives_.at(receive_slot);
    if (slot.header_comes) {
      waits_.work(*slot.header_work, slot.about);
      auto const* words = slot.header.data_ptr<std::int64_t>();
      message_shapes shapes(words, words + std::min<std::int64_t>(words[0], header_words));
      if (words[0] > header_words) {
        auto rest = at::empty({words[0] - header_words}, at::kLong);
        waits_.work(*post_one(slot.about, rest, slot.tag, 0), slot.about);
        shapes.insert(shapes.end(), rest.data_ptr<std::int64_t>(), rest.data_ptr<std::int64_t>() + rest.numel());
      }
      std::int64_t const place = words[header_words];
      slot.header_comes = false;
      slot.header_work.reset();
      post_values(slot, shapes);
      terms told{.shapes = std::move(shapes)};
      if (shared_memory_ != nullptr)
        told.near = shared_memory_->from(slot.about.peer, strides_in(told.shapes), slot.values, place);
      agreement_.agree(slot.tag, std::move(told));
    }
    if (slot.comes != nullptr) {
      shared_memory_->wait_for(slot.comes->near, slot.number, slot.about);
      take(slot);
    }
    for (auto& work : slot.works) waits_.work(*work, slot.about);
    slot.works.clear();
    if (slot.sent_strides.defined()) {
      auto const* const numbers = slot.sent_strides.const_data_ptr<std::int64_t>();
      slot.strides.assign(numbers, numbers + slot.sent_strides.numel());
      slot.sent_strides.reset();
    }
    replace_by_strides(slot.values, slot.strides, laid_out);
    return slot.values;
  }

  void wait_send(std::uint16_t send_slot) {
    auto& slot = sends_.at(send_slot);
    wait_for(slot);
    slot.works.clear();
    slot.values.clear();
    slot.headers.clear();
  }

 private:
  using work_ptr = bounded_wait::work_ptr;

  static constexpr std::int64_t header_words = 64;

  /// The shapes and path of a message, known to both sides from the message's first transfer on.
  struct terms {
    message_shapes shapes;
    shared_slot near{};
  };
  struct outgoing {
    awaited about;
    std::vector<work_ptr> works;
    std::vector<at::Tensor> values;
    std::vector<at::Tensor> headers;
  };
  struct incoming {
    awaited about;
    std::uint32_t tag = 0;
    bool header_comes = false;
    at::Tensor header;
    work_ptr header_work;
    terms const* comes = nullptr;  // the message in shared memory whose transfer `number` is awaited; null: none
    std::uint64_t number = 0;
    at::Tensor sent_strides;  // strides under way over Gloo
    message_strides strides;
    std::vector<work_ptr> works;
    std::vector<at::Tensor> values;
  };

  void wait_for(outgoing& sent) {
    for (auto& work : sent.works) waits_.work(*work, sent.about);
  }

  /// Called by the sender: decides the path of a message from its second transfer on, and sends the message's header.
  void send_header(outgoing& slot, std::uint32_t tag) {
    terms made{.shapes = shapes_of(slot.values)};
    if (shared_memory_ != nullptr) made.near = shared_memory_->to(slot.about.peer, strides_in(made.shapes), slot.values);
    terms const& agreed = agreement_.agree(tag, std::move(made));
    auto const& shapes = agreed.shapes;
    auto first_part = at::zeros({header_words + 1}, at::kLong);
    first_part.data_ptr<std::int64_t>()[header_words] = shared_memory_ != nullptr ? shared_memory_->place_of(agreed.near) : 0;
    auto const first_count = std::min<std::int64_t>(shapes[0], header_words);
    std::copy_n(shapes.begin(), first_count, first_part.data_ptr<std::int64_t>());
    slot.headers = {first_part};
    send(slot, first_part, tag, 0);
    send_numbers(slot, std::span(shapes).subspan(static_cast<std::size_t>(first_count)), tag);
  }

  /// Sends numbers with the header's tag; if a header is sent, after it.
  void send_numbers(outgoing& slot, std::span<std::int64_t const> numbers, std::uint32_t tag) {
    if (numbers.empty()) return;
    at::Tensor all = at::empty({static_cast<std::int64_t>(numbers.size())}, at::kLong);
    std::copy(numbers.begin(), numbers.end(), all.mutable_data_ptr<std::int64_t>());
    slot.headers.push_back(all);
    send(slot, all, tag, 0);
  }

  void send(outgoing& slot, at::Tensor& value, std::uint32_t tag, std::size_t index) {
    if (!value.defined() || value.numel() == 0) return;
    std::vector<at::Tensor> list{as_row(value)};
    slot.works.push_back(
        waits_.posting(slot.about, [&] { return world_->send(list, slot.about.peer, tag_of_tensor(tag, index)); }));
  }

  work_ptr post_one(awaited const& about, at::Tensor& value, std::uint32_t tag, std::size_t index) {
    std::vector<at::Tensor> list{as_row(value)};
    return waits_.posting(about, [&] { return world_->recv(list, about.peer, tag_of_tensor(tag, index)); });
  }

  void post_values(incoming& slot, message_shapes const& shapes) {
    make_room(slot.values, shapes, at::kCPU);
    if (auto const count = static_cast<std::int64_t>(strides_in(shapes)); count > 0) {
      slot.sent_strides = at::empty({count}, at::kLong);
      slot.works.push_back(post_one(slot.about, slot.sent_strides, slot.tag, 0));
    } else {
      slot.strides.clear();
    }
    for (std::size_t i = 0; i < slot.values.size(); ++i) {
      at::Tensor& value = slot.values[i];
      if (value.defined() && value.numel() > 0) slot.works.push_back(post_one(slot.about, value, slot.tag, i + 1));
    }
  }

  void take(incoming& slot) {
    auto const& agreed = *std::exchange(slot.comes, nullptr);
    make_room(slot.values, agreed.shapes, at::kCPU);
    shared_memory_->take(agreed.near, slot.number, slot.about.peer, slot.strides, slot.values);
  }
  void drain_arrived() {
    for (auto& slot : receives_) {
      if (slot.comes != nullptr && shared_memory_channel::has_come(slot.comes->near, slot.number)) take(slot);
    }
  }

  topology topology_;
  gloo_group const& world_;
  bounded_wait& waits_;
  failure_monitor& watch_;
  std::unique_ptr<shared_memory_channel> shared_memory_;  // null: all messages go over Gloo

  message_agreement<terms, outgoing> agreement_;
  std::vector<outgoing> sends_;
  std::vector<incoming> receives_;
  message_strides strides_;  // strides of the message being sent
};

}  // namespace chevron::detail
