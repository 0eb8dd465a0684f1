#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/lower/edges.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/run/comm/gather.hpp>
#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/comm/shard_watch.hpp>
#include <chevron/run/core/compute_streams.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/job_grid.hpp>
#include <chevron/run/core/topology.hpp>

/// \file
/// The contract of transports: messages between pipeline ranks, collectives over groups of ranks, gathers over the world.

namespace chevron {

class transport;
namespace detail {
shard_watch& shards_watched(transport& of);
}

/// One rank's connections to the other ranks. Every transport has this contract, which tests of `contract_subjects.hpp` check:
///
/// - All ranks run the same programs. Each directed edge (sender → receiver, within one pipeline) is one channel that delivers
///   messages in the order of the sends; receives are posted in that order. Sends may be rendezvous: a send need not complete
///   before its receive is posted.
/// - `post_send` and `post_receive` never block. `receive` and `wait_send` block until the deadline at most; they throw
///   `timeout_error` or `peer_lost_error`, which name this rank, the peer, the action and the step.
/// - A cycle of ranks that wait for each other in gathers or texts is reported long before the deadline; so is a cycle of
///   messages if hosts wait, not streams.
/// - The shapes and dtypes of a message must not change until the next `open`: if a sender's tensors have other shapes, it
///   throws `preflight_error` before sending anything, and publishes the error to all ranks.
/// - The transport keeps a sent tensor alive until `wait_send` returned for its slot; the caller must not write to it before.
/// - The caller owns received tensors: the caller may move them out of the span and use them without limit (a microbatch's
///   autograd graph does, until its B or W). The transport must not write into that memory again: where a tensor was moved out,
///   the next receive of the slot allocates new memory.
/// - Peers are pipeline ranks of the same replica and shard; sums, reduce-scatters and gathers of shares run over the replicas
///   of this pipeline rank and shard, or over the shards of this replica and pipeline rank; gathers run over all ranks, in the
///   order of global ranks. Every rank makes the same collective calls in the same order.
/// - Not thread-safe: only one thread calls a transport.
class transport {
 public:
  /// \param where this rank's place in the grid, also stored in `job_grid` for error messages
  explicit transport(chevron::topology const& where) : topology_(where) { detail::job_grid::set(where); }
  virtual ~transport() = default;
  transport(transport const&) = delete;
  transport& operator=(transport const&) = delete;

  chevron::topology const& topology() const { return topology_; }  ///< this rank's place in the grid

  /// Whether a receiver gets the sender's memory itself: then a sender must not write to a sent tensor even after `wait_send`.
  virtual bool is_zero_copy() const { return false; }

  /// Whether the first collective of each size takes long, since it connects: a trainer then calls each before its first step.
  virtual bool connects_at_first_use() const { return false; }

  /// Connects these edges, which are sorted and may be connected already, if the transport has a connection per edge. Called by
  /// all ranks with the same edges, in the same order, before messages are sent along them.
  virtual void connect(std::span<edge const>) {}
  /// Allocates slots for this rank's messages, so that no step allocates. All ranks call `open` before the first step, and
  /// again before they run another program (of an evaluator, of another trainer): counts and shapes may then differ. First
  /// finishes the previous program's unfinished work (`finish_earlier`).
  /// \param program number by `new_program` of the program that sends until the next `open`; 0: a caller that sends once
  void open(slot_counts const& slots, long program = 0) {
    if (program != program_ || program == 0) finish_earlier();
    program_ = program;
    open_slots(slots);
  }
  /// Returns a new, unique number for a program that uses this transport in turn with other programs.
  long new_program() { return ++programs_; }
  /// Whether the last `open` was for this program.
  bool is_open_for(long program) const { return program_ == program; }
  /// Registers `finish`, which another program's `open` calls to end a step whose verdict is pending. Called between runs.
  void finish_before_others(std::weak_ptr<std::function<void()> const> finish) { unfinished_ = std::move(finish); }
  /// Finishes the unfinished work of any program. Collective. Does nothing if no work is unfinished.
  void finish_earlier() {
    if (auto const finish = std::exchange(unfinished_, {}).lock()) (*finish)();
    gather& early = of(gather_slot::split_phase);
    if (early.words == nullptr) return;
    awaited const about = everybody(std::exchange(early.words, nullptr));  // its trainer was destroyed
    parts_.assign(1, early.mine);
    if (topology_.world() > 1) finish_gather(gather_slot::split_phase, about, parts_);
  }
  /// Sets the step's number for later errors. Transports also wait for the sends of first transfers here, and throw a failure
  /// that any rank has published.
  virtual void begin_step(long step) { step_ = step; }
  void slices(int of_plan) { slices_ = of_plan; }  ///< sets the slices per microbatch of the running plan, for errors

  /// Publishes an error that this rank found outside of the transport, and marks this rank as failed. Publishes at once, since
  /// a caller that catches the error may continue without the other ranks. Any thread may call `fail`.
  void fail(error const& found) {
    failed_ = true;
    publish(found);
  }
  /// \throws usage_error if this rank has failed
  void check_usable() const {
    if (!failed_) return;
    throw usage_error(
        "a step or an evaluation failed on this rank before, and no later one can run. Remedy: end this run, and resume from "
        "a checkpoint in a new one",
        {.rank = topology_.global_rank, .step = step_});
  }

  /// The name of the collective call that this rank is in, by `collective_scope` (`save_checkpoint`); null in a training step.
  char const* doing() const { return doing_; }

  /// Starts sending `values`: dense tensors on the device `memory()`, or undefined ones.
  /// \param peer pipeline rank that receives \param what the SEND action of the program
  /// \throws preflight_error if shapes or dtypes differ from the message's first; usage_error for other kinds of tensors
  virtual void post_send(int peer, action what, std::uint16_t send_slot, std::span<at::Tensor const> values) = 0;
  /// Starts receiving into a slot. \param peer pipeline rank that sends \param what the RECV action of the program
  virtual void post_receive(int peer, action what, std::uint16_t receive_slot) = 0;
  /// Waits for the message whose receive was posted in this slot.
  /// \returns the message's tensors; the caller may move them out until the next `post_receive` of the slot
  virtual std::span<at::Tensor> receive(std::uint16_t receive_slot) = 0;
  /// Waits until the send in this slot is complete, and releases its tensors.
  virtual void wait_send(std::uint16_t send_slot) = 0;

  /// Sets whether a receive is enqueued on the device only when its message is needed, ordered as if `post_receive` had
  /// enqueued it. When a device frees memory, the host waits for all work in its streams: if that includes a receive whose
  /// sender waits for a later call of this rank, the wait never ends. Each rank decides alone. No effect if no device receives.
  virtual void receive_late(bool) {}

  /// The device whose tensors this transport sends and sums; the CPU if the transport accepts tensors of any device.
  virtual at::Device memory() const { return at::kCPU; }

  /// Returns a stream of `where` on which only this rank computes; by default the next stream of LibTorch's pool, which reuses
  /// streams after 32, so that two ranks of a process, or a rank and user code, may get the same stream.
  virtual compute_lane make_lane(at::Device where) { return detail::pooled_lane(where); }

  /// Starts to sum `values` in place over the members of a group, by default the replicas; does nothing with one member.
  /// \param bucket number, from 0, of a collective over the group; each number has at most one collective under way
  /// \param values contiguous; of the same sizes and dtype on all members
  /// \throws usage_error if `values` is not contiguous
  void start_all_reduce(int bucket, at::Tensor values, rank_group among = rank_group::replicas) {
    start(topology_.plain(among), group_collective::all_reduce, bucket, std::move(values), {});
  }
  /// Starts to sum `values` over the replicas so that each replica receives the sums of its own share. The other shares of
  /// `values` are unspecified afterwards.
  /// \param bucket as in `start_all_reduce`
  /// \param cut replicas + 1 offsets in elements, ascending, from 0 to values.numel(): replica r's share is [cut[r], cut[r+1]);
  /// equal on all replicas; a share may be empty
  /// \throws usage_error if `values` is not contiguous, or `cut` is invalid
  void start_reduce_scatter(int bucket, at::Tensor values, std::span<std::int64_t const> cut) {
    start(rank_group::replicas, group_collective::reduce_scatter, bucket, std::move(values), cut);
  }
  /// Starts a gather of shares over the members of a group, by default the replicas: afterwards [cut[r], cut[r+1]) has member
  /// r's bits on every member (-0.0 and NaN payloads too). Of any dtype; parameters and errors as in `start_reduce_scatter`.
  void start_share_gather(int bucket, at::Tensor values, std::span<std::int64_t const> cut,
                          rank_group among = rank_group::replicas) {
    start(topology_.plain(among), group_collective::share_gather, bucket, std::move(values), cut);
  }
  /// Waits for the collective that was started with this bucket number (a sum, a reduce-scatter or a gather of shares).
  void wait_bucket(int bucket, rank_group among = rank_group::replicas) {
    if (topology_.members(among) > 1) wait_collective(topology_.plain(among), bucket);
  }

  /// Runs one collective over a group of ranks, the shards of this stage or its expert group, and waits for its end. Called
  /// within a stage's forward or backward to combine tensors of several ranks (shard_group.hpp), in the same order on all
  /// members. Does nothing with one member. All have the number 0, since each ends before the next one starts.
  /// \param values contiguous; of the same sizes and dtype on all members
  /// \param cut members + 1 offsets as in `start_reduce_scatter`; empty for a sum
  /// \throws usage_error if `values` is not contiguous, or `cut` is invalid
  void over_group(rank_group among, group_collective what, at::Tensor values, std::span<std::int64_t const> cut = {}) {
    among = topology_.plain(among);
    start(among, what, 0, std::move(values), cut);
    if (topology_.members(among) > 1) wait_collective(among, 0);
  }

  /// Gathers numbers of all ranks. Waits for all ranks, even if `mine` is empty.
  /// \param mine the same size on every rank
  /// \param all  filled by global rank: world × mine.size() numbers
  /// \throws usage_error if `all` has another size; preflight_error if ranks are in different calls or gather different sizes
  void all_gather(std::span<double const> mine, std::span<double> all) {
    check_room(mine.size_bytes(), all.size_bytes());
    begin_gather(gather_slot::blocking, std::as_bytes(mine), in_words("all_gather"));
    end_gather(gather_slot::blocking, std::as_writable_bytes(all));
  }
  /// Starts an `all_gather` of a copy of `mine`, without waiting. `finish_all_gather` writes the numbers. Only one such gather
  /// may be under way. Between the two calls, all ranks may make other collective calls, in the same order.
  void start_all_gather(std::span<double const> mine) {
    begin_gather(gather_slot::split_phase, std::as_bytes(mine), "all_gather of the last step's figures");
  }
  /// Waits for the gather of `start_all_gather`. \param all filled by global rank: world × numbers of `start_all_gather`
  /// \throws usage_error without a `start_all_gather` before, or if `all` has another size; preflight_error as `all_gather`
  void finish_all_gather(std::span<double> all) {
    if (of(gather_slot::split_phase).words == nullptr) {
      throw usage_error("finish_all_gather finds no gather under way. Remedy: start_all_gather before it",
                        {.rank = topology_.global_rank, .step = step_});
    }
    check_room(of(gather_slot::split_phase).mine.size() - sizeof(detail::gather_header), all.size_bytes());
    end_gather(gather_slot::split_phase, std::as_writable_bytes(all));
  }
  /// Gathers a text `mine` of any length from each rank, for preflight and reports. \returns the texts by global rank
  std::vector<std::string> all_gather_text(std::string const& mine) {
    if (topology_.world() == 1) return {mine};
    return gather_text(mine, everybody(in_words("all_gather of texts")));
  }

  /// Sets the longest time that a wait may take, from this call on; initially 5 minutes.
  virtual void deadline(std::chrono::milliseconds longest_wait) { deadline_ = longest_wait; }
  std::chrono::milliseconds deadline() const { return deadline_; }  ///< longest time that a wait may take

 protected:
  long step() const { return step_; }
  /// Describes a wait for a call of all ranks. \param words name of the call, a literal
  awaited everybody(char const* words) const { return {.words = words, .step = step_}; }
  /// Describes a wait for the collective that was started last in this bucket.
  awaited collective_at(rank_group among, int bucket) const {
    auto const b = static_cast<std::size_t>(bucket);
    auto const& started = buckets_[static_cast<std::size_t>(among)];
    return everybody(detail::words_of(b < started.size() ? started[b] : group_collective::all_reduce, among));
  }
  /// Describes a wait for a message.
  awaited message(int peer, action what) const {
    return {.peer = topology_.global_of(peer), .what = what, .step = step_, .slices = slices_, .within = doing_};
  }

  /// Publishes a failure to the other ranks. Any thread may call it.
  virtual void publish(error const&) {}

  /// Allocates slots for messages, and drops the shapes that ranks agreed on. Called while no message is under way.
  virtual void open_slots(slot_counts const& slots) = 0;

  /// Starts a collective over a group with several members; `wait_collective` waits for its end.
  /// \param values contiguous
  /// \param cut offsets of shares, checked; empty for a sum; valid only during the call
  virtual void start_collective(rank_group among, group_collective what, int bucket, at::Tensor values,
                                std::span<std::int64_t const> cut) = 0;
  virtual void wait_collective(rank_group among, int bucket) = 0;

  /// Starts a gather of `mine` from all ranks; not called with one rank. If ranks gather different sizes, the headers after
  /// `finish_gather` differ, or the deadline ends the gather.
  /// \param mine valid and unchanged until `finish_gather` has returned
  virtual void start_gather(gather_slot slot, std::span<std::byte const> mine, awaited const& about) = 0;
  /// Waits for the gather of a slot.
  /// \param parts filled by global rank; valid until the next gather in this slot starts. A part begins with its rank's bytes;
  /// if ranks gather different sizes, at least with its rank's header
  virtual void finish_gather(gather_slot slot, awaited const& about, std::vector<std::span<std::byte const>>& parts) = 0;
  /// Gathers texts in two gathers: of their lengths, then of texts padded to the longest. Transports in which two gathers of
  /// different sizes must never meet override it.
  virtual std::vector<std::string> gather_text(std::string const& mine, awaited const& about) {
    auto const world = static_cast<std::size_t>(topology_.world());
    std::vector<std::uint64_t> lengths(world);
    std::uint64_t const length = mine.size();
    begin_gather(gather_slot::blocking, std::as_bytes(std::span(&length, 1)), about.words);
    end_gather(gather_slot::blocking, std::as_writable_bytes(std::span(lengths)));
    std::size_t const longest = *std::max_element(lengths.begin(), lengths.end());
    std::string padded = mine, all(longest * world, '\0');
    padded.resize(longest);
    begin_gather(gather_slot::blocking, std::as_bytes(std::span(padded)), about.words);
    end_gather(gather_slot::blocking, std::as_writable_bytes(std::span(all)));
    std::vector<std::string> out;
    for (std::size_t r = 0; r < world; ++r) out.push_back(all.substr(r * longest, lengths[r]));
    return out;
  }

 private:
  friend class collective_scope;
  friend detail::shard_watch& detail::shards_watched(transport&);

  struct gather {
    std::vector<std::byte> mine;  // header, then this rank's bytes
    char const* words = nullptr;  // names the call; null: no gather is under way
  };

  void start(rank_group among, group_collective what, int bucket, at::Tensor values, std::span<std::int64_t const> cut) {
    if (topology_.members(among) == 1) return;
    detail::check_collective(among, what, bucket, values, cut, topology_.members(among));
    auto const b = static_cast<std::size_t>(bucket);
    auto& started = buckets_[static_cast<std::size_t>(among)];
    if (started.size() <= b) started.resize(b + 1);
    started[b] = what;
    start_collective(among, what, bucket, std::move(values), cut);
  }

  char const* in_words(char const* otherwise) const { return doing_ != nullptr ? doing_ : otherwise; }
  gather& of(gather_slot slot) { return gathers_[static_cast<std::size_t>(slot)]; }

  /// \param mine bytes of this rank \param all bytes of the buffer for all ranks
  void check_room(std::size_t mine, std::size_t all) const {
    auto const world = static_cast<std::size_t>(topology_.world());
    if (all == mine * world) return;
    auto const numbers = [](std::size_t bytes) { return std::to_string(bytes / sizeof(double)); };
    throw usage_error("gather of " + numbers(mine) + " numbers needs room for " + std::to_string(world) +
                          " times as many, not for " + numbers(all) + ". Remedy: room for " + numbers(mine * world),
                      {.rank = topology_.global_rank, .step = step_});
  }
  void begin_gather(gather_slot slot, std::span<std::byte const> mine, char const* words) {
    gather& one = of(slot);
    one.words = words;
    detail::put_header(one.mine, mine, everybody(words), program_);
    if (topology_.world() > 1) start_gather(slot, one.mine, everybody(words));
  }
  /// \param all room for world × the bytes of this rank
  void end_gather(gather_slot slot, std::span<std::byte> all) {
    gather& one = of(slot);
    awaited const about = everybody(std::exchange(one.words, nullptr));
    parts_.assign(1, one.mine);
    if (topology_.world() > 1) finish_gather(slot, about, parts_);
    auto to = all.begin();
    for (std::size_t r = 0; r < parts_.size(); ++r) {
      auto const part = detail::without_header(parts_[r], static_cast<int>(r), one.mine, topology_.global_rank, about);
      to = std::copy(part.begin(), part.end(), to);
    }
  }

  chevron::topology topology_;
  long step_ = -1;
  int slices_ = 1;
  std::chrono::milliseconds deadline_{300000};
  char const* doing_ = nullptr;
  long programs_ = 0, program_ = 0;  // `programs_`: count of `new_program`; `program_`: program of the last `open`
  std::weak_ptr<std::function<void()> const> unfinished_;
  std::atomic<bool> failed_{false};
  std::array<gather, 2> gathers_;  // indexed by gather_slot
  std::vector<std::span<std::byte const>> parts_;
  std::array<std::vector<group_collective>, detail::group_count> buckets_;  // the last started kind, by group and bucket
  detail::shard_watch shards_watched_;
};

namespace detail {
/// The records of a rank's tensors that shards compare at the end of a step.
inline shard_watch& shards_watched(transport& of) { return of.shards_watched_; }
}  // namespace detail

/// Names the collective call that a rank is in while the scope lives; the innermost scope counts. Errors quote the name: `rank 0
/// is in save_checkpoint`.
class collective_scope {
 public:
  /// \param name a literal
  collective_scope(transport& comm, char const* name) : comm_(comm), before_(std::exchange(comm.doing_, name)) {}
  ~collective_scope() { comm_.doing_ = before_; }  ///< restores the outer scope's name
  collective_scope(collective_scope const&) = delete;
  collective_scope& operator=(collective_scope const&) = delete;

 private:
  transport& comm_;
  char const* before_;
};

}  // namespace chevron
