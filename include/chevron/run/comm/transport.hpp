#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/lower/edges.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/topology.hpp>

/// \file
/// How tensors get from rank to rank.

namespace chevron {

/// One rank's connections. The contract, the same for every transport:
///
/// - All ranks run the same program set; each directed edge (sender → receiver, within one pipeline) is one channel that
///   delivers in the order of the sends, and receives are posted in that order. Sends may be rendezvous: a send need not
///   complete before its receive is posted.
/// - `post_send` and `post_receive` never block. `receive` and `wait_send` block, but never past the deadline: they throw
///   `timeout_error`, or `peer_lost_error`, naming this rank, the peer, the action and the step.
/// - A sent tensor is kept alive by the transport until `wait_send` returned for its slot and must not be written to before.
/// - Received tensors are the caller's: it moves them out of the span and keeps them as long as it likes (the graph of the
///   microbatch does, until its B or W), so the transport must not write into that memory again: the next receive of the same
///   slot gets fresh memory wherever a tensor was taken.
/// - Peers are pipeline ranks of the same replica; sums run over the replicas of this pipeline rank; gathers over the world,
///   in the order of global ranks. Every rank makes the same collective calls in the same order.
/// - Not thread-safe: one thread drives one transport.
class transport {
 public:
  explicit transport(chevron::topology const& where) : topology_(where) {}
  virtual ~transport() = default;
  transport(transport const&) = delete;
  transport& operator=(transport const&) = delete;

  chevron::topology const& topology() const { return topology_; }

  /// Whether a receiver gets the sender's own memory: then a sender never writes there again, also after `wait_send`.
  virtual bool is_zero_copy() const { return false; }

  /// Called by all ranks alike, in one order, before messages go along these edges (sorted; some may be known already): what
  /// needs connections of its own makes them here.
  virtual void connect(std::span<edge const>) {}
  /// Called before the first step with this rank's slot counts, so that nothing is allocated later; and again, by all ranks alike
  /// and with nothing under way, when another program (evaluation) takes its turn: counts and shapes may then differ.
  virtual void open(slot_counts const& slots) = 0;
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

  /// Starts summing `values` in place over the replicas; `bucket` numbers the sums under way, from 0. A no-op with one replica.
  virtual void start_all_reduce(int bucket, at::Tensor values) = 0;
  /// Waits for the sum started with this number.
  virtual void wait_all_reduce(int bucket) = 0;

  /// Everybody's `mine`, by global rank: `all` has world × mine.size() entries.
  virtual void all_gather(std::span<double const> mine, std::span<double> all) = 0;
  /// The same in two halves: what `mine` was at the start is everybody's at the end, and nobody waits in between. One such gather
  /// is under way at a time; other collective calls may come between its halves, on all ranks alike.
  virtual void start_all_gather(std::span<double const> mine) = 0;
  virtual void finish_all_gather(std::span<double> all) = 0;
  /// Everybody's text of any length, by global rank. For preflight and reports, not for the step.
  virtual std::vector<std::string> all_gather_text(std::string const& mine) = 0;

  void deadline(std::chrono::milliseconds longest_wait) { deadline_ = longest_wait; }
  std::chrono::milliseconds deadline() const { return deadline_; }

 protected:
  long step() const { return step_; }
  /// Tells the other ranks. From any thread.
  virtual void publish(error const&) {}

 private:
  friend class collective_scope;

  chevron::topology topology_;
  long step_ = -1;
  std::chrono::milliseconds deadline_{300000};
  char const* doing_ = nullptr;
  std::atomic<bool> failed_{false};
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
