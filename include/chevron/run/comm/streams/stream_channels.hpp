#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include <chevron/run/comm/rendezvous.hpp>
#include <chevron/run/comm/streams/channel_use.hpp>
#include <chevron/run/comm/streams/stream_monitor.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/failure/failure.hpp>
#include <chevron/run/failure/failure_monitor.hpp>
#include <chevron/run/failure/wait_table.hpp>

/// \file
/// Channels with their streams, and how a rank of `stream_transport` waits for what it has asked of them.

namespace chevron::detail {

/// Makes the channels of one rank, and waits for transfers: waits end when any rank fails, and throw what failed first.
template <class Streams>
class stream_channels {
 public:
  using point = typename stream_monitor<Streams>::point;
  using host_call = typename stream_monitor<Streams>::host_call;
  using milliseconds = std::chrono::milliseconds;

  /// A channel, with its stream at this end.
  struct end {
    typename Streams::stream on;
    typename Streams::event computed;  ///< up to where the rank had computed when the last transfer was asked for
    typename Streams::channel way;
  };
  using line = std::unique_ptr<end>;

  stream_channels(Streams& streams, stream_monitor<Streams>& watch, rendezvous& meeting, failure_monitor& failures, int rank)
      : streams_(streams), watch_(watch), meeting_(meeting), failures_(failures), rank_(rank) {}

  /// One end of a channel; the others make theirs with the same name. In one global order.
  /// \param rank within the channel, of `size`
  line make(std::string const& name, channel_use use, int rank, int size, milliseconds patience) {
    awaited const mine{.words = "the other end of a channel"};
    std::string const key = "channel/" + name;
    if (rank == 0) meeting_.publish(key, Streams::make_id());
    auto made = std::make_unique<end>(end{streams_.make_stream(), streams_.make_event(), {}});
    std::string const id = meeting_.wait_for(key, mine, patience);
    {
      host_call const joining(watch_, mine);
      made->way = streams_.connect(id, use, rank, size, [this] { return failures_.failed(); });
    }
    if (std::string const fault = streams_.fault(); !fault.empty()) lost(mine, fault);
    check(mine);
    return made;
  }

  /// What the line is asked for next comes after all that the rank has computed so far.
  void behind_computation(end& to) {
    streams_.record(to.computed);
    streams_.wait(to.on, to.computed);
  }

  /// \throws what any rank has published
  void check(awaited const& mine) { failures_.throw_if_failed(mine); }

  /// What the rank computes next comes after this.
  void wait(point const& p) {
    if (!streams_.wait(p.at(), [this] { return failures_.failed(); })) lost(p.about());
    check(p.about());
  }
  /// What the host does next comes after this.
  /// \param details what of the wait is told to others
  void wait_on_host(point const& p, wait_details const& details) {
    failures_.host_waits(p.about(), details);
    struct at_end {
      failure_monitor& watch;
      ~at_end() { watch.host_goes_on(); }
    } const goes_on{failures_};
    bool const passed = streams_.wait_on_host(p.at(), [&] { return p.seen_done() || failures_.failed(); });
    if (!passed && !p.seen_done()) lost(p.about());
    check(p.about());
  }

 private:
  /// The streams have ended before their work was done: the failure that ended them is published, or about to be.
  [[noreturn]] void lost(awaited const& mine, std::string const& why = "the streams were ended") {
    throw_failure(failures_.report({.rank = mine.peer, .step = mine.step, .action = mine.action_text(), .reason = why}), mine,
                  rank_);
  }

  Streams& streams_;
  stream_monitor<Streams>& watch_;
  rendezvous& meeting_;
  failure_monitor& failures_;
  int rank_;
};

}  // namespace chevron::detail
