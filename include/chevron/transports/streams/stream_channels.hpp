#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/wait_table.hpp>
#include <chevron/transports/rendezvous.hpp>
#include <chevron/transports/streams/stream_fault.hpp>
#include <chevron/transports/streams/stream_monitor.hpp>

/// \file
/// Channels with their streams, and waits for transfers, for `stream_transport`.

namespace chevron::detail {

/// Creates the channels of one rank, and waits for transfers. If any rank fails, a wait ends and throws the first failure.
template <class Streams>
class stream_channels {
 public:
  using point = typename stream_monitor<Streams>::point;
  using host_call = typename stream_monitor<Streams>::host_call;
  using milliseconds = std::chrono::milliseconds;

  /// One end of a channel, with its stream.
  struct end {
    typename Streams::stream on;
    typename Streams::event computed;  ///< end of the rank's computation before the last transfer
    typename Streams::channel way;
  };
  using line = std::unique_ptr<end>;

  stream_channels(Streams& streams, stream_monitor<Streams>& watch, rendezvous& meeting, failure_monitor& failures, int rank)
      : streams_(streams), watch_(watch), meeting_(meeting), failures_(failures), rank_(rank) {}

  /// Creates one end of a channel; other ranks create theirs with the same name. All ranks create channels in one order.
  /// \param rank number of this end, from 0 \param size number of ends \param patience longest wait for the other ends
  /// \param peer global rank of the other end; -1 if there are several
  /// \throws timeout_error, naming channel and peer; peer_lost_error if the streams fail; the failure that any rank has published
  line make(std::string const& name, channel_use use, int rank, int size, milliseconds patience, int peer = -1) {
    awaited const mine{.peer = peer, .words = words_.emplace_back("the other end of channel '" + name + "'").c_str()};
    std::string const key = "channel/" + name;
    if (rank == 0) {
      std::string const made = streams_.make_id();
      check_streams(mine);
      meeting_.publish(key, made);
    }
    auto made = std::make_unique<end>(end{streams_.make_stream(), streams_.make_event(), {}});
    std::string const id = meeting_.wait_for(key, mine, patience);
    {
      host_call const joining(watch_, mine);
      made->way = streams_.connect(name, id, use, rank, size, peer, [this] { return failures_.failed(); });
    }
    check_streams(mine);
    check(mine);
    return made;
  }

  /// Makes the next operation of the channel's stream wait for all earlier computations of the rank.
  void behind_computation(end& to) {
    streams_.record(to.computed);
    streams_.wait(to.on, to.computed);
  }

  /// \throws the failure that any rank has published
  void check(awaited const& mine) { failures_.throw_if_failed(mine); }

  /// Makes the rank's next computation wait for an operation. \throws as `check_result`
  void wait(point const& p) {
    if (!streams_.wait(p.at(), [this] { return failures_.failed(); })) lost(p.about());
    check_result(p.about());
  }
  /// Makes the host wait for an operation. \param details this rank's counts and need, for other ranks
  /// \throws as `check_result`
  void wait_on_host(point const& p, wait_details const& details) {
    failures_.host_waits(p.about(), details);
    auto const goes_on = c10::make_scope_exit([&] { failures_.host_goes_on(); });
    bool const passed = streams_.wait_on_host(p.at(), [&] { return p.seen_done() || failures_.failed(); });
    if (!passed && !p.seen_done()) lost(p.about());
    check_result(p.about());
  }

 private:
  /// Checks that an operation ran whose end has passed: a call that fails leaves its operation out, the stream goes on at once,
  /// and the memory for the operation's results still has earlier bytes. The monitor looks for faults only 50 times a second.
  /// \throws peer_lost_error if the streams have a fault; the failure that any rank has published
  void check_result(awaited const& mine) {
    check_streams(mine);
    check(mine);
  }
  void check_streams(awaited const& mine) {
    if (stream_fault const fault = streams_.fault()) lost(failure_of(mine, fault, rank_), mine);
  }

  /// Called if streams were aborted before their work was done. Publishes that, unless the failure that led to the abort is
  /// published already, and throws the failure that was published first.
  [[noreturn]] void lost(awaited const& mine) {
    lost({.rank = mine.peer, .step = mine.step, .action = mine.action_text(), .reason = "the streams were ended"}, mine);
  }
  [[noreturn]] void lost(failure const& found, awaited const& mine) { throw_failure(failures_.report(found), mine, rank_); }

  Streams& streams_;
  stream_monitor<Streams>& watch_;
  rendezvous& meeting_;
  failure_monitor& failures_;
  int rank_;
  std::deque<std::string> words_;  // of waits for channels: `awaited` refers to them
};

}  // namespace chevron::detail
