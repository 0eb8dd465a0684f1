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
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/job_grid.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/device/compute_streams.hpp>
#include <chevron/run/failure/failure.hpp>

/// \file
/// The contract of transports: messages between pipeline ranks, collectives over groups of ranks, gathers over the world.

namespace chevron {

/// One rank's connections. The contract is the same for every transport; tests/run/comm/contract_test.cpp checks each against it:
///
/// - All ranks run the same program set; each directed edge (sender → receiver, within one pipeline) is one channel that
///   delivers in the order of the sends, and receives are posted in that order. Sends may be rendezvous: a send need not
///   complete before its receive is posted.
/// - `post_send` and `post_receive` never block. `receive` and `wait_send` block until the deadline at most: they throw
///   `timeout_error`, or `peer_lost_error`, naming this rank, the peer, the action and the step.
/// - A cycle of ranks that wait for each other in gathers or texts is reported long before the deadline; a cycle of messages too,
///   if hosts wait for it and not streams.
/// - A message keeps its shapes and dtypes until the transport is opened anew: a sender with tensors of other shapes throws
///   `preflight_error` before anything is sent, and the error is published to all ranks.
/// - The transport keeps a sent tensor alive until `wait_send` returned for its slot; the caller must not write to it before.
/// - The caller owns received tensors: it moves them out of the span and keeps them without limit (the graph of the microbatch
///   does, until its B or W). The transport must not write into that memory again: the next receive of the same slot gets fresh
///   memory wherever a tensor was taken.
/// - Peers are pipeline ranks of the same replica and shard; sums, reduce-scatters and gathers of shares run over the replicas of
///   this pipeline rank and shard, or over the shards of this replica and pipeline rank; gathers run over the world, in the order
///   of global ranks. Every rank makes the same collective calls in the same order.
/// - Not thread-safe: one thread drives one transport.
class transport {
 public:
  /// \param where place in the grid of ranks, kept by `job_grid` for error reports
  explicit transport(chevron::topology const& where) : topology_(where) { detail::job_grid::set(where); }
  virtual ~transport() = default;
  transport(transport const&) = delete;
  transport& operator=(transport const&) = delete;

  chevron::topology const& topology() const { return topology_; }  ///< this rank's place in the grid

  /// Whether a receiver gets the sender's own memory. A sender then never writes to a sent tensor again, also after `wait_send`.
  virtual bool is_zero_copy() const { return false; }

  /// Whether the first collective of each size takes long, since it connects. A trainer then makes each before its first step.
  virtual bool connects_at_first_use() const { return false; }

  /// Connects edges, sorted, where a transport has connections of each; known edges may be among them. Called by all ranks alike,
  /// in one order, before messages go along these edges.
  virtual void connect(std::span<edge const>) {}
  /// Makes room for this rank's messages, so that no step allocates. Called before the first step, and again, by all ranks alike,
  /// when another program (of an evaluator, of another trainer) takes its turn: counts and shapes may then differ. Finishes the
  /// unfinished work of the program before (`finish_earlier`).
  /// \param program number by `new_program`, whose messages go until the next `open`; 0: a caller that sends once
  void open(slot_counts const& slots, long program = 0) {
    if (program != program_ || program == 0) finish_earlier();
    program_ = program;
    open_slots(slots);
  }
  /// A number for one more program whose messages this transport carries in turn with others'. No number is given twice.
  long new_program() { return ++programs_; }
  /// Whether this program's messages were the last that the transport carried.
  bool is_open_for(long program) const { return program_ == program; }
  /// Registers `finish`, called before another program's turn: it ends a step that waits for its verdict. Called between runs.
  void finish_before_others(std::weak_ptr<std::function<void()> const> finish) { unfinished_ = std::move(finish); }
  /// Finishes the unfinished work of any program. Collective. Does nothing if no work is unfinished.
  void finish_earlier() {
    if (auto const finish = std::exchange(unfinished_, {}).lock()) (*finish)();
    gather& early = of(gather_slot::split_phase);
    if (early.words == nullptr) return;
    awaited const about = everybody(std::exchange(early.words, nullptr));  // its trainer has gone
    parts_.assign(1, early.mine);
    if (topology_.world() > 1) finish_gather(gather_slot::split_phase, about, parts_);
  }
  /// Starts a step, whose number later errors name. Transports also end the first sends of messages here, and throw a failure
  /// that any rank has published.
  virtual void begin_step(long step) { step_ = step; }
  void slices(int of_plan) { slices_ = of_plan; }  ///< slices of a microbatch in the running plan: errors name messages by them

  /// Publishes an error that this rank has found outside of the transport, and marks this rank as failed. The other ranks are
  /// told at once, since a caller that catches the error may go on without them. From any thread.
  void fail(error const& found) {
    failed_ = true;
    publish(found);
  }
  /// \throws usage_error if this rank has failed
  void check_usable() const {
    if (!failed_) return;
    throw usage_error(
        "a step or an evaluation failed on this rank before, and nothing can be run after it. Remedy: end, and go on "
        "from a checkpoint in a new run",
        {.rank = topology_.global_rank, .step = step_});
  }

  /// The name of the collective call that this rank is in, by `collective_scope` (`save_checkpoint`); null in a training step.
  char const* doing() const { return doing_; }

  /// Starts sending `values`: dense tensors on the device `memory()`, or undefined ones.
  /// \param peer pipeline rank that receives \param what the SEND action of the program
  /// \throws preflight_error where shapes or dtypes differ from the message's first ones; usage_error for other kinds of tensors
  virtual void post_send(int peer, action what, std::uint16_t send_slot, std::span<at::Tensor const> values) = 0;
  /// Starts receiving into a slot. \param peer pipeline rank that sends \param what the RECV action of the program
  virtual void post_receive(int peer, action what, std::uint16_t receive_slot) = 0;
  /// Waits for the message that was posted to this slot.
  /// \returns its tensors; the caller may move them out until the next `post_receive` of the slot
  virtual std::span<at::Tensor> receive(std::uint16_t receive_slot) = 0;
  /// Waits until the transfer in this slot is complete, and releases its tensors.
  virtual void wait_send(std::uint16_t send_slot) = 0;

  /// Whether `receive` of a posted slot would return without a wait. False also where the transport cannot tell. Never blocks.
  virtual bool has_arrived(std::uint16_t) { return false; }
  /// Whether `wait_send` of this slot would return without a wait. False also where the transport cannot tell. Never blocks.
  virtual bool is_sent(std::uint16_t) { return false; }

  /// Sets whether a receive is enqueued on the device only when its message is needed, ordered as if `post_receive` had enqueued
  /// it. A device that frees memory makes the host wait for all work in its streams: a receive whose sender needs a later call of
  /// this rank would never end. Each rank decides alone. Without effect where no device receives.
  virtual void receive_late(bool) {}

  /// The device whose tensors this transport sends and sums; main memory where a transport takes tensors of any device.
  virtual at::Device memory() const { return at::kCPU; }

  /// A compute stream of this rank alone; the next stream of LibTorch's pool where a transport makes none. The pool reuses
  /// streams after 32, so two ranks of a process, or a rank and its user, may get the same one.
  virtual detail::compute_lane make_lane(at::Device where) { return detail::pooled_lane(where); }

  /// Starts summing `values` in place over the members of a group, by default the replicas; does nothing with one member.
  /// \param bucket numbers the collectives under way over replicas, from 0: one at a time
  /// \param values contiguous; of the same sizes and dtype on all replicas
  /// \throws usage_error where `values` is not contiguous
  void start_all_reduce(int bucket, at::Tensor values, rank_group among = rank_group::replicas) {
    start(topology_.plain(among), group_collective::all_reduce, bucket, std::move(values), {});
  }
  /// Starts summing `values` over the replicas so that each replica has the sums of its own share. The content of other shares is
  /// unspecified afterwards.
  /// \param bucket as of `start_all_reduce`
  /// \param cut replicas + 1 offsets in elements, ascending, from 0 to values.numel(): replica r's share is [cut[r], cut[r+1]);
  /// equal on all replicas; a share may be empty
  /// \throws usage_error where `values` is not contiguous, or `cut` no such cut
  void start_reduce_scatter(int bucket, at::Tensor values, std::span<std::int64_t const> cut) {
    start(rank_group::replicas, group_collective::reduce_scatter, bucket, std::move(values), cut);
  }
  /// Starts a gather of shares over the replicas: afterwards each replica has at [cut[r], cut[r+1]) the bits that replica r had
  /// there (-0.0 and NaN payloads too). Of any dtype; parameters and errors as of `start_reduce_scatter`.
  void start_share_gather(int bucket, at::Tensor values, std::span<std::int64_t const> cut) {
    start(rank_group::replicas, group_collective::share_gather, bucket, std::move(values), cut);
  }
  /// Waits for the collective that was started with this bucket number (a sum, a reduce-scatter or a gather of shares).
  void wait_bucket(int bucket, rank_group among = rank_group::replicas) {
    if (topology_.members(among) > 1) wait_collective(topology_.plain(among), bucket);
  }

  /// Runs one collective over a group of ranks, the shards of this stage or its expert group, from start to end. A stage's
  /// forward or backward calls it where it needs numbers of other ranks (shard_group.hpp), in the same order on all members. Does
  /// nothing with one member.
  /// \param values contiguous; of the same sizes and dtype on all members
  /// \param cut members + 1 offsets as for the replicas; empty for a sum
  /// \throws usage_error where `values` is not contiguous, or `cut` no such cut
  void over_group(rank_group among, group_collective what, at::Tensor values, std::span<std::int64_t const> cut = {}) {
    among = topology_.plain(among);
    start(among, what, 0, std::move(values), cut);
    if (topology_.members(among) > 1) wait_collective(among, 0);
  }

  /// Gathers numbers of all ranks. Blocks, and waits for all ranks also where `mine` is empty.
  /// \param mine the same size on every rank
  /// \param all  filled by global rank: world × mine.size() numbers
  /// \throws usage_error if `all` has another size; preflight_error if ranks are in different calls or gather other sizes
  void all_gather(std::span<double const> mine, std::span<double> all) {
    check_room(mine.size_bytes(), all.size_bytes());
    begin_gather(gather_slot::blocking, std::as_bytes(mine), in_words("all_gather"));
    end_gather(gather_slot::blocking, std::as_writable_bytes(all));
  }
  /// First half of an `all_gather`, which does not wait: `finish_all_gather` gives the values that `mine` had here.
  /// One such gather is under way at a time; other collective calls may come between its halves, on all ranks alike.
  void start_all_gather(std::span<double const> mine) {
    begin_gather(gather_slot::split_phase, std::as_bytes(mine), "all_gather of what decides the last step");
  }
  /// Second half: waits for all ranks. \param all filled by global rank: world × numbers of `start_all_gather`
  /// \throws usage_error without a `start_all_gather` before, or where `all` has another size; preflight_error as `all_gather`
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

  /// Sets the longest time that a wait may take, 5 minutes at first.
  void deadline(std::chrono::milliseconds longest_wait) { deadline_ = longest_wait; }
  std::chrono::milliseconds deadline() const { return deadline_; }  ///< longest time that a wait may take

 protected:
  long step() const { return step_; }
  /// A wait for a call of all ranks. \param words a literal that names the call
  awaited everybody(char const* words) const { return {.words = words, .step = step_}; }
  /// A wait for the collective that was started last with this number.
  awaited collective_at(rank_group among, int bucket) const {
    auto const b = static_cast<std::size_t>(bucket);
    auto const& started = buckets_[static_cast<std::size_t>(among)];
    return everybody(detail::words_of(b < started.size() ? started[b] : group_collective::all_reduce, among));
  }
  /// A wait for a message.
  awaited message(int peer, action what) const {
    return {.peer = topology_.global_of(peer), .what = what, .step = step_, .slices = slices_, .within = doing_};
  }

  /// Publishes a failure to the other ranks. From any thread.
  virtual void publish(error const&) {}

  /// Allocates slots for messages, and forgets the shapes that ranks agreed on. Called while no message is under way.
  virtual void open_slots(slot_counts const& slots) = 0;

  /// The two halves of a collective over a group with several members.
  /// \param values contiguous
  /// \param cut offsets of shares, checked; empty for a sum; valid only during the call
  virtual void start_collective(rank_group among, group_collective what, int bucket, at::Tensor values,
                                std::span<std::int64_t const> cut) = 0;
  virtual void wait_collective(rank_group among, int bucket) = 0;

  /// Starts a gather of `mine` from all ranks. Not called if there is only one. If ranks gather different sizes, they are
  /// refused, or the wait ends by the deadline.
  /// \param mine valid and unchanged until `finish_gather` has returned
  virtual void start_gather(gather_slot slot, std::span<std::byte const> mine, awaited const& about) = 0;
  /// Waits for the gather of a slot.
  /// \param parts filled by global rank; valid until the next gather in this slot starts. A part begins with its rank's bytes;
  /// where ranks brought different sizes, with its rank's header at least
  virtual void finish_gather(gather_slot slot, awaited const& about, std::vector<std::span<std::byte const>>& parts) = 0;
  /// Gathers texts in two gathers: of their lengths, then of texts padded to the longest. Transports whose gathers must never
  /// meet gathers of another size override it.
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

  /// \param mine bytes of this rank \param all bytes of the room for all ranks
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
  long programs_ = 0, program_ = 0;  // `programs_`: numbers given so far; `program_`: the program whose messages are carried now
  std::weak_ptr<std::function<void()> const> unfinished_;
  std::atomic<bool> failed_{false};
  std::array<gather, 2> gathers_;  // by slot
  std::vector<std::span<std::byte const>> parts_;
  std::array<std::vector<group_collective>, detail::group_count> buckets_;  // the last started kind, by group and bucket
};

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
