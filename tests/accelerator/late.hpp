#pragma once

// Streams that run as late as possible: an operator runs once the host or another stream waits for it, and not before. So a
// missing wait, or memory that is freed too early, changes the numbers.
//
// The device's memory exists twice. In the first copy operators run at once, to compute shapes; in the second copy they run late.
// The host reads the second copy.

#include <algorithm>
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

/// A message that waits for another one: its other end stands on its stream behind `behind`.
struct message_wait {
  std::string message, other_end;
  std::string behind;  ///< empty: the other end has not been enqueued, or waits for something else than a message
};

/// `0SEND_F1 waits for 1RECV_F1, which stands behind 1SEND_B0; 1SEND_B0 waits for …`
inline std::string words_of(std::vector<message_wait> const& cycle) {
  std::string out;
  for (message_wait const& one : cycle) {
    out += (out.empty() ? "" : "; ") + one.message + " waits for " +
           (one.other_end.empty() ? "its other end, which is not enqueued" : one.other_end);
    if (!one.behind.empty()) out += ", which stands behind " + one.behind;
  }
  return out;
}

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
  /// The next of a channel's messages: all ranks bring tensors, then `does` of each runs once.
  /// \param what the message, for `cycle_of_messages`
  /// \param buffered the message ends on this rank as soon as it is in front of its stream, with the values of that moment
  void meet(int stream, std::string const& channel, int rank, int size, std::vector<at::Tensor> values, meeting_work does,
            std::string what = {}, bool buffered = false) {
    std::lock_guard const hold(mutex_);
    channels_[channel].ends.resize(static_cast<std::size_t>(size));
    queue& q = queues_[stream];
    q.batch.push_back(std::make_shared<end>(end{stream, 0, channel, rank, what.empty() ? channel : std::move(what),
                                                std::move(values), std::move(does), buffered, false}));
    if (!q.batches) post_batch(q);
  }
  /// The messages of a stream up to `end_batch` are one piece of work: they run side by side, in any order, and it ends with
  /// the last of them.
  void begin_batch(int stream) {
    std::lock_guard const hold(mutex_);
    queues_[stream].batches = true;
  }
  void end_batch(int stream) {
    std::lock_guard const hold(mutex_);
    queue& q = queues_[stream];
    q.batches = false;
    if (!q.batch.empty()) post_batch(q);
  }

  /// How much work has run, of all streams: it changes with each step that a query makes possible.
  std::uint64_t ran() {
    std::lock_guard const hold(mutex_);
    return ran_;
  }
  /// The messages that wait for each other, if work of a stream cannot run: each for the next, the last for the first. A single
  /// one, with an empty `behind`, if its other end has not been enqueued. None if the stream waits for no message.
  std::vector<message_wait> cycle_of_messages(int stream) {
    std::lock_guard const hold(mutex_);
    return cycle_from(stream);
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
        throw std::runtime_error("streams wait for each other, or for nothing: " + words_of(cycle_from(p.stream)));
    }
  }

 private:
  /// A rank's end of a message, or of another operation of several ranks.
  struct end {
    int stream;
    std::uint64_t number;  // of the piece of work that it is, or is a part of
    std::string channel;
    int rank;
    std::string what;
    std::vector<at::Tensor> values;
    meeting_work does;  // that of a receive does something, that of a send does not
    bool buffered;
    bool over;
  };
  struct item {
    work does = {};
    late_point after = {};
    std::vector<std::shared_ptr<end>> ends = {};  // of a message; several in a batch
  };
  struct queue {
    std::deque<item> items;
    std::uint64_t asked = 0, done = 0;
    bool runs = false;
    bool batches = false;
    std::vector<std::shared_ptr<end>> batch;  // not enqueued yet
  };
  struct channel_state {
    std::vector<std::deque<std::shared_ptr<end>>> ends;  // by rank; those that have not met
  };

  void push(int stream, item what) {
    std::lock_guard const hold(mutex_);
    queue& q = queues_[stream];
    ++q.asked;
    q.items.push_back(std::move(what));
    news_.notify_all();
  }

  void post_batch(queue& q) {
    ++q.asked;
    for (auto const& one : q.batch) {
      one->number = q.asked;
      channels_[one->channel].ends[static_cast<std::size_t>(one->rank)].push_back(one);
    }
    q.items.push_back({.ends = std::exchange(q.batch, {})});
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
      if (!front.ends.empty()) {
        comes = try_messages(q);  // takes it off
        continue;
      }
      if (front.after.stream >= 0) comes = try_to(front.after);
      if (!comes) break;
      if (front.does) front.does();
      take_off(q);
    }
    q.runs = false;
    return comes;
  }

  void take_off(queue& q) {
    q.items.pop_front();
    ++q.done;
    ++ran_;
  }
  /// An end of the piece of work in front of its stream is over; with the last of them the work is.
  void finish(end& one) {
    one.over = true;
    ++ran_;
    queue& q = queues_[one.stream];
    auto const& ends = q.items.front().ends;
    if (std::all_of(ends.begin(), ends.end(), [](auto const& each) { return each->over; })) take_off(q);
  }

  /// Runs the messages in front of a stream; false where one of them cannot run yet.
  bool try_messages(queue& q) {
    std::uint64_t const before = q.done;
    for (bool moved = true; moved && q.done == before;) {
      moved = false;
      // Other streams may take the work off meanwhile.
      for (std::size_t i = 0; q.done == before && i < q.items.front().ends.size(); ++i) {
        auto const one = q.items.front().ends[i];
        if (one->over) continue;
        if (one->buffered) {
          for (at::Tensor& value : one->values) value = value.clone();
          finish(*one);
          moved = true;
        } else {
          moved = try_meeting(one->channel) || moved;
        }
      }
    }
    return q.done != before;
  }

  bool try_meeting(std::string const& name) {
    channel_state& c = channels_.at(name);
    for (auto const& ends : c.ends) {
      if (ends.empty()) return false;
      end const& front = *ends.front();
      if (!front.over && !try_to({front.stream, front.number - 1})) return false;
    }
    std::vector<std::shared_ptr<end>> met;
    std::vector<std::vector<at::Tensor>> brought;
    for (auto& ends : c.ends) {
      met.push_back(ends.front());
      brought.push_back(ends.front()->values);
      ends.pop_front();
    }
    for (auto const& one : met) {
      if (one->does) one->does(brought);
      if (!one->over) finish(*one);
    }
    return true;
  }

  std::vector<message_wait> cycle_from(int stream) {
    std::vector<message_wait> path;
    std::vector<end const*> of;
    for (end const* one = front_message(stream); one != nullptr;) {
      auto const seen = std::find(of.begin(), of.end(), one);
      if (seen != of.end()) {
        path.erase(path.begin(), path.begin() + (seen - of.begin()));
        return path;
      }
      of.push_back(one);
      end const* const other = other_end(*one);
      if (other == nullptr) return {{one->what, {}, {}}};
      end const* const ahead = front_message(other->stream);
      path.push_back({one->what, other->what, ahead == nullptr || ahead == other ? std::string() : ahead->what});
      one = ahead == other ? nullptr : ahead;
    }
    return {};
  }
  /// The message in front of a stream, or of a stream for whose event it waits; null if there is none.
  end const* front_message(int stream) {
    for (std::size_t hops = 0; hops <= queues_.size(); ++hops) {
      auto const& items = queues_[stream].items;
      if (items.empty()) return nullptr;
      for (auto const& one : items.front().ends) {
        if (!one->over) return one.get();
      }
      if (items.front().after.stream < 0) return nullptr;
      stream = items.front().after.stream;
    }
    return nullptr;
  }
  /// Of a message of two ranks: messages of a channel meet in the order in which both enqueue them.
  end const* other_end(end const& one) {
    auto const& all = channels_.at(one.channel).ends;
    if (all.size() != 2) return nullptr;
    auto const& mine = all[static_cast<std::size_t>(one.rank)];
    auto const& others = all[static_cast<std::size_t>(one.rank == 0 ? 1 : 0)];
    auto const place = static_cast<std::size_t>(
        std::find_if(mine.begin(), mine.end(), [&](auto const& each) { return each.get() == &one; }) - mine.begin());
    return place < others.size() ? others[place].get() : nullptr;
  }

  bool on_ = false;
  std::uint64_t ran_ = 0;
  std::mutex mutex_;
  std::condition_variable news_;
  std::map<int, queue> queues_;
  std::map<std::string, channel_state> channels_;
};

}  // namespace accelerator
