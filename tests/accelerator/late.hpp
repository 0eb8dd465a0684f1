#pragma once

// Streams that run as late as possible: an operator runs once the host or another stream waits for it, and not before. So a
// missing wait, or memory that is freed too early, changes the numbers.
//
// The device's memory exists twice. In the first copy operators run at once, to compute shapes; in the second copy they run late.
// The host reads the second copy.

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace accelerator {

/// Up to where a stream was asked.
struct late_point {
  int stream = -1;
  std::uint64_t number = 0;
};

/// All streams of all devices, by their numbers.
class late_streams {
 public:
  using work = std::function<void()>;
  /// Runs once all ranks of a channel have arrived; the argument has their tensors, by rank.
  using meeting_work = std::function<void(std::vector<std::vector<at::Tensor>>&)>;

  static late_streams& instance() {
    static late_streams one;
    return one;
  }

  bool on() const { return on_; }
  /// Forgets all that is under way.
  void turn(bool on) {
    std::lock_guard const hold(mutex_);
    on_ = on;
    queues_.clear();
    channels_.clear();
  }

  late_point now(int stream) {
    if (!on_) return {};
    std::lock_guard const hold(mutex_);
    return {stream, queues_[stream].asked};
  }
  void add(int stream, work does) { push(stream, {.does = std::move(does)}); }
  void wait(int stream, late_point after) {
    if (after.stream >= 0 && after.stream != stream) push(stream, {.after = after});
  }
  /// The next of a channel's messages: all ranks bring tensors, then `does` runs once.
  void meet(int stream, std::string const& channel, int rank, int size, std::vector<at::Tensor> values, meeting_work does) {
    std::lock_guard const hold(mutex_);
    auto& c = channels_[channel];
    c.parts.resize(static_cast<std::size_t>(size));
    queue& q = queues_[stream];
    c.parts[static_cast<std::size_t>(rank)].push_back({stream, ++q.asked, std::move(values)});
    // That of a receive does something, that of a send does not.
    q.items.push_back({.channel = channel, .part = std::move(does)});
    news_.notify_all();
  }

  bool is_done(late_point p) {
    std::lock_guard const hold(mutex_);
    return p.stream < 0 || queues_[p.stream].done >= p.number;
  }
  /// A query by the host: runs all work up to the point that can run; returns whether the point is reached.
  bool run_towards(late_point p) {
    std::lock_guard const hold(mutex_);
    return p.stream < 0 || try_to(p);
  }
  /// A wait of the host, for work that may need operations that other ranks have not enqueued yet.
  void run_to(late_point p) {
    if (p.stream < 0) return;
    std::unique_lock hold(mutex_);
    auto const until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (!try_to(p)) {
      if (news_.wait_until(hold, until) == std::cv_status::timeout)
        throw std::runtime_error("streams wait for each other, or for nothing");
    }
  }

 private:
  struct item {
    work does = {};
    late_point after = {};
    std::string channel = {};
    meeting_work part = {};
  };
  struct queue {
    std::deque<item> items;
    std::uint64_t asked = 0, done = 0;
    bool runs = false;
  };
  struct part {
    int stream;
    std::uint64_t number;
    std::vector<at::Tensor> values;
  };
  struct channel_state {
    std::vector<std::deque<part>> parts;  // by rank
  };

  void push(int stream, item what) {
    std::lock_guard const hold(mutex_);
    queue& q = queues_[stream];
    ++q.asked;
    q.items.push_back(std::move(what));
    news_.notify_all();
  }

  /// False where it cannot come so far yet.
  bool try_to(late_point p) {
    queue& q = queues_[p.stream];
    if (q.done >= p.number) return true;
    if (q.runs) return false;
    q.runs = true;
    bool comes = true;
    while (comes && q.done < p.number) {
      item& front = q.items.front();
      if (!front.channel.empty()) {
        comes = try_meeting(front.channel);  // takes it off
        continue;
      }
      if (front.after.stream >= 0) comes = try_to(front.after);
      if (!comes) break;
      if (front.does) front.does();
      q.items.pop_front();
      ++q.done;
    }
    q.runs = false;
    return comes;
  }

  bool try_meeting(std::string const& name) {
    channel_state& c = channels_.at(name);
    for (auto const& parts : c.parts) {
      if (parts.empty()) return false;
      if (!try_to({parts.front().stream, parts.front().number - 1})) return false;
    }
    std::vector<std::vector<at::Tensor>> brought;
    for (auto const& parts : c.parts) brought.push_back(parts.front().values);
    for (auto& parts : c.parts) {
      queue& q = queues_[parts.front().stream];
      meeting_work const does = std::move(q.items.front().part);
      q.items.pop_front();
      ++q.done;
      parts.pop_front();
      if (does) does(brought);
    }
    return true;
  }

  bool on_ = false;
  std::mutex mutex_;
  std::condition_variable news_;
  std::map<int, queue> queues_;
  std::map<std::string, channel_state> channels_;
};

}  // namespace accelerator
