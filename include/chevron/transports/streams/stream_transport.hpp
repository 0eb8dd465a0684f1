#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/lower/edges.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/wait_table.hpp>
#include <chevron/transports/rendezvous.hpp>
#include <chevron/transports/streams/stream_channels.hpp>
#include <chevron/transports/streams/stream_messages.hpp>
#include <chevron/transports/streams/stream_monitor.hpp>

/// \file
/// The transport over streams: each direction between two ranks has a channel, with a separate stream on each of the two ranks.

namespace chevron {

/// Connects ranks that compute on streams: NCCL between GPUs (nccl_transport.hpp), worker threads in tests. `Streams` creates
/// streams, events and channels; `host_streams` of tests/support is an example of its members.
///
/// - All ranks create every channel and use it once at the start, in one global order, so that no later call connects. There is
///   a channel for each directed edge of the pipeline, for each group of ranks, and for gathers over all ranks; each has its
///   own stream.
/// - A transfer runs after all computation that was enqueued before it; `receive`, `wait_send` and `wait_bucket` make the
///   rank's next computation wait for the transfer. The host waits only for gathers, since it reads their numbers.
/// - A receive slot reuses its memory from step to step, except for tensors that the caller still holds. A receive runs after
///   all computation that was enqueued when the receive was posted, and so after the last use of the slot's memory.
/// - A monitor (stream_monitor.hpp) aborts all operations of this rank at the deadline, at a fault of a channel, and at a
///   failure that another rank published; the rank's next call throws.
template <class Streams>
class stream_transport : public transport {
 public:
  /// Joins the other ranks of the job. Every rank creates its transports in the same order.
  /// \param where this rank's place in the grid \param store, watch members of the job by `launch`
  /// \param join longest wait for other ranks at the start \param arguments of the constructor of `Streams`
  /// \throws timeout_error if ranks do not join; peer_lost_error if a rank is lost; preflight_error if grids differ
  template <class... Arguments>
  stream_transport(chevron::topology const& where, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<failure_monitor> watch,
                   std::chrono::milliseconds join, Arguments&&... arguments)
      : transport(where),
        rendezvous_(std::move(store), watch, where),
        failures_(std::move(watch)),
        streams_(std::forward<Arguments>(arguments)...),
        watch_(streams_, *failures_),
        lines_(streams_, watch_, rendezvous_, *failures_, where.global_rank),
        messages_(streams_, watch_, lines_, rendezvous_, *failures_, where.global_rank) {
    rendezvous_.join(join);
    if (where.world() == 1) return;
    watch_.deadline(join);
    numbers_ = lines_.make("world", channel_use::gather, where.global_rank, where.world(), deadline(),
                           where.world() == 2 ? 1 - where.global_rank : -1);
    for (auto& done : gathers_done_) done = std::make_unique<point>(watch_);
    all_gather({}, {});
    for (rank_group const among : detail::all_groups) {
      if (!where.has(among)) continue;
      group_end& group = of(among);
      group.channel = lines_.make(detail::member_of(among) + "s of rank " + std::to_string(topology().member(among, 0)),
                                  channel_use::sum, where.number_in(among), where.members(among), deadline(),
                                  where.members(among) == 2 ? where.member(among, 1 - where.number_in(among)) : -1);
      start_collective(among, group_collective::all_reduce, 0, at::zeros({1}, streams_.device()), {});
      wait_collective(among, 0);
    }
    watch_.deadline(deadline());
    failures_->all_have_met(breaks_connections);
  }

  ~stream_transport() override {
    if (!failures_->failed() && std::uncaught_exceptions() == 0) {
      try {
        close();
      } catch (std::exception const&) {
        // The error was published before; the destructor cannot throw.
      }
    }
    if (!closed_) streams_.abort();
  }

  /// Waits until every rank has called `close` and all transfers are done. The destructor calls `close`, but cannot report
  /// errors.
  void close() {
    if (closed_) return;
    if (topology().world() > 1) {
      // Through the store: over the channel, this gather could meet a gather of a rank that is still in another call.
      ++done_[count::ends];
      gather_in_store("", everybody(end_of_job), {.of = count::ends, .least = 1});
      while (!watch_.idle()) {
        lines_.check(everybody(end_of_job));
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      failures_->all_have_left();
    }
    closed_ = true;
  }

  using transport::deadline;
  void deadline(std::chrono::milliseconds longest_wait) override {
    transport::deadline(longest_wait);
    watch_.deadline(longest_wait);
  }

  at::Device device() const { return streams_.device(); }
  /// True, since NCCL connects each algorithm, which depends on size and dtype, at its first use.
  bool connects_at_first_use() const override { return true; }

  void connect(std::span<edge const> edges) override {
    int const me = topology().pipeline_rank();
    for (edge const& e : in_rounds(edges)) {
      if (e.from != me && e.to != me) continue;
      bool const sends = e.from == me;
      messages_.connect(topology().global_of(sends ? e.to : e.from), sends, deadline(), details({}));
    }
  }
  void begin_step(long step) override {
    transport::begin_step(step);
    messages_.finish_first_sends();
    lines_.check(everybody("the start of the step"));
  }

  void post_send(int peer, action what, std::uint16_t send_slot, std::span<at::Tensor const> values) override {
    messages_.post_send(message(peer, what), send_slot, values);
  }
  void post_receive(int peer, action what, std::uint16_t receive_slot) override {
    messages_.post_receive(message(peer, what), receive_slot);
  }
  std::span<at::Tensor> receive(std::uint16_t receive_slot) override { return messages_.receive(receive_slot, deadline()); }
  void wait_send(std::uint16_t send_slot) override { messages_.wait_send(send_slot); }
  at::Device memory() const override { return streams_.device(); }
  void receive_late(bool late) override { messages_.receive_late(late); }
  compute_lane make_lane(at::Device where) override {
    if constexpr (requires { Streams::make_lane(where); }) return Streams::make_lane(where);
    return transport::make_lane(where);
  }

 protected:
  void publish(error const& found) override { failures_->report(detail::failure_by(topology().global_rank, found)); }
  void open_slots(slot_counts const& slots) override { messages_.open(slots); }

  void start_collective(rank_group among, group_collective what, int bucket, at::Tensor values,
                        std::span<std::int64_t const> cut) override {
    awaited const mine = collective_at(among, bucket);
    lines_.check(mine);
    group_end& group = of(among);
    auto const b = static_cast<std::size_t>(bucket);
    while (group.done.size() <= b) group.done.push_back(std::make_unique<point>(watch_));
    auto& [on, computed, way] = *group.channel;
    lines_.behind_computation(*group.channel);
    host_call const asking(watch_, mine);
    if (what == group_collective::all_reduce) streams_.sum(way, on, values);
    if (what == group_collective::reduce_scatter) streams_.reduce_scatter(way, on, values, cut);
    if (what == group_collective::share_gather) streams_.share_gather(way, on, values, cut);
    group.done[b]->record(on, mine);
  }
  void wait_collective(rank_group among, int bucket) override {
    lines_.wait(*of(among).done.at(static_cast<std::size_t>(bucket)));
  }

  void start_gather(gather_slot slot, std::span<std::byte const> mine, awaited const& about) override {
    ++done_[detail::count_of(slot)];
    lines_.check(about);
    gather_memory& g = memory_of(slot);
    auto const bytes = static_cast<std::int64_t>(mine.size());
    if (!g.mine.defined() || g.mine.numel() != bytes) {
      g.mine = streams_.bytes(bytes);
      g.all = streams_.bytes(bytes * topology().world());
    }
    std::memcpy(g.mine.mutable_data_ptr(), mine.data(), mine.size());
    host_call const asking(watch_, about);
    streams_.all_gather(numbers_->way, numbers_->on, g.mine, g.all);
    of(slot)->record(numbers_->on, about);
  }
  void finish_gather(gather_slot slot, awaited const&, std::vector<std::span<std::byte const>>& parts) override {
    gather_memory const& g = memory_of(slot);
    lines_.wait_on_host(*of(slot), details(done_.need_of(detail::count_of(slot))));
    auto const* const all = static_cast<std::byte const*>(g.all.const_data_ptr());
    parts.resize(static_cast<std::size_t>(topology().world()));
    for (std::size_t r = 0; r < parts.size(); ++r) parts[r] = {all + r * g.mine.nbytes(), g.mine.nbytes()};
  }
  /// Gathers through the store. The user's calls gather texts, and ranks may by mistake be in different calls: over the
  /// channel, gathers of different sizes could then meet, which NCCL does not detect.
  std::vector<std::string> gather_text(std::string const& mine, awaited const& about) override {
    return gather_in_store(mine, about, {.of = count::texts, .least = done_[count::texts] + 1});
  }

 private:
  using point = typename detail::stream_monitor<Streams>::point;
  using host_call = typename detail::stream_monitor<Streams>::host_call;
  using line = typename detail::stream_channels<Streams>::line;
  using count = detail::wait_need::count;

  static constexpr char const* end_of_job = "the end of the job";
  /// False: NCCL reports no lost process of the same machine (NVIDIA/nccl#279), and copies have no connections.
  static constexpr bool breaks_connections = false;

  struct gather_memory {
    at::Tensor mine, all;
  };
  /// This rank's end of a group's channel.
  struct group_end {
    line channel;                              // null with one member
    std::vector<std::unique_ptr<point>> done;  // indexed by bucket
  };
  group_end& of(rank_group among) { return groups_[static_cast<std::size_t>(among)]; }
  std::unique_ptr<point>& of(gather_slot slot) { return gathers_done_[static_cast<std::size_t>(slot)]; }
  gather_memory& memory_of(gather_slot slot) { return gather_memory_[static_cast<std::size_t>(slot)]; }

  detail::wait_details details(detail::wait_need const& need) { return {need, &done_, &rendezvous_.prefix()}; }

  std::vector<std::string> gather_in_store(std::string const& mine, awaited const& about, detail::wait_need const& need) {
    ++done_[count::texts];
    return rendezvous_.all_gather(mine, about, deadline(), details(need));
  }

  rendezvous rendezvous_;
  std::shared_ptr<failure_monitor> failures_;
  // Indexed by gather_slot. Declared before the streams, which may copy into this memory until they are destroyed.
  std::array<gather_memory, 2> gather_memory_;
  Streams streams_;
  detail::stream_monitor<Streams> watch_;
  detail::stream_channels<Streams> lines_;
  detail::stream_messages<Streams> messages_;
  line numbers_;  // null with one rank
  std::array<group_end, detail::group_count> groups_;
  std::array<std::unique_ptr<point>, 2> gathers_done_;  // indexed by gather_slot
  detail::wait_progress done_;
  bool closed_ = false;
};

}  // namespace chevron
