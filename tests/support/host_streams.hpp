#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/core/compute_streams.hpp>
#include <chevron/run/core/worker_thread.hpp>
#include <chevron/transports/streams/stream_fault.hpp>

/// \file
/// Streams, events and channels on the CPU, made of threads, in place of CUDA's and NCCL's.

namespace chevron {

/// The streams of one rank. A stream is a worker thread that does its work in order; an event is a point in a stream; a channel
/// joins ranks of this process, and its messages are rendezvous in order, as NCCL's are. The rank computes on its own thread,
/// which is the stream of `record` and `wait` without a stream argument, so waiting there blocks.
///
/// Has the interface that `stream_transport` needs, and so tests that transport without a GPU.
class host_streams {
 public:
  using stream = std::shared_ptr<chevron::detail::worker_thread>;

  /// A point in a stream. An event that is recorded anew is another point; waits for the old point continue.
  class event {
    friend host_streams;
    struct mark {
      std::mutex mutex;
      std::condition_variable changed;
      bool passed = false;
    };
    std::shared_ptr<mark> last;
  };

  class channel {
    friend host_streams;
    struct part {
      std::vector<at::Tensor> values;
      bool here = false;
    };
    struct meeting {
      std::mutex mutex;
      std::condition_variable changed;
      std::vector<part> parts;  // by rank
      int arrived = 0;
      int left = 0;
      long round = 0;
      std::string fault;
    };
    std::shared_ptr<meeting> shared;
    int rank = 0;
    int size = 1;
  };

  host_streams() : stopped_(std::make_shared<std::atomic<bool>>(false)) {}
  ~host_streams() { abort(); }
  host_streams(host_streams const&) = delete;
  host_streams& operator=(host_streams const&) = delete;

  at::Device device() const { return at::kCPU; }

  stream make_stream() { return std::make_shared<chevron::detail::worker_thread>(); }
  event make_event() { return {}; }

  /// Records where this rank's own thread is: it has come there.
  void record(event& e) {
    e.last = std::make_shared<event::mark>();
    e.last->passed = true;
  }
  void record(event& e, stream& on) {
    e.last = std::make_shared<event::mark>();
    on->post([mark = e.last] {
      std::lock_guard const hold(mark->mutex);
      mark->passed = true;
      mark->changed.notify_all();
    });
  }
  /// Work that is queued on the stream from now on runs after the event.
  void wait(stream& on, event const& e) {
    if (!e.last || passed(e)) return;
    on->post([mark = e.last, stopped = stopped_] {
      std::unique_lock hold(mark->mutex);
      while (!mark->passed && !*stopped) mark->changed.wait_for(hold, look_again);
    });
  }
  /// This rank's computations from now on run after the event. \returns false if `stop()` became true first
  template <class Stop>
  bool wait(event const& e, Stop const& stop) {
    if (!e.last) return true;
    std::unique_lock hold(e.last->mutex);
    while (!e.last->passed) {
      if (*stopped_ || stop()) return false;
      e.last->changed.wait_for(hold, look_again);
    }
    return true;
  }
  /// The host waits for the event, since here the host computes.
  template <class Stop>
  bool wait_on_host(event const& e, Stop const& stop) {
    return wait(e, stop);
  }
  bool passed(event const& e) const {
    if (!e.last) return true;
    std::lock_guard const hold(e.last->mutex);
    return e.last->passed;
  }

  /// The state that the ranks of a channel share: made by one rank, passed to the others.
  static std::string make_id() {
    static std::atomic<long> made{0};
    return "channel " + std::to_string(++made);
  }
  /// Joins a channel. The arguments: its name and id, its use, the number of this end, the number of ends, and the global rank of
  /// the other end, which the fault of a lost peer names; -1 if there are several.
  template <class Stop>
  channel connect(std::string const&, std::string const& id, channel_use, int rank, int size, int, Stop const&) {
    static std::mutex mutex;
    static std::map<std::string, std::weak_ptr<channel::meeting>> open;
    std::lock_guard const hold(mutex);
    std::erase_if(open, [](auto const& entry) { return entry.second.expired(); });
    channel out;
    out.rank = rank;
    out.size = size;
    out.shared = open[id].lock();
    if (!out.shared) {
      out.shared = std::make_shared<channel::meeting>();
      out.shared->parts.resize(static_cast<std::size_t>(size));
      open[id] = out.shared;
    }
    std::lock_guard const hold_own(mutex_);
    meetings_.push_back(out.shared);
    return out;
  }

  /// Of a channel of two.
  void send(channel& c, stream& on, std::span<at::Tensor const> values) {
    meet(c, on, values, [](channel::meeting&, int) {});
  }
  void receive(channel& c, stream& on, std::span<at::Tensor const> into) {
    meet(c, on, into, [](channel::meeting& m, int rank) {
      auto const& from = m.parts[static_cast<std::size_t>(1 - rank)].values;
      auto const& to = m.parts[static_cast<std::size_t>(rank)].values;
      if (from.size() != to.size())
        m.fault = "a message of " + std::to_string(from.size()) + " tensors met one of " + std::to_string(to.size());
      for (std::size_t i = 0; m.fault.empty() && i < from.size(); ++i) {
        if (from[i].sizes() != to[i].sizes() || from[i].scalar_type() != to[i].scalar_type()) {
          m.fault = "a message met one of another shape or dtype";
        } else {
          to[i].copy_(from[i]);
        }
      }
    });
  }
  /// In place, over all ranks of a channel, added in the order of ranks.
  void sum(channel& c, stream& on, at::Tensor const& values) {
    meet(c, on, std::span(&values, 1), [](channel::meeting& m, int rank) {
      if (rank != 0) return;
      at::Tensor const& total = m.parts[0].values[0];
      for (std::size_t r = 1; r < m.parts.size(); ++r) total.add_(m.parts[r].values[0]);
      for (std::size_t r = 1; r < m.parts.size(); ++r) m.parts[r].values[0].copy_(total);
    });
  }
  /// The same, of each rank's own share alone: that of rank r is [cut[r], cut[r + 1]).
  void reduce_scatter(channel& c, stream& on, at::Tensor const& values, std::span<std::int64_t const> cut) {
    meet(c, on, std::span(&values, 1),
         [at = std::vector(cut.begin(), cut.end())](channel::meeting& m, int rank) { add_own_share(values_in(m), rank, at); });
  }
  /// Every rank's share to all.
  void share_gather(channel& c, stream& on, at::Tensor const& values, std::span<std::int64_t const> cut) {
    meet(c, on, std::span(&values, 1),
         [at = std::vector(cut.begin(), cut.end())](channel::meeting& m, int rank) { take_shares(values_in(m), rank, at); });
  }
  /// Everybody's `mine` into everybody's `all`, both made by `bytes`.
  void all_gather(channel& c, stream& on, at::Tensor const& mine, at::Tensor const& all) {
    at::Tensor const both[] = {mine, all};
    meet(c, on, both, [](channel::meeting& m, int rank) {
      at::Tensor const& into = m.parts[static_cast<std::size_t>(rank)].values[1];
      auto const width = m.parts[0].values[0].numel();
      for (std::size_t r = 0; r < m.parts.size(); ++r) {
        if (m.parts[r].values[0].numel() != width) {
          m.fault = "a gather of " + std::to_string(width) + " bytes met one of " + std::to_string(m.parts[r].values[0].numel());
          return;
        }
        into.narrow(0, static_cast<std::int64_t>(r) * width, width).copy_(m.parts[r].values[0]);
      }
    });
  }
  /// Memory of the host that `all_gather` can use.
  at::Tensor bytes(std::int64_t count) { return at::empty({count}, at::kByte); }

  /// A thread besides the rank's own begins to ask for events.
  void enter_thread() {}
  /// A failure of a collective on a stream's thread; empty: none.
  detail::stream_fault fault() {
    std::lock_guard const hold_own(mutex_);
    for (auto const& m : meetings_) {
      std::lock_guard const hold(m->mutex);
      if (!m->fault.empty()) return {.what = "operation", .text = m->fault};
    }
    return {};
  }
  /// Ends everything that is under way on this rank; it can do nothing more. From any thread.
  void abort() {
    *stopped_ = true;
    std::lock_guard const hold_own(mutex_);
    for (auto const& m : meetings_) m->changed.notify_all();
  }

 protected:
  // Adds a rank's share of all ranks' values, in the order of the ranks, whichever rank comes first.
  static void add_own_share(std::vector<at::Tensor> const& all, int rank, std::vector<std::int64_t> const& cut) {
    auto const r = static_cast<std::size_t>(rank);
    auto const share_in = [&](std::size_t of) { return all[of].view({-1}).narrow(0, cut[r], cut[r + 1] - cut[r]); };
    at::Tensor const total = share_in(0).clone();
    for (std::size_t other = 1; other < all.size(); ++other) total.add_(share_in(other));
    share_in(r).copy_(total);
  }
  static void take_shares(std::vector<at::Tensor> const& all, int rank, std::vector<std::int64_t> const& cut) {
    auto const width = static_cast<std::int64_t>(all[0].itemsize());
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (static_cast<int>(r) == rank) continue;
      auto const share_in = [&](std::size_t of) {
        return detail::bytes_of(all[of]).narrow(0, cut[r] * width, (cut[r + 1] - cut[r]) * width);
      };
      share_in(static_cast<std::size_t>(rank)).copy_(share_in(r));
    }
  }

 private:
  static std::vector<at::Tensor> values_in(channel::meeting const& m) {
    std::vector<at::Tensor> out;
    for (auto const& each : m.parts) out.push_back(each.values[0]);
    return out;
  }

  static constexpr auto look_again = std::chrono::milliseconds(5);

  /// A collective: all ranks pass values; once all values are here, each rank computes its part; all ranks leave together.
  template <class Part>
  void meet(channel& c, stream& on, std::span<at::Tensor const> values, Part part) {
    on->post([m = c.shared, rank = c.rank, size = c.size, part, stopped = stopped_,
              mine = std::vector<at::Tensor>(values.begin(), values.end())]() mutable {
      at::NoGradGuard const off;
      std::unique_lock hold(m->mutex);
      auto const until = [&](auto const& ready) {
        while (!*stopped && !ready()) m->changed.wait_for(hold, look_again);
        return !*stopped;
      };
      if (!until([&] { return m->left == 0 && !m->parts[static_cast<std::size_t>(rank)].here; })) return;
      m->parts[static_cast<std::size_t>(rank)] = {std::move(mine), true};
      ++m->arrived;
      m->changed.notify_all();
      if (!until([&] { return m->arrived == size; })) return;
      part(*m, rank);
      long const round = m->round;
      if (++m->left == size) {
        for (auto& p : m->parts) p = {};
        m->arrived = 0;
        m->left = 0;
        ++m->round;
        m->changed.notify_all();
        return;
      }
      until([&] { return m->round != round; });
    });
  }

  std::shared_ptr<std::atomic<bool>> stopped_;
  std::mutex mutex_;  // of meetings_: the watch looks there
  std::vector<std::shared_ptr<channel::meeting>> meetings_;
};

}  // namespace chevron
