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
/// How tensors get from rank to rank.

namespace chevron {

/// One rank's connections. The contract, the same for every transport (tests/run/comm/contract_test.cpp asks it of each):
///
/// - All ranks run the same program set; each directed edge (sender → receiver, within one pipeline) is one channel that
///   delivers in the order of the sends, and receives are posted in that order. Sends may be rendezvous: a send need not
///   complete before its receive is posted.
/// - `post_send` and `post_receive` never block. `receive` and `wait_send` block, but never past the deadline: they throw
///   `timeout_error`, or `peer_lost_error`, naming this rank, the peer, the action and the step.
/// - Ranks that wait for each other in gathers and texts say so long before the deadline, and in messages, too, where it is the
///   ranks that wait, and not their streams.
/// - A message keeps its shapes and dtypes until the transport is opened anew: a sender whose tensors are others throws
///   `preflight_error`, before anything is sent, and all ranks are told.
/// - A sent tensor is kept alive by the transport until `wait_send` returned for its slot and must not be written to before.
/// - Received tensors are the caller's: it moves them out of the span and keeps them as long as it likes (the graph of the
///   microbatch does, until its B or W), so the transport must not write into that memory again: the next receive of the same
///   slot gets fresh memory wherever a tensor was taken.
/// - Peers are pipeline ranks of the same replica and shard; sums, reduce-scatters and gathers of shares run over the replicas of
///   this pipeline rank and shard, or over the shards of this replica and pipeline rank; gathers over the world, in the order of
///   global ranks. Every rank makes the same collective calls in the same order.
/// - Not thread-safe: one thread drives one transport.
class transport {
 public:
  explicit transport(chevron::topology const& where) : topology_(where) { detail::job_grid::set(where); }
  virtual ~transport() = default;
  transport(transport const&) = delete;
  transport& operator=(transport const&) = delete;

  chevron::topology const& topology() const { return topology_; }

  /// Whether a receiver gets the sender's own memory: then a sender never writes there again, also after `wait_send`.
  virtual bool is_zero_copy() const { return false; }

  /// Whether the first sum or gather of a size takes long: then a trainer makes each once before its first step.
  virtual bool connects_at_first_use() const { return false; }

  /// Called by all ranks alike, in one order, before messages go along these edges (sorted; some may be known already): what
  /// needs connections of its own makes them here.
  virtual void connect(std::span<edge const>) {}
  /// Called before the first step with this rank's slot counts, so that nothing is allocated later; and again, by all ranks
  /// alike, when another program (of an evaluator, of another trainer) takes its turn: counts and shapes may then differ. What
  /// the program before has left unfinished is finished first.
  /// \param program whose messages go until the next `open`, as `new_program` numbered it; 0: a caller's that sends once
  void open(slot_counts const& slots, long program = 0) {
    if (program != program_ || program == 0) finish_earlier();
    program_ = program;
    open_slots(slots);
  }
  /// A number for one more program whose messages this transport carries in turn with others'. It is never given twice.
  long new_program() { return ++programs_; }
  /// Whether the messages that went last were this program's.
  bool is_open_for(long program) const { return program_ == program; }
  /// Between two runs, has `finish` called before another program's turn: for a step whose verdict is awaited.
  void finish_before_others(std::weak_ptr<std::function<void()> const> finish) { unfinished_ = std::move(finish); }
  /// Finishes now what any program has left unfinished. Collective. Does nothing where that was done.
  void finish_earlier() {
    if (auto const finish = std::exchange(unfinished_, {}).lock()) (*finish)();
    gather& early = of(gather_slot::split_phase);
    if (early.words == nullptr) return;
    awaited const about = everybody(std::exchange(early.words, nullptr));  // its trainer has gone
    parts_.assign(1, early.mine);
    if (topology_.world() > 1) finish_gather(gather_slot::split_phase, about, parts_);
  }
  /// Called at the start of each step: for errors, and for what is learned in the first one.
  virtual void begin_step(long step) { step_ = step; }

  /// This rank has found an error that is none of the transport's: the others are told now, since whoever catches the error may
  /// go on without them. From any thread.
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

  /// What this rank is doing with the others, in the words of whoever called it: `save_checkpoint`. Null in a training step.
  char const* doing() const { return doing_; }

  /// Starts sending; `what` is the SEND action, as the program has it.
  virtual void post_send(int peer, action what, std::uint16_t send_slot, std::span<at::Tensor const> values) = 0;
  /// Starts receiving into a slot; `what` is the RECV action, as the program has it.
  virtual void post_receive(int peer, action what, std::uint16_t receive_slot) = 0;
  /// Waits for what was posted to this slot and gives it.
  virtual std::span<at::Tensor> receive(std::uint16_t receive_slot) = 0;
  /// Waits until the transfer in this slot is complete and lets its tensors go.
  virtual void wait_send(std::uint16_t send_slot) = 0;

  /// Whether `receive` of this slot, of a message that was posted, would give it without a wait; false where that cannot be told.
  /// Never blocks.
  virtual bool has_arrived(std::uint16_t) { return false; }
  /// Whether `wait_send` of this slot would not wait; false where that cannot be told. Never blocks.
  virtual bool is_sent(std::uint16_t) { return false; }

  /// Whether receives are asked of the device only when their messages are needed, in the place of the stream where
  /// `post_receive` stood. A device that gives memory back makes the host wait for all work in its streams: a receive whose
  /// sender needs a later call of this rank would never end. Each rank decides for itself. Without effect where no device
  /// receives.
  virtual void receive_late(bool) {}

  /// The device whose tensors this transport sends and sums; main memory where it takes those of any device.
  virtual at::Device memory() const { return at::kCPU; }

  /// A stream to compute on, of this rank alone; the next of LibTorch's pool where a transport makes none. The pool goes round
  /// after 32, so that two ranks of a process, or a rank and its user, may get one stream.
  virtual compute_lane make_lane(at::Device where) { return pooled_lane(where); }

  /// Starts summing `values` in place over the replicas; nothing with one replica.
  /// \param bucket numbers the collectives under way over replicas, from 0: one at a time
  /// \param values contiguous; of the same sizes and dtype on all replicas
  /// \throws usage_error where `values` is not contiguous
  void start_all_reduce(int bucket, at::Tensor values, rank_group among = rank_group::replicas) {
    start(topology_.plain(among), group_collective::all_reduce, bucket, std::move(values), {});
  }
  /// Starts summing `values` over the replicas so that each has the sums of its own share; what it then holds elsewhere is
  /// unspecified.
  /// \param cut replicas + 1 offsets in elements, ascending, from 0 to values.numel(): replica r's share is [cut[r], cut[r+1]);
  /// equal on all replicas; a share may be empty
  /// \throws usage_error where `values` is not contiguous, or `cut` no such cut
  void start_reduce_scatter(int bucket, at::Tensor values, std::span<std::int64_t const> cut) {
    start(rank_group::replicas, group_collective::reduce_scatter, bucket, std::move(values), cut);
  }
  /// Starts giving every replica's share to all: afterwards each replica has at [cut[r], cut[r+1]) what replica r had there, to
  /// the last bit (-0.0, NaN payloads). Of any dtype; otherwise as a reduce-scatter.
  void start_share_gather(int bucket, at::Tensor values, std::span<std::int64_t const> cut) {
    start(rank_group::replicas, group_collective::share_gather, bucket, std::move(values), cut);
  }
  /// Waits for the collective started with this number (a sum, a reduce-scatter or a gather of shares).
  void wait_bucket(int bucket, rank_group among = rank_group::replicas) {
    if (topology_.members(among) > 1) wait_collective(topology_.plain(among), bucket);
  }

  /// A collective over the shards of this stage, or over its expert group, from its start to its end, of one kind as over the
  /// replicas. Called where a stage's forward or backward needs other ranks' numbers (shard_group.hpp), in the same order on all
  /// members. Nothing with one member.
  /// \param values contiguous; of the same sizes and dtype on all members
  /// \param cut members + 1 offsets as for the replicas; empty for a sum
  /// \throws usage_error where `values` is not contiguous, or `cut` no such cut
  void over_group(rank_group among, group_collective what, at::Tensor values, std::span<std::int64_t const> cut = {}) {
    among = topology_.plain(among);
    start(among, what, 0, std::move(values), cut);
    if (topology_.members(among) > 1) wait_collective(among, 0);
  }

  /// Everybody's numbers.
  /// \param mine as many on every rank; none is allowed, and waits for all ranks nevertheless
  /// \param all  by global rank: world × mine.size() numbers
  /// \throws usage_error where `all` has another size; preflight_error where ranks are in different calls or bring different
  /// sizes
  void all_gather(std::span<double const> mine, std::span<double> all) {
    check_room(mine.size_bytes(), all.size_bytes());
    begin_gather(gather_slot::blocking, std::as_bytes(mine), in_words("all_gather"));
    end_gather(gather_slot::blocking, std::as_writable_bytes(all));
  }
  /// The same in two halves: what `mine` was at the start is everybody's at the end, and nobody waits in between. One such gather
  /// is under way at a time; other collective calls may come between its halves, on all ranks alike.
  /// \throws usage_error in the second half, where there was no first
  void start_all_gather(std::span<double const> mine) {
    begin_gather(gather_slot::split_phase, std::as_bytes(mine), "all_gather of what decides the last step");
  }
  void finish_all_gather(std::span<double> all) {
    if (of(gather_slot::split_phase).words == nullptr) {
      throw usage_error("finish_all_gather finds no gather under way. Remedy: start_all_gather before it",
                        {.rank = topology_.global_rank, .step = step_});
    }
    check_room(of(gather_slot::split_phase).mine.size() - sizeof(detail::gather_header), all.size_bytes());
    end_gather(gather_slot::split_phase, std::as_writable_bytes(all));
  }
  /// Everybody's text of any length, by global rank. For preflight and reports, not for the step.
  std::vector<std::string> all_gather_text(std::string const& mine) {
    if (topology_.world() == 1) return {mine};
    return gather_text(mine, everybody(in_words("all_gather of texts")));
  }

  void deadline(std::chrono::milliseconds longest_wait) { deadline_ = longest_wait; }
  std::chrono::milliseconds deadline() const { return deadline_; }

 protected:
  long step() const { return step_; }
  /// A wait for what all ranks do together.
  awaited everybody(char const* words) const { return {.words = words, .step = step_}; }
  /// A wait for the collective that was started last with this number.
  awaited collective_at(rank_group among, int bucket) const {
    auto const b = static_cast<std::size_t>(bucket);
    auto const& started = buckets_[static_cast<std::size_t>(among)];
    return everybody(detail::words_of(b < started.size() ? started[b] : group_collective::all_reduce, among));
  }
  /// A wait for a message.
  awaited message(int peer, action what) const {
    return {.peer = topology_.global_of(peer), .what = what, .step = step_, .within = doing_};
  }

  /// Tells the other ranks. From any thread.
  virtual void publish(error const&) {}

  /// Makes room for so many messages under way, with nothing under way, and forgets shapes that ranks agreed on.
  virtual void open_slots(slot_counts const& slots) = 0;

  /// The two halves of a collective over a group, which has several members; `values` is contiguous.
  /// \param cut of shares, checked; empty for a sum; the caller's, which may go when this returns
  virtual void start_collective(rank_group among, group_collective what, int bucket, at::Tensor values,
                                std::span<std::int64_t const> cut) = 0;
  virtual void wait_collective(rank_group among, int bucket) = 0;

  /// Starts giving `mine` to all ranks, of which there are several; others of another size are refused or end by the deadline.
  /// \param mine stays as it is until `finish_gather` has returned
  virtual void start_gather(gather_slot slot, std::span<std::byte const> mine, awaited const& about) = 0;
  /// Waits for what all ranks gave.
  /// \param parts to be filled, by global rank; they stay until the next gather in this slot starts. A part begins with what its
  /// rank gave; where ranks gave different sizes, at least with its header
  virtual void finish_gather(gather_slot slot, awaited const& about, std::vector<std::span<std::byte const>>& parts) = 0;
  /// Texts of several ranks, as two gathers: of their lengths, and of texts as long as the longest. A transport whose gathers
  /// must not meet others of another size has another way.
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
    std::vector<std::byte> mine;  // behind a header
    char const* words = nullptr;  // null: not under way
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

  /// \param mine, all bytes
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
  /// \param all with room for as many bytes of each rank as this one gave
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
  std::chrono::milliseconds deadline_{300000};
  char const* doing_ = nullptr;
  long programs_ = 0, program_ = 0;  // numbered so far; whose messages go
  std::weak_ptr<std::function<void()> const> unfinished_;
  std::atomic<bool> failed_{false};
  std::array<gather, 2> gathers_;  // by slot
  std::vector<std::span<std::byte const>> parts_;
  std::array<std::vector<group_collective>, detail::group_count> buckets_;  // started last, by group and bucket
};

/// Names what the ranks do together for as long as it lives; of several the innermost counts. Errors say it: `rank 0 is in
/// save_checkpoint`.
class collective_scope {
 public:
  /// \param name a literal
  collective_scope(transport& comm, char const* name) : comm_(comm), before_(std::exchange(comm.doing_, name)) {}
  ~collective_scope() { comm_.doing_ = before_; }
  collective_scope(collective_scope const&) = delete;
  collective_scope& operator=(collective_scope const&) = delete;

 private:
  transport& comm_;
  char const* before_;
};

}  // namespace chevron
