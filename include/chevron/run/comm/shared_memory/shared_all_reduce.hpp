#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <chevron/run/comm/shared_memory/shared_memory.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/failure/failure_monitor.hpp>

/// \file
/// Sums of gradients over replicas that are on one machine.

namespace chevron::detail {

/// Sums tensors over the replicas of a stage in their shared memory, in a thread of its own, while the rank computes.
///
/// A tensor goes in pieces small enough to stay in a processor's cache. Of each, a rank puts down what others add up, adds up its
/// own share of all replicas' numbers, and takes the shares that others added up. Replicas are added in their order, ((r0 + r1) +
/// r2) …, whoever adds, so all have the same bits, and the same as replicas that are threads. A few pieces are under way at a
/// time: a rank waits only when there is nothing it could do with any of them.
///
/// The thread waits for others until they come, until the watch knows of a failure, or until this object ends; how long the rank
/// waits for the thread is up to the rank. Once all buckets were summed once, nothing is allocated.
class shared_all_reduce {
 public:
  /// \param replicas global ranks, by replica, that can all read each other's memory
  /// \param me       replica of this rank
  shared_all_reduce(shared_memory& memory, std::vector<int> replicas, int me, std::shared_ptr<failure_monitor> watch)
      : memory_(memory),
        replicas_(std::move(replicas)),
        me_(static_cast<std::size_t>(me)),
        watch_(std::move(watch)),
        own_(memory_.progress_of(replicas_[me_])),
        thread_([this] { run(); }) {}
  ~shared_all_reduce() {
    {
      std::lock_guard const hold(mutex_);
      stop_ = true;
    }
    changed_.notify_one();
    memory_.notify(replicas_[me_], shared_memory::wakeup::sums);
    thread_.join();
  }
  shared_all_reduce(shared_all_reduce const&) = delete;
  shared_all_reduce& operator=(shared_all_reduce const&) = delete;

  /// Starts to sum, in place; the tensor is contiguous and in main memory. All replicas start the same sums in the same order.
  void start(int bucket, at::Tensor values) {
    if (!with_number(values.scalar_type(), [](auto) {})) {
      throw usage_error("the sum of gradients of bucket " + std::to_string(bucket) + ": replicas cannot sum " +
                        c10::toString(values.scalar_type()));
    }
    auto const b = static_cast<std::size_t>(bucket);
    while (sums_.size() <= b) sums_.push_back(std::make_unique<sum>());
    sum& mine = *sums_[b];
    mine.label = {bucket, static_cast<std::int64_t>(values.scalar_type()), static_cast<std::int64_t>(values.nbytes())};
    mine.values = std::move(values);
    mine.done = false;
    mine.waited_for = false;
    mine.differs = -1;
    {
      std::lock_guard const hold(mutex_);
      posted_.push_back(&mine);
    }
    changed_.notify_one();
  }

  /// Calls `wait(flag)`, which returns once the flag is set or else throws, if this bucket is being summed.
  /// \throws preflight_error if other replicas sum something else there
  template <class Wait>
  void finish(int bucket, Wait const& wait) {
    auto const b = static_cast<std::size_t>(bucket);
    if (b >= sums_.size() || sums_[b]->waited_for) return;
    wait(std::as_const(sums_[b]->done));
    sums_[b]->waited_for = true;
    if (sums_[b]->differs < 0) return;
    throw preflight_error(
        "replicas " + std::to_string(me_) + " and " + std::to_string(sums_[b]->differs) +
            " sum gradients of different shapes or dtypes in bucket " + std::to_string(bucket),
        {.rank = replicas_[me_], .peer = replicas_[static_cast<std::size_t>(sums_[b]->differs)], .action = "sum of gradients"});
  }

 private:
  using wakeup = shared_memory::wakeup;

  struct sum {
    at::Tensor values;
    sum_label label{};
    std::atomic<bool> done{false};
    bool waited_for = true;
    int differs = -1;  // a replica with another label
  };
  /// A piece of the tensor under way; in bytes.
  struct piece {
    std::uint64_t number;
    std::byte* values;
    std::size_t bytes;
  };
  struct share {
    std::size_t from, bytes;
  };

  /// Calls `use(number)` with a number of a dtype's C++ type, if replicas can sum that dtype.
  template <class Use>
  static bool with_number(at::ScalarType type, Use const& use) {
    switch (type) {
      case at::kFloat:
        return use(float{}), true;
      case at::kDouble:
        return use(double{}), true;
      case at::kHalf:
        return use(c10::Half{}), true;
      case at::kBFloat16:
        return use(c10::BFloat16{}), true;
      case at::kChar:
        return use(std::int8_t{}), true;
      case at::kByte:
        return use(std::uint8_t{}), true;
      case at::kInt:
        return use(std::int32_t{}), true;
      case at::kLong:
        return use(std::int64_t{}), true;
      default:
        return false;
    }
  }

  void run() {
    std::unique_lock hold(mutex_);
    for (;;) {
      changed_.wait(hold, [this] { return stop_ || !posted_.empty(); });
      if (stop_) return;
      std::swap(posted_, working_);
      hold.unlock();
      for (sum* each : working_) {
        if (!carry_out(*each)) return;
        bool const refused = each->differs >= 0;
        each->values.reset();
        watch_->wake(each->done);  // from here on it is the rank's again
        if (refused) return;
      }
      working_.clear();
      hold.lock();
    }
  }

  /// \returns whether it came to an end
  bool carry_out(sum& mine) {
    auto* const values = static_cast<std::byte*>(mine.values.mutable_data_ptr());
    auto const bytes = mine.values.nbytes();
    std::uint64_t const before = own_.copied;  // all pieces of all sums are numbered, from 1
    std::uint64_t const last = before + (bytes + shared_memory::sum_piece - 1) / shared_memory::sum_piece;
    auto const piece_of = [&](std::uint64_t number) {
      std::size_t const from = (number - before - 1) * shared_memory::sum_piece;
      return piece{number, values + from, std::min(shared_memory::sum_piece, bytes - from)};
    };
    while (own_.gathered < last) {
      // What is furthest first: it lies in the caches, and others may wait for its area.
      if (may_take()) {
        take(piece_of(own_.gathered + 1));
      } else if (may_add()) {
        mine.differs = other_label(own_.reduced + 1, mine.label);
        if (mine.differs >= 0) return true;
        add(piece_of(own_.reduced + 1), mine.values.scalar_type());
      } else if (own_.copied < last && may_put()) {
        put(piece_of(own_.copied + 1), mine.label);
      } else if (stop_ || watch_->failed()) {
        return false;
      } else {
        auto const came = [&] { return may_take() || may_add() || (own_.copied < last && may_put()) || stop_; };
        memory_.sleep(came, std::chrono::milliseconds(20), wakeup::sums);
      }
    }
    return true;
  }

  /// Has every other replica done so many pieces?
  bool others(std::uint64_t sum_progress::*what, std::uint64_t pieces) const {
    for (std::size_t r = 0; r < replicas_.size(); ++r) {
      if (r != me_ && read(memory_.progress_of(replicas_[r]).*what) < pieces) return false;
    }
    return true;
  }
  // Only this thread writes to `own_`.
  bool may_put() const {
    return own_.copied < shared_memory::reduction_buffers ||
           others(&sum_progress::gathered, own_.copied + 1 - shared_memory::reduction_buffers);
  }
  bool may_add() const { return own_.reduced < own_.copied && others(&sum_progress::copied, own_.reduced + 1); }
  bool may_take() const { return own_.gathered < own_.reduced && others(&sum_progress::reduced, own_.gathered + 1); }

  void put(piece const& what, sum_label const& label) {
    int const rank = replicas_[me_];
    memory_.label_of(rank, what.number) = label;
    for (std::size_t r = 0; r < replicas_.size(); ++r) {
      if (r == me_) continue;
      auto const theirs = share_of(r, what.bytes);
      std::memcpy(memory_.reduction_buffer_of(rank, what.number) + theirs.from, what.values + theirs.from, theirs.bytes);
    }
    tell(own_.copied, what.number);
  }

  int other_label(std::uint64_t number, sum_label const& mine) const {
    for (std::size_t r = 0; r < replicas_.size(); ++r) {
      if (memory_.label_of(replicas_[r], number) != mine) return static_cast<int>(r);
    }
    return -1;
  }

  void add(piece const& what, at::ScalarType type) {
    with_number(type, [&](auto number) { add_up<decltype(number)>(what); });
    tell(own_.reduced, what.number);
  }

  /// The own share, into the tensor and for the others.
  template <class Number>
  void add_up(piece const& what) {
    auto const mine = share_of(me_, what.bytes);
    std::size_t const count = mine.bytes / sizeof(Number);
    auto* const own = reinterpret_cast<Number*>(what.values + mine.from);
    auto const area = [&](std::size_t r) {
      return reinterpret_cast<Number*>(memory_.reduction_buffer_of(replicas_[r], what.number) + mine.from);
    };
    auto const source = [&](std::size_t r) { return r == me_ ? own : area(r); };
    // Of fixed length, so that compilers use wide registers whatever their options.
    constexpr std::size_t block = 512;
    Number total[block];
    for (std::size_t at = 0; at < count; at += block) {
      std::size_t const here = std::min(block, count - at);
      std::memcpy(total, source(0) + at, here * sizeof(Number));
      for (std::size_t r = 1; r < replicas_.size(); ++r) {
        Number const* const more = source(r) + at;
        if (here == block) {
          for (std::size_t i = 0; i < block; ++i) total[i] = static_cast<Number>(total[i] + more[i]);
        } else {
          for (std::size_t i = 0; i < here; ++i) total[i] = static_cast<Number>(total[i] + more[i]);
        }
      }
      std::memcpy(own + at, total, here * sizeof(Number));
      std::memcpy(area(me_) + at, total, here * sizeof(Number));
    }
  }

  void take(piece const& what) {
    for (std::size_t r = 0; r < replicas_.size(); ++r) {
      if (r == me_) continue;
      auto const theirs = share_of(r, what.bytes);
      std::memcpy(what.values + theirs.from, memory_.reduction_buffer_of(replicas_[r], what.number) + theirs.from, theirs.bytes);
    }
    tell(own_.gathered, what.number);
  }

  /// What of a piece this replica adds up: whole cache lines.
  share share_of(std::size_t replica, std::size_t bytes) const {
    constexpr std::size_t line = 64;
    std::size_t const each = (bytes + line * replicas_.size() - 1) / (line * replicas_.size()) * line;
    std::size_t const from = std::min(bytes, replica * each);
    return {from, std::min(each, bytes - from)};
  }

  void tell(std::uint64_t& progress, std::uint64_t number) {
    publish(progress, number);
    for (std::size_t r = 0; r < replicas_.size(); ++r) {
      if (r != me_) memory_.notify(replicas_[r], wakeup::sums);
    }
  }

  shared_memory& memory_;
  std::vector<int> replicas_;
  std::size_t me_;
  std::shared_ptr<failure_monitor> watch_;
  sum_progress& own_;
  std::vector<std::unique_ptr<sum>> sums_;  // by bucket
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<sum*> posted_;   // in their order
  std::vector<sum*> working_;  // of the thread
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace chevron::detail
