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
#include <chevron/run/error.hpp>

/// \file
/// How tensors get from rank to rank.

namespace chevron {

/// Who this rank is. Global rank = replica × pipeline_ranks + pipeline rank: with 2 × 2 the pipelines are {0,1} {2,3} and the
/// replicas of a stage {0,2} {1,3}.
struct layout {
  int pipeline_ranks = 1;
  int replicas = 1;
  int global_rank = 0;

  int pipeline_rank() const { return global_rank % pipeline_ranks; }
  int replica() const { return global_rank / pipeline_ranks; }
  int world() const { return pipeline_ranks * replicas; }
  int global_of(int pipeline_rank_of_peer) const { return replica() * pipeline_ranks + pipeline_rank_of_peer; }
};

/// One rank's connections. The contract, the same for every transport:
///
/// - All ranks run the same program set; each directed edge (sender → receiver, within one pipeline) is one channel that
///   delivers in the order of the sends, and receives are posted in that order. Sends may be rendezvous: a send need not
///   complete before its receive is posted.
/// - `post_send` and `post_receive` never block. `receive` and `wait_send` block, but never past the deadline: they throw
///   `timeout_error`, or `peer_lost`, naming this rank, the peer, the action and the step.
/// - A sent tensor is kept alive by the transport until `wait_send` returned for its slot and must not be written to before.
/// - Received tensors are the caller's: it moves them out of the span and keeps them as long as it likes (the graph of the
///   microbatch does, until its B or W), so the transport must not write into that memory again: the next receive of the same
///   slot gets fresh memory wherever a tensor was taken.
/// - Peers are pipeline ranks of the same replica; sums run over the replicas of this pipeline rank; gathers over the world,
///   in the order of global ranks. Every rank makes the same collective calls in the same order.
/// - Not thread-safe: one thread drives one transport.
class transport {
 public:
  explicit transport(layout const& where) : layout_(where) {}
  virtual ~transport() = default;
  transport(transport const&) = delete;
  transport& operator=(transport const&) = delete;

  layout const& where() const { return layout_; }

  /// Whether a receiver gets the sender's own memory: then a sender never writes there again, also after `wait_send`.
  virtual bool hands_over() const { return false; }

  /// Called by all ranks alike, in one order, before messages go along these edges (sorted; some may be known already): what needs
  /// connections of its own makes them here.
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
    throw usage_error("a step or an evaluation failed on this rank before, and nothing can be run after it. Remedy: end, and go on "
                      "from a checkpoint in a new run",
                      {.rank = layout_.global_rank, .step = step_});
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
  virtual void start_sum(int bucket, at::Tensor values) = 0;
  /// Waits for the sum started with this number.
  virtual void wait_sum(int bucket) = 0;

  /// Everybody's `mine`, by global rank: `all` has world × mine.size() entries.
  virtual void gather(std::span<double const> mine, std::span<double> all) = 0;
  /// The same in two halves: what `mine` was at the start is everybody's at the end, and nobody waits in between. One such gather
  /// is under way at a time; other collective calls may come between its halves, on all ranks alike.
  virtual void start_gather(std::span<double const> mine) = 0;
  virtual void finish_gather(std::span<double> all) = 0;
  /// Everybody's text of any length, by global rank. For preflight and reports, not for the step.
  virtual std::vector<std::string> gather_text(std::string const& mine) = 0;

  void deadline(std::chrono::milliseconds longest_wait) { deadline_ = longest_wait; }
  std::chrono::milliseconds deadline() const { return deadline_; }

 protected:
  long step() const { return step_; }
  /// Tells the other ranks. From any thread.
  virtual void publish(error const&) {}

 private:
  friend class collective_scope;

  layout layout_;
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
  collective_scope(transport& line, char const* name) : line_(line), before_(std::exchange(line.doing_, name)) {}
  ~collective_scope() { line_.doing_ = before_; }
  collective_scope(collective_scope const&) = delete;
  collective_scope& operator=(collective_scope const&) = delete;

 private:
  transport& line_;
  char const* before_;
};

}  // namespace chevron
