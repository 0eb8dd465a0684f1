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
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>
#include <chevron/transports/shared_memory/shared_memory.hpp>

/// \file
/// Sums, reduce-scatters and gathers of shares over a group whose ranks are on one machine.

namespace chevron::detail {

/// Runs the collectives of a group (the replicas or the shards of a stage) through shared memory, in a separate thread, while
/// the rank computes.
///
/// A tensor is divided into a share for each member, equal shares for a sum, and into pieces that fit a processor's cache: a
/// piece has a part of every share, each at its own offset of a reduction buffer. For each piece of a sum, a rank writes the
/// parts that other members sum, sums its own part over all members, and reads the parts that other members have summed. Every
/// rank sums in the order of members, ((r0 + r1) + r2) …, so the bits are equal on all ranks, and equal to the bits of ranks in
/// threads. The thread waits for other members only if it can continue with none of several pieces; a wait ends when a failure
/// is published, or when this object is destroyed. The rank waits for the thread until its deadline at most. Only the first
/// collective of each bucket allocates memory.
class shared_collectives {
 public:
  /// \param memory used for this group only
  /// \param members global ranks, by number in the group; each maps the memory of all other members
  /// \param me       this rank's number in the group
  shared_collectives(shared_memory& memory, rank_group among, std::vector<int> members, int me,
                     std::shared_ptr<failure_monitor> watch)
      : memory_(memory),
        among_(among),
        members_(std::move(members)),
        me_(static_cast<std::size_t>(me)),
        watch_(std::move(watch)),
        room_(shared_memory::sum_piece / members_.size() / line * line),
        own_(memory_.progress_of(members_[me_])),
        thread_([this] { run(); }) {}
  ~shared_collectives() {
    {
      std::lock_guard const hold(mutex_);
      stop_ = true;
    }
    changed_.notify_one();
    memory_.notify(members_[me_], shared_memory::wakeup::sums);
    thread_.join();
  }
  shared_collectives(shared_collectives const&) = delete;
  shared_collectives& operator=(shared_collectives const&) = delete;

  /// Starts a collective, in place. All members start the same collectives in the same order.
  /// \param values contiguous, in main memory
  /// \param cut offsets of shares in elements; empty for a sum
  /// \throws usage_error for a dtype that cannot be summed
  void start(group_collective what, int bucket, at::Tensor values, std::span<std::int64_t const> cut) {
    if (what != group_collective::share_gather && !with_number(values.scalar_type(), [](auto) {})) {
      throw usage_error(std::string("the ") + words_of(what, among_) + " of bucket " + std::to_string(bucket) + ": " +
                        member_of(among_) + "s cannot sum " + c10::toString(values.scalar_type()));
    }
    auto const b = static_cast<std::size_t>(bucket);
    while (buckets_.size() <= b) buckets_.push_back(std::make_unique<collective>());
    collective& mine = *buckets_[b];
    byte_fingerprint offsets;
    offsets.add(cut.data(), cut.size_bytes());
    mine.label = {static_cast<std::int64_t>(what), bucket, static_cast<std::int64_t>(values.scalar_type()),
                  static_cast<std::int64_t>(values.nbytes()), offsets.value()};
    mine.shares.resize(members_.size());
    for (std::size_t r = 0; r < members_.size(); ++r)
      mine.shares[r] = cut.empty() ? equal_share(r, values.nbytes()) : share_of(cut[r], cut[r + 1], values.itemsize());
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

  /// Waits for a bucket's collective, if one is under way.
  /// \param step the training step, for errors \param wait called as wait(flag): waits for the flag, or throws
  /// \throws preflight_error if another member starts a different collective in this bucket
  template <class Wait>
  void finish(int bucket, long step, Wait const& wait) {
    auto const b = static_cast<std::size_t>(bucket);
    if (b >= buckets_.size() || buckets_[b]->waited_for) return;
    collective& mine = *buckets_[b];
    wait(std::as_const(mine.done));
    mine.waited_for = true;
    if (mine.differs < 0) return;
    auto const theirs = static_cast<group_collective>(mine.other.what);
    throw preflight_error(unlike_collectives(among_, bucket, static_cast<int>(me_), mine.what(), mine.differs, theirs),
                          {.rank = members_[me_],
                           .peer = members_[static_cast<std::size_t>(mine.differs)],
                           .step = step,
                           .action = words_of(mine.what(), among_)});
  }

 private:
  using wakeup = shared_memory::wakeup;
  static constexpr std::size_t line = 64;

  struct share {
    std::size_t from = 0, bytes = 0;
  };
  struct collective {
    at::Tensor values;
    std::vector<share> shares;  // indexed by member
    sum_label label{};
    std::atomic<bool> done{false};
    bool waited_for = true;
    int differs = -1;   // a member with a different label, or -1
    sum_label other{};  // label of that member
    group_collective what() const { return static_cast<group_collective>(label.what); }
  };
  /// A part of every share. `index` counts the pieces of one collective from 0, `number` the pieces of all collectives from 1.
  struct piece {
    std::uint64_t number, index;
  };
  /// A member's part of a piece, in this rank's tensor.
  struct part {
    std::byte* values;
    std::size_t bytes;
  };

  /// Calls `use(number)` with a number of the dtype's C++ type. \returns whether the dtype can be summed
  template <class Use>
  static bool with_number(at::ScalarType type, Use const& use) {
    auto const one_of = [&]<class... Number>() {
      return ((type == c10::CppTypeToScalarType<Number>::value && (use(Number{}), true)) || ...);
    };
    return one_of
        .template operator()<float, double, c10::Half, c10::BFloat16, std::int8_t, std::uint8_t, std::int32_t, std::int64_t>();
  }

  void run() {
    std::unique_lock hold(mutex_);
    for (;;) {
      changed_.wait(hold, [this] { return stop_ || !posted_.empty(); });
      if (stop_) return;
      std::swap(posted_, working_);
      hold.unlock();
      for (collective* each : working_) {
        if (!carry_out(*each)) return;
        bool const refused = each->differs >= 0;
        each->values.reset();
        watch_->wake(each->done);  // from here on the rank may start another collective in this bucket
        if (refused) return;
      }
      working_.clear();
      hold.lock();
    }
  }

  /// Runs one collective. \returns false after a failure, or when this object is being destroyed
  bool carry_out(collective& mine) {
    std::uint64_t const before = own_.copied;  // pieces are numbered over all collectives, from 1
    // At least one piece, so that members compare labels.
    std::uint64_t pieces = 1;
    for (share const& each : mine.shares) pieces = std::max<std::uint64_t>(pieces, (each.bytes + room_ - 1) / room_);
    std::uint64_t const last = before + pieces;
    auto const piece_of = [&](std::uint64_t number) { return piece{number, number - before - 1}; };
    while (own_.gathered < last) {
      // Continues the most advanced piece first: its data are in the caches, and other members may wait for its buffer.
      if (may_take()) {
        piece const next = piece_of(own_.gathered + 1);
        copy_in(mine, next);
        tell(own_.gathered, next.number);
      } else if (may_add()) {
        compare_labels(mine, own_.reduced + 1);
        if (mine.differs >= 0) return true;
        when_all_put(mine, piece_of(own_.reduced + 1));
      } else if (own_.copied < last && may_put()) {
        put(mine, piece_of(own_.copied + 1));
      } else if (stop_ || watch_->failed()) {
        return false;
      } else {
        auto const came = [&] { return may_take() || may_add() || (own_.copied < last && may_put()) || stop_; };
        memory_.sleep(came, std::chrono::milliseconds(20), wakeup::sums);
      }
    }
    return true;
  }

  /// Whether the progress counter `what` of every other member has reached this number of pieces.
  bool others(std::uint64_t sum_progress::*what, std::uint64_t pieces) const {
    for (std::size_t r = 0; r < members_.size(); ++r) {
      if (r != me_ && read(memory_.progress_of(members_[r]).*what) < pieces) return false;
    }
    return true;
  }
  // Only the thread of `run` writes to `own_`.
  bool may_put() const {
    return own_.copied < shared_memory::reduction_buffers ||
           others(&sum_progress::gathered, own_.copied + 1 - shared_memory::reduction_buffers);
  }
  bool may_add() const { return own_.reduced < own_.copied && others(&sum_progress::copied, own_.reduced + 1); }
  bool may_take() const { return own_.gathered < own_.reduced && others(&sum_progress::reduced, own_.gathered + 1); }

  void put(collective const& mine, piece const& what) {
    int const rank = members_[me_];
    memory_.label_of(rank, what.number) = mine.label;
    bool const own_share = mine.what() == group_collective::share_gather;
    for (std::size_t r = 0; r < members_.size(); ++r) {
      part const from = part_of(mine, what, r);
      if ((r == me_) == own_share && from.bytes > 0) std::memcpy(place_of(me_, what, r), from.values, from.bytes);
    }
    tell(own_.copied, what.number);
  }

  void compare_labels(collective& mine, std::uint64_t number) const {
    for (std::size_t r = 0; r < members_.size() && mine.differs < 0; ++r) {
      mine.other = memory_.label_of(members_[r], number);
      if (mine.other != mine.label) mine.differs = static_cast<int>(r);
    }
  }

  /// Continues a piece that all members have written. In an all-reduce, other members then read this rank's sums.
  void when_all_put(collective const& mine, piece const& what) {
    if (mine.what() == group_collective::share_gather) {
      copy_in(mine, what);
    } else {
      with_number(mine.values.scalar_type(), [&](auto number) { add_up<decltype(number)>(mine, what); });
    }
    if (mine.what() == group_collective::all_reduce) return tell(own_.reduced, what.number);
    publish(own_.reduced, what.number);
    tell(own_.gathered, what.number);
  }

  /// Sums this rank's share of a piece over all members, into the tensor and, in an all-reduce, into the reduction buffer.
  template <class Number>
  void add_up(collective const& mine, piece const& what) {
    part const to = part_of(mine, what, me_);
    std::size_t const count = to.bytes / sizeof(Number);
    auto* const own = reinterpret_cast<Number*>(to.values);
    auto const area = [&](std::size_t r) { return reinterpret_cast<Number*>(place_of(r, what, me_)); };
    auto const source = [&](std::size_t r) { return r == me_ ? own : area(r); };
    bool const for_others = mine.what() == group_collective::all_reduce;
    // A block of fixed length lets compilers use wide registers under any options.
    constexpr std::size_t block = 512;
    Number total[block];
    for (std::size_t at = 0; at < count; at += block) {
      std::size_t const here = std::min(block, count - at);
      std::memcpy(total, source(0) + at, here * sizeof(Number));
      for (std::size_t r = 1; r < members_.size(); ++r) {
        Number const* const more = source(r) + at;
        if (here == block) {
          for (std::size_t i = 0; i < block; ++i) total[i] = static_cast<Number>(total[i] + more[i]);
        } else {
          for (std::size_t i = 0; i < here; ++i) total[i] = static_cast<Number>(total[i] + more[i]);
        }
      }
      std::memcpy(own + at, total, here * sizeof(Number));
      if (for_others) std::memcpy(area(me_) + at, total, here * sizeof(Number));
    }
  }

  /// Reads the other members' parts from their buffers.
  void copy_in(collective const& mine, piece const& what) {
    for (std::size_t r = 0; r < members_.size(); ++r) {
      part const theirs = part_of(mine, what, r);
      if (r != me_ && theirs.bytes > 0) std::memcpy(theirs.values, place_of(r, what, r), theirs.bytes);
    }
  }

  part part_of(collective const& mine, piece const& what, std::size_t member) const {
    share const& whole = mine.shares[member];
    std::size_t const done = std::min(whole.bytes, static_cast<std::size_t>(what.index) * room_);
    return {static_cast<std::byte*>(mine.values.mutable_data_ptr()) + whole.from + done, std::min(room_, whole.bytes - done)};
  }
  /// The address, in a member's reduction buffer, of a piece's part of the owner's share.
  std::byte* place_of(std::size_t member, piece const& what, std::size_t owner) const {
    return memory_.reduction_buffer_of(members_[member], what.number) + owner * room_;
  }

  /// A member's share of a tensor that has no cut; shares begin at cache lines.
  share equal_share(std::size_t member, std::size_t bytes) const {
    std::size_t const each = (bytes + line * members_.size() - 1) / (line * members_.size()) * line;
    std::size_t const from = std::min(bytes, member * each);
    return {from, std::min(each, bytes - from)};
  }
  static share share_of(std::int64_t begin, std::int64_t end, std::size_t width) {
    return {static_cast<std::size_t>(begin) * width, static_cast<std::size_t>(end - begin) * width};
  }

  void tell(std::uint64_t& progress, std::uint64_t number) {
    publish(progress, number);
    for (std::size_t r = 0; r < members_.size(); ++r) {
      if (r != me_) memory_.notify(members_[r], wakeup::sums);
    }
  }

  shared_memory& memory_;
  rank_group among_;
  std::vector<int> members_;
  std::size_t me_;
  std::shared_ptr<failure_monitor> watch_;
  std::size_t const room_;  // bytes of a reduction buffer for each member's part
  sum_progress& own_;
  std::vector<std::unique_ptr<collective>> buckets_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<collective*> posted_;   // in the order of `start`
  std::vector<collective*> working_;  // belongs to the thread
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace chevron::detail
