#pragma once

// The order of a device's work that is certain, and accesses of memory that are not ordered.
//
// Each stream has a vector clock: how much of every stream has certainly ended when its next operator begins. Operators of one
// stream are in order; an event carries a clock from stream to stream; a host that waits takes over the clock, and its later
// operators come after that work. The order of the host's calls alone orders nothing.
//
// Only what a rank knows of its own device counts. That a message came back from another rank, which cannot have sent it before
// it had ours, is not used: so an order that rests on that alone is a fault here.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace accelerator {

/// How many operators of each stream are known to be over.
class clock {
 public:
  void join(clock const& other) {
    if (of_.size() < other.of_.size()) of_.resize(other.of_.size());
    for (std::size_t s = 0; s < other.of_.size(); ++s) of_[s] = std::max(of_[s], other.of_[s]);
  }
  bool covers(int stream, std::uint32_t number) const {
    return static_cast<std::size_t>(stream) < of_.size() && of_[static_cast<std::size_t>(stream)] >= number;
  }
  bool covers(clock const& other) const {
    for (std::size_t s = 0; s < other.of_.size(); ++s) {
      if (at(static_cast<int>(s)) < other.of_[s]) return false;
    }
    return true;
  }
  std::uint32_t advance(int stream) {
    if (of_.size() <= static_cast<std::size_t>(stream)) of_.resize(static_cast<std::size_t>(stream) + 1);
    return ++of_[static_cast<std::size_t>(stream)];
  }
  std::uint32_t at(int stream) const {
    return static_cast<std::size_t>(stream) < of_.size() ? of_[static_cast<std::size_t>(stream)] : 0;
  }

 private:
  std::vector<std::uint32_t> of_;
};

/// An operator's access of bytes of a block of memory.
struct access {
  std::size_t begin = 0, end = 0;  // bytes of the block
  int stream = 0;
  std::uint32_t number = 0;  // of the operator, in its stream
  std::string const* name = nullptr;
  bool writes = false;
  long owner = 0;  // which of the block's owners it was done for
};

/// The accesses of a block; the allocator stores them with the memory.
struct block_history {
  std::vector<access> accesses;  // those that a later one could be in conflict with
  long owner = 0;                // counts up whenever the memory is given out
};

/// Part of a block that an operator touches.
struct touched {
  block_history* block = nullptr;
  std::size_t begin = 0, end = 0;
  bool writes = false;
};

/// Two operators without an order, one of which writes memory that the other accesses.
struct fault {
  std::string first, second;                // operators
  std::string first_stream, second_stream;  // by name
  bool reused = false;                      // the memory was freed and given out again in between
  std::string text;                         // all of it, with the order that is missing
};

/// All streams of all devices.
class detector {
 public:
  static detector& instance() {
    static detector one;
    return one;
  }

  /// Forgets streams and faults. Nothing may be under way, and no event of before may be used again.
  void reset(int devices) {
    std::lock_guard const hold(mutex_);
    streams_.clear();
    hosts_.assign(static_cast<std::size_t>(devices), {});
    waits_.assign(static_cast<std::size_t>(devices), 0);
    for (int d = 0; d < devices; ++d) streams_.push_back({d, "the default stream of device " + std::to_string(d), {}});
    faults_.clear();
    known_.clear();
    operators_ = 0;
  }

  int add_stream(int device, std::string const& what) {
    std::lock_guard const hold(mutex_);
    int const number = static_cast<int>(streams_.size());
    streams_.push_back({device, what + " " + std::to_string(number) + " of device " + std::to_string(device), {}});
    return number;
  }
  void name_stream(int stream, std::string const& what) {
    std::lock_guard const hold(mutex_);
    auto& s = streams_[static_cast<std::size_t>(stream)];
    s.name = what + " (stream " + std::to_string(stream) + " of device " + std::to_string(s.device) + ")";
  }

  /// The streams of a device.
  std::vector<int> streams_of(int device) {
    std::lock_guard const hold(mutex_);
    std::vector<int> out;
    for (std::size_t s = 0; s < streams_.size(); ++s) {
      if (streams_[s].device == device) out.push_back(static_cast<int>(s));
    }
    return out;
  }

  /// All that the stream was asked for so far.
  clock now(int stream) {
    std::lock_guard const hold(mutex_);
    return after_host(stream);
  }
  /// Orders the stream's later work after `after`.
  void wait(int stream, clock const& after) {
    std::lock_guard const hold(mutex_);
    streams_[static_cast<std::size_t>(stream)].known.join(after);
  }
  /// The host has waited for that: whatever it asks of the device from now on comes after it.
  void host_waited(int device, clock const& after) {
    std::lock_guard const hold(mutex_);
    clock& known = hosts_[static_cast<std::size_t>(device)];
    if (!known.covers(after)) ++waits_[static_cast<std::size_t>(device)];
    known.join(after);
  }
  /// How often the host has waited for operators of the device that it did not know to be over.
  long host_waits(int device) const {
    std::lock_guard const hold(mutex_);
    return waits_[static_cast<std::size_t>(device)];
  }
  /// An operator is asked of a stream.
  void run(int stream, std::string_view name, std::span<touched const> parts) {
    std::lock_guard const hold(mutex_);
    clock& known = after_host(stream);
    access mine{.stream = stream, .number = known.advance(stream), .name = &*names_.emplace(name).first};
    ++operators_;
    for (touched const& part : parts) {
      mine.begin = part.begin;
      mine.end = part.end;
      mine.writes = part.writes;
      mine.owner = part.block->owner;
      look(*part.block, mine, known);
    }
  }

  /// Whether an operator that this stream is asked for now follows all that was done to the memory.
  bool follows_all(int stream, block_history const& block) {
    std::lock_guard const hold(mutex_);
    clock const& known = after_host(stream);
    return std::all_of(block.accesses.begin(), block.accesses.end(),
                       [&](access const& a) { return a.stream == stream || known.covers(a.stream, a.number); });
  }
  bool follows(int stream, int other, std::uint32_t number) {
    std::lock_guard const hold(mutex_);
    return after_host(stream).covers(other, number);
  }

  std::vector<fault> faults() {
    std::lock_guard const hold(mutex_);
    return faults_;
  }
  long operators() {
    std::lock_guard const hold(mutex_);
    return operators_;
  }

 private:
  struct stream_state {
    int device = 0;
    std::string name;
    clock known;
  };

  clock& after_host(int stream) {
    stream_state& s = streams_[static_cast<std::size_t>(stream)];
    s.known.join(hosts_[static_cast<std::size_t>(s.device)]);
    return s.known;
  }

  /// Compares an access with earlier accesses of these bytes; removes earlier ones with which later accesses need no comparison.
  void look(block_history& block, access const& mine, clock const& known) {
    std::erase_if(block.accesses, [&](access const& before) {
      if (before.end <= mine.begin || before.begin >= mine.end) return false;
      bool const ordered = before.stream == mine.stream || known.covers(before.stream, before.number);
      bool const conflict = before.writes || mine.writes;
      if (!ordered && conflict) {
        add(before, mine);
        return true;  // told once
      }
      bool const within = before.begin >= mine.begin && before.end <= mine.end;
      return within && ordered && (mine.writes || (!before.writes && before.stream == mine.stream));
    });
    block.accesses.push_back(mine);
  }

  void add(access const& before, access const& mine) {
    fault found{.first = *before.name,
                .second = *mine.name,
                .first_stream = streams_[static_cast<std::size_t>(before.stream)].name,
                .second_stream = streams_[static_cast<std::size_t>(mine.stream)].name,
                .reused = before.owner != mine.owner,
                .text = {}};
    found.text = found.second + " on " + found.second_stream + (mine.writes ? " writes " : " reads ") +
                 (found.reused ? "memory that was freed and given out again, and that " : "what ") + found.first + " on " +
                 found.first_stream + (before.writes ? " writes" : " reads") +
                 ": the one stream does not wait for the other (it waits for " +
                 std::to_string(streams_[static_cast<std::size_t>(mine.stream)].known.at(before.stream)) +
                 " of its operators, this is number " + std::to_string(before.number) + ")";
    std::string const key = found.first + found.second + found.first_stream + found.second_stream;
    if (faults_.size() < 100 && known_.insert(key).second) faults_.push_back(std::move(found));
  }

  mutable std::mutex mutex_;
  std::vector<stream_state> streams_;
  std::vector<clock> hosts_;  // by device: work for which its host threads have waited
  std::vector<long> waits_;   // by device
  std::set<std::string, std::less<>> names_;
  std::vector<fault> faults_;
  std::set<std::string> known_;  // faults
  long operators_ = 0;
};

}  // namespace accelerator
