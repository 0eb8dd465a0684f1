#pragma once

// Slow links on one machine: a transport around another one, whose messages arrive as late as latency and bandwidth have it,
// whose gathers of shares take a given time, one after the other, and whose collectives over shards and replicas take the time of
// a ring.

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/now_ns.hpp>

namespace slow_links {

/// The delay of a link's messages, in each of its two directions: a transfer of bytes / bandwidth, and then the latency, as in
/// a plan's costs with `occupies::wire`.
struct link {
  std::chrono::nanoseconds latency{0};
  double bandwidth = 0;  ///< bytes a second, one transfer after the other; 0: transfers take no time
};

/// By the two ranks of a pipeline that a link joins, the smaller one first. Links that are not named are as they are.
using links = std::map<std::pair<int, int>, link>;

/// The slowest link of the ring that a group's members form; without bandwidth and latency collectives are as they are.
struct rings {
  link shards, replicas;
};

/// Time in which a ring of members passes its last message: a sum takes N - 1 messages to sum into shares and as many to gather
/// them, a reduce-scatter or a gather of shares N - 1. Each message has the largest share.
inline std::chrono::nanoseconds ring_time(link const& slowest, int members, chevron::group_collective what, double share_bytes) {
  double const message =
      (slowest.bandwidth > 0 ? share_bytes / slowest.bandwidth * 1e9 : 0) + static_cast<double>(slowest.latency.count());
  int const rounds = what == chevron::group_collective::all_reduce ? 2 : 1;
  return std::chrono::nanoseconds(static_cast<std::int64_t>(rounds * (members - 1) * message));
}

/// Leaves the core to others until shortly before the end: the system would wake it up late.
inline void sleep_until(std::int64_t until) {
  std::int64_t const early = until - 250'000;
  timespec const at{early / 1'000'000'000, early % 1'000'000'000};
  while (chevron::now_ns() < early && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) != 0) {
  }
  while (chevron::now_ns() < until) std::this_thread::yield();
}

/// A transport that delays messages over slow links. The sender works out when a message arrives and sends that along, in
/// one tensor more; the receiver waits until then. So ranks must share a clock: threads, or processes of one machine. All ranks
/// of a job put one around their transport, with the same links.
class transport : public chevron::transport {
 public:
  /// \param gather time that each gather of shares over replicas takes, in addition to the ring's
  /// \param ring of the groups: collectives over replicas run in the background, one after the other
  transport(chevron::transport& inner, links const& slow, std::chrono::nanoseconds gather = {}, rings const& ring = {})
      : chevron::transport(inner.topology()), inner_(inner), slow_(slow), gather_(gather), ring_(ring) {
    deadline(inner.deadline());
  }

  bool is_zero_copy() const override { return inner_.is_zero_copy(); }
  bool connects_at_first_use() const override { return inner_.connects_at_first_use(); }
  void connect(std::span<chevron::edge const> edges) override { inner_.connect(edges); }
  void begin_step(long step) override {
    chevron::transport::begin_step(step);
    inner_.begin_step(step);
  }

  void post_send(int peer, chevron::action what, std::uint16_t slot, std::span<at::Tensor const> values) override {
    std::int64_t arrives = 0;
    if (link const* const slow = link_to(peer)) {
      std::int64_t& free_from = wire_free_from_[peer];
      free_from = std::max(free_from, chevron::now_ns()) + transfer_ns(*slow, values);
      arrives = free_from + slow->latency.count();
    }
    with_stamp_.assign(values.begin(), values.end());
    with_stamp_.push_back(at::empty({1}, at::kLong));
    *with_stamp_.back().mutable_data_ptr<std::int64_t>() = arrives;
    inner_.post_send(peer, what, slot, with_stamp_);
    with_stamp_.clear();
  }
  void post_receive(int peer, chevron::action what, std::uint16_t slot) override { inner_.post_receive(peer, what, slot); }
  std::span<at::Tensor> receive(std::uint16_t slot) override {
    std::span<at::Tensor> const all = inner_.receive(slot);
    sleep_until(*all.back().const_data_ptr<std::int64_t>());
    return all.first(all.size() - 1);
  }
  void wait_send(std::uint16_t slot) override { inner_.wait_send(slot); }

 private:
  link const* link_to(int peer) const {
    int const me = topology().pipeline_rank();
    auto const found = slow_.find({std::min(me, peer), std::max(me, peer)});
    return found == slow_.end() ? nullptr : &found->second;
  }
  static std::int64_t transfer_ns(link const& over, std::span<at::Tensor const> values) {
    if (over.bandwidth <= 0) return 0;
    double bytes = 0;
    for (at::Tensor const& value : values) bytes += value.defined() ? static_cast<double>(value.nbytes()) : 0;
    return static_cast<std::int64_t>(bytes / over.bandwidth * 1e9);
  }

  /// The bytes of the largest share of a collective.
  double share_bytes(chevron::rank_group among, at::Tensor const& values, std::span<std::int64_t const> cut) const {
    if (cut.empty()) return static_cast<double>(values.nbytes()) / topology().members(among);
    std::int64_t most = 0;
    for (std::size_t i = 0; i + 1 < cut.size(); ++i) most = std::max(most, cut[i + 1] - cut[i]);
    return static_cast<double>(most) * static_cast<double>(values.itemsize());
  }

  void publish(chevron::error const& found) override { inner_.fail(found); }
  void open_slots(chevron::slot_counts const& slots) override {
    inner_.open(slots, 1);  // whose turn it is, is known here
  }
  void start_collective(chevron::rank_group among, chevron::group_collective what, int bucket, at::Tensor values,
                        std::span<std::int64_t const> cut) override {
    if (among != chevron::rank_group::replicas) {
      std::chrono::nanoseconds const takes =
          ring_time(ring_.shards, topology().members(among), what, share_bytes(among, values, cut));
      inner_.over_group(among, what, std::move(values), cut);  // waits for all members
      return sleep_until(takes.count() > 0 ? chevron::now_ns() + takes.count() : 0);
    }
    std::chrono::nanoseconds takes = ring_time(ring_.replicas, topology().replicas, what, share_bytes(among, values, cut));
    if (what == chevron::group_collective::share_gather) takes += gather_;
    if (takes.count() > 0) {
      ring_free_from_ = std::max(ring_free_from_, chevron::now_ns()) + takes.count();
      ends_at_[bucket] = ring_free_from_;
    }
    switch (what) {
      case chevron::group_collective::reduce_scatter:
        return inner_.start_reduce_scatter(bucket, std::move(values), cut);
      case chevron::group_collective::share_gather:
        return inner_.start_share_gather(bucket, std::move(values), cut);
      default:
        return inner_.start_all_reduce(bucket, std::move(values));
    }
  }
  void wait_collective(chevron::rank_group among, int bucket) override {
    if (among != chevron::rank_group::replicas) return;
    inner_.wait_bucket(bucket);
    if (auto const found = ends_at_.find(bucket); found != ends_at_.end()) {
      sleep_until(found->second);
      ends_at_.erase(found);
    }
  }
  // Gathers of bytes as gathers of numbers, which the other transport copies as they are.
  void start_gather(chevron::gather_slot slot, std::span<std::byte const> mine, chevron::awaited const&) override {
    gather& one = gathers_[static_cast<std::size_t>(slot)];
    one.mine.assign((mine.size() + sizeof(double) - 1) / sizeof(double), 0);
    std::memcpy(one.mine.data(), mine.data(), mine.size());
    if (slot == chevron::gather_slot::split_phase) inner_.start_all_gather(one.mine);
  }
  void finish_gather(chevron::gather_slot slot, chevron::awaited const&,
                     std::vector<std::span<std::byte const>>& parts) override {
    gather& one = gathers_[static_cast<std::size_t>(slot)];
    auto const world = static_cast<std::size_t>(topology().world());
    one.all.resize(one.mine.size() * world);
    if (slot == chevron::gather_slot::split_phase)
      inner_.finish_all_gather(one.all);
    else
      inner_.all_gather(one.mine, one.all);
    parts.clear();
    auto const bytes = std::as_bytes(std::span(one.all));
    for (std::size_t r = 0; r < world; ++r) parts.push_back(bytes.subspan(r * bytes.size() / world, bytes.size() / world));
  }
  std::vector<std::string> gather_text(std::string const& mine, chevron::awaited const&) override {
    return inner_.all_gather_text(mine);
  }

  struct gather {
    std::vector<double> mine, all;
  };
  chevron::transport& inner_;
  links slow_;
  std::chrono::nanoseconds gather_;
  rings ring_;
  std::int64_t ring_free_from_ = 0;             // end of the last collective over the replicas
  std::map<int, std::int64_t> ends_at_;         // by bucket, of collectives over the replicas under way
  std::map<int, std::int64_t> wire_free_from_;  // by peer
  std::vector<at::Tensor> with_stamp_;
  gather gathers_[2];
};

}  // namespace slow_links
