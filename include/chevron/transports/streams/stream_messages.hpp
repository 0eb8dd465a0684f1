#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/run/comm/message_signature.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/transports/message_agreement.hpp>
#include <chevron/transports/rendezvous.hpp>
#include <chevron/transports/streams/stream_channels.hpp>
#include <chevron/transports/streams/stream_monitor.hpp>

/// \file
/// Messages of `stream_transport`.

namespace chevron::detail {

/// Sends and receives messages over one channel for each directed edge. At a message's first transfer the sender passes shapes,
/// dtypes and strides through the store (message_agreement.hpp); the receiver enqueues that transfer when it needs the message.
template <class Streams>
class stream_messages {
 public:
  using milliseconds = std::chrono::milliseconds;

  stream_messages(Streams& streams, stream_monitor<Streams>& watch, stream_channels<Streams>& lines, rendezvous& meeting,
                  failure_monitor& failures, int rank)
      : streams_(streams), watch_(watch), lines_(lines), meeting_(meeting), rank_(rank), agreement_(failures, rank) {}

  /// Creates the channel to or from a peer, unless it exists, and sends an element over it, so that no later call connects.
  /// \param peer global rank \param sends whether this rank is the sender \param patience longest wait for the peer
  /// \param details this rank's counts and need, for other ranks
  void connect(int peer, bool sends, milliseconds patience, wait_details const& details) {
    auto& mine = sends ? outgoing_ : incoming_;
    if (mine.contains(peer)) return;
    int const from = sends ? rank_ : peer, to = sends ? peer : rank_;
    line made = lines_.make("edge from " + std::to_string(from) + " to " + std::to_string(to), channel_use::edge, sends ? 0 : 1,
                            2, patience, peer);
    at::Tensor const once[] = {at::zeros({1}, streams_.device())};
    point done(watch_);
    lines_.behind_computation(*made);
    awaited const first_use{.peer = peer, .words = "the first use of their channel"};
    {
      typename stream_monitor<Streams>::host_call const connecting(watch_, first_use);
      sends ? streams_.send(made->way, made->on, once) : streams_.receive(made->way, made->on, once);
    }
    done.record(made->on, first_use);
    lines_.wait_on_host(done, details);
    mine.emplace(peer, std::move(made));
  }

  // The functions of `transport` with the same names; `mine` describes the message.

  void open(slot_counts const& slots) {
    finish_first_sends();
    agreement_.open();
    late_.clear();
    sends_.clear();
    receives_.clear();
    for (int i = 0; i < slots.send; ++i) sends_.emplace_back().done = std::make_unique<point>(watch_);
    for (int i = 0; i < slots.receive; ++i) {
      incoming& slot = receives_.emplace_back();
      slot.computed = streams_.make_event();
      slot.arrived = std::make_unique<point>(watch_);
    }
  }
  /// Makes the rank's next computation wait for the sends of first transfers, so that it may reuse their memory.
  void finish_first_sends() {
    agreement_.finish_first_sends([&](outgoing& sent) { lines_.wait(*sent.done); });
  }

  void post_send(awaited const& mine, std::uint16_t send_slot, std::span<at::Tensor const> values) {
    lines_.check(mine);
    outgoing& slot = sends_.at(send_slot);
    slot.values.clear();
    for (at::Tensor const& value : values) slot.values.push_back(sendable(value, mine, streams_.device(), "this rank"));
    auto const tag = agreement_.tag(mine.what);
    terms const* const known = agreement_.known_for(tag, slot.values, mine);
    if (known == nullptr) {
      terms told{.shapes = shapes_of(slot.values), .strides = {}};
      strides_of(slot.values, false, told.strides);
      meeting_.publish(key_of(rank_, mine.peer, tag), told.text());
      agreement_.agree(tag, std::move(told));
    } else {
      replace_by_strides(slot.values, known->strides, with_strides);
    }
    for (at::Tensor& value : slot.values) value = packed(value);
    if (known == nullptr) agreement_.copy(slot.values);
    line const& to = outgoing_.at(mine.peer);
    lines_.behind_computation(*to);
    streams_.send(to->way, to->on, sent_of(slot.values));
    slot.done->record(to->on, mine);
    if (known == nullptr) agreement_.first_sent(std::exchange(slot, {.values = {}, .done = std::make_unique<point>(watch_)}));
  }

  void post_receive(awaited const& mine, std::uint16_t receive_slot) {
    lines_.check(mine);
    incoming& slot = receives_.at(receive_slot);
    slot.about = mine;
    slot.tag = agreement_.tag(mine.what);
    auto& queue = late_[mine.peer];
    terms const* const known = agreement_.known(slot.tag);
    if (known != nullptr) take_memory(slot, known->shapes);
    slot.late = late_receives_ || known == nullptr || !queue.empty();
    slot.late ? queue.push_back(receive_slot) : post(slot);
  }
  /// As in `transport`. `post_receive` still allocates the slot's memory, and orders the receive after earlier computation.
  void receive_late(bool late) { late_receives_ = late; }

  /// \param patience longest wait for the shapes from the sender
  std::span<at::Tensor> receive(std::uint16_t receive_slot, milliseconds patience) {
    incoming& slot = receives_.at(receive_slot);
    // Receives of an edge are enqueued in the order of their posts.
    while (slot.late) {
      auto& queue = late_.at(slot.about.peer);
      incoming& next = receives_.at(queue.front());
      if (agreement_.known(next.tag) == nullptr) {
        auto const told = meeting_.wait_for(key_of(next.about.peer, rank_, next.tag), next.about, patience);
        take_memory(next, agreement_.agree(next.tag, terms::of_text(told)).shapes);
      }
      post_next(queue);
    }
    lines_.wait(*slot.arrived);
    slot.given = slot.values;
    replace_by_strides(slot.given, agreement_.known(slot.tag)->strides, laid_out);
    return slot.given;
  }

  void wait_send(std::uint16_t send_slot) {
    outgoing& slot = sends_.at(send_slot);
    if (slot.values.empty()) return;  // a first transfer: `finish_first_sends` waits for it
    lines_.wait(*slot.done);
    slot.values.clear();
  }

 private:
  using point = typename stream_monitor<Streams>::point;
  using line = typename stream_channels<Streams>::line;

  struct outgoing {
    std::vector<at::Tensor> values;
    std::unique_ptr<point> done;
  };
  struct incoming {
    awaited about{};
    std::uint32_t tag = 0;
    bool late = false;  ///< not enqueued yet: shapes of this or an earlier receive are unknown, or receives are late
    std::vector<at::Tensor> values, given;
    typename Streams::event computed;  ///< end of the rank's computation before the slot's memory was allocated
    std::unique_ptr<point> arrived;
  };
  /// A message's shapes and strides. The sender copies later tensors to the strides of the first transfer, since a receiver's
  /// computation must not wait until its host knows new strides. Expanded tensors arrive with memory for each element, since
  /// later tensors may not be expanded.
  struct terms {
    message_shapes shapes;
    message_strides strides;

    std::string text() const {
      std::vector<std::int64_t> all = shapes;
      all.insert(all.end(), strides.begin(), strides.end());
      std::string out(all.size() * sizeof(std::int64_t), '\0');
      std::memcpy(out.data(), all.data(), out.size());
      return out;
    }
    static terms of_text(std::string const& text) {
      std::vector<std::int64_t> all(text.size() / sizeof(std::int64_t));
      std::memcpy(all.data(), text.data(), all.size() * sizeof(std::int64_t));
      auto const end = all.begin() + all.at(0);
      return {{all.begin(), end}, {end, all.end()}};
    }
  };

  void take_memory(incoming& slot, message_shapes const& shapes) {
    slot.given.clear();
    make_room(slot.values, shapes, streams_.device());
    streams_.record(slot.computed);
  }
  /// Enqueues the first of a peer's late receives; its slot's memory must be allocated.
  void post_next(std::deque<std::uint16_t>& queue) {
    incoming& next = receives_.at(queue.front());
    queue.pop_front();
    next.late = false;
    post(next);
  }
  void post(incoming& slot) {
    line const& from = incoming_.at(slot.about.peer);
    streams_.wait(from->on, slot.computed);
    streams_.receive(from->way, from->on, sent_of(slot.values));
    slot.arrived->record(from->on, slot.about);
  }

  /// The memory of a message's non-empty tensors, as one-dimensional tensors.
  std::span<at::Tensor const> sent_of(std::vector<at::Tensor> const& values) {
    scratch_.clear();
    for (at::Tensor const& value : values) {
      if (value.defined() && value.numel() > 0) scratch_.push_back(as_row(value));
    }
    return scratch_;
  }

  std::string key_of(int from, int to, std::uint32_t tag) const {
    return "shapes" + std::to_string(agreement_.turn()) + "/" + std::to_string(from) + "/" + std::to_string(to) + "/" +
           std::to_string(tag);
  }

  Streams& streams_;
  stream_monitor<Streams>& watch_;
  stream_channels<Streams>& lines_;
  rendezvous& meeting_;
  int rank_;
  message_agreement<terms, outgoing> agreement_;
  std::map<int, line> outgoing_, incoming_;        // key: peer
  std::map<int, std::deque<std::uint16_t>> late_;  // key: peer; receives to be enqueued, in order
  bool late_receives_ = false;
  std::vector<outgoing> sends_;
  std::vector<incoming> receives_;
  std::vector<at::Tensor> scratch_;
};

}  // namespace chevron::detail
