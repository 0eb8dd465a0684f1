#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <chevron/plan/text.hpp>
#include <chevron/run/comm/threads/thread_collectives.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/stream_handoff.hpp>
#include <chevron/run/core/tensors.hpp>

/// \file
/// Memory that the ranks of one process share: messages, collectives over groups, gathers and the first failure.

namespace chevron {

/// Options of `run_threads`: the grid of ranks, and the behaviour of their transport.
struct thread_options {
  int pipeline_ranks = 1;
  int replicas = 1;
  int shards = 1;           ///< ranks that share each stage
  int expert_replicas = 1;  ///< neighbouring replicas over which a stage's experts are divided
  /// Whether a send completes only when its receive is posted, as with Gloo and NCCL; otherwise a send completes at once.
  bool rendezvous = false;
  /// Longest delay of a message: each message arrives after a random time up to this, drawn from `seed`. Detects programs in
  /// which the order of messages is right only by chance.
  std::chrono::microseconds longest_delay{0};
  std::uint64_t seed = 0;
  /// Longest wait of a rank.
  std::chrono::milliseconds deadline{300000};
  /// Threads that one operation of one rank may use. The last bits of some operations' results depend on this number.
  int intra_op_threads = 1;
  /// Time for the other ranks to end after a rank has failed; then the process ends, since a single thread cannot be ended.
  std::chrono::milliseconds grace{1500};
};

namespace detail {

/// The state that the ranks of one process share, under one lock: for each pair of ranks the sends and receives that are not
/// matched yet, the collectives, and the first failure. One lock is enough, since ranks are few and critical sections short.
/// Each rank sleeps on its own condition variable.
class threads_hub {
 public:
  using clock = std::chrono::steady_clock;

  explicit threads_hub(thread_options const& o)
      : options(o),
        ranks(static_cast<std::size_t>(o.pipeline_ranks * o.replicas * o.shards)),
        edges(ranks.size() * ranks.size()),
        buckets(group_count, group_buckets(ranks.size())),
        random(o.seed) {
    for (auto& r : ranks) r = std::make_unique<rank_state>();
    for (auto& g : gatherings) {
      g.arrived.resize(ranks.size());
      g.rounds.resize(ranks.size());
    }
  }

  struct message {
    tensors values;
    stream_handoff given;
    awaited about;      // the send, for error messages about waits
    unsigned turn = 0;  // number of the sender's `open` calls at the send
    std::uint16_t send_slot = 0;
  };
  /// A first-in, first-out queue that reuses its memory.
  template <class Item>
  struct queue {
    std::vector<Item> items;
    std::size_t head = 0;
    bool empty() const { return head == items.size(); }
    void push(Item item) { items.push_back(std::move(item)); }
    Item pop() {
      Item item = std::move(items[head++]);
      if (empty()) {
        items.clear();
        head = 0;
      }
      return item;
    }
  };
  struct edge {
    queue<message> sent;             // sends without a posted receive
    queue<std::uint16_t> receiving;  // posted receives without a send
  };
  enum class state : std::uint8_t { idle, posted, met };
  struct transfer {
    state where = state::idle;
    awaited about{};
    clock::time_point done{};

    /// Whether the transfer is over. \param again set to the time of the next check, if known
    bool is_over(clock::time_point now, clock::time_point& again) const {
      if (where != state::met) return false;
      again = done;
      return done <= now;
    }
    void meet(clock::time_point when) {
      done = when;
      where = state::met;
    }
  };
  struct receive_slot : transfer {
    unsigned turn = 0;
    tensors values;
    stream_handoff given;
  };
  struct rank_state {
    std::vector<transfer> sends;
    std::vector<receive_slot> receives;
    unsigned turn = 0;             // number of the rank's `open` calls
    void const* awaits = nullptr;  // a slot of this rank, or `all_ranks`; null: nothing
    /// Number of notifications to this rank.
    std::atomic<unsigned> news{0};
    bool sleeps = false;  // on `woken`; before sleeping, the rank polls `news`
    std::condition_variable woken;
    bool ended = false;
    awaited waits_for;  // the rank's wait, if `waits`; for other ranks' errors
    bool waits = false;
    bool stuck = false;  // in a wait whose last check found nothing under way, and not notified since
  };
  struct bucket {
    explicit bucket(std::size_t members) : brought(members) {}
    thread_collective brought;
    stream_handoff result;
    long done = 0;  // number of finished collectives of this bucket
  };
  using group_buckets = std::vector<std::vector<bucket>>;  // indexed by the group's first rank, then by bucket number
  using parts = std::vector<std::vector<std::byte>>;  // indexed by rank
  struct gathering {
    parts arrived;
    std::vector<long> rounds;  // by rank, number of the rank's last round
    int count = 0;
    long done = 0;
    std::shared_ptr<parts const> result;
  };

  edge& edge_between(int from, int to) {
    return edges[static_cast<std::size_t>(from) * ranks.size() + static_cast<std::size_t>(to)];
  }
  rank_state& of(int rank) { return *ranks[static_cast<std::size_t>(rank)]; }

  /// The value of `awaits` while a rank waits for a call of several ranks.
  static constexpr char all_ranks = 0;

  /// Notifies a rank if it awaits `what`. Called under the lock.
  /// \returns whether the rank sleeps: if so, the caller must call `wake` after releasing the lock, which the rank then takes
  bool tell(int rank, void const* what) {
    rank_state& r = of(rank);
    if (r.awaits != what) return false;
    r.stuck = false;
    r.news.fetch_add(1, std::memory_order_release);
    return std::exchange(r.sleeps, false);
  }
  void wake(int rank) {
    if (rank >= 0) of(rank).woken.notify_one();
  }
  /// Notifies all ranks, whatever they await. Called under the lock; the caller then releases the lock and calls `wake_all`.
  void tell_all() {
    for (auto& r : ranks) {
      r->stuck = false;
      r->news.fetch_add(1, std::memory_order_release);
    }
  }
  void wake_all() {
    for (auto& r : ranks) r->woken.notify_one();
  }

  /// Matches the oldest send and the oldest receive of an edge, if both exist. Called after each new send or receive, under the
  /// lock, so that at most one of the edge's two queues has entries.
  /// \returns a rank to `wake`, or -1
  /// \throws preflight_error if send and receive are of different messages
  int meet(int from, int to) {
    edge& e = edge_between(from, to);
    if (e.sent.empty() || e.receiving.empty()) return -1;
    message m = e.sent.pop();
    receive_slot& r = of(to).receives[e.receiving.pop()];
    if (m.turn != r.turn || !belong_together(m.about.what, r.about.what)) {
      throw preflight_error("rank " + std::to_string(from) + " sends " + m.about.text() + " where rank " + std::to_string(to) +
                                " expects " + r.about.text() + ": the ranks do not run the same program",
                            {to, from, r.about.step, r.about.action_text()});
    }
    auto const when = clock::now() + delay();
    r.values = std::move(m.values);
    r.given = std::move(m.given);
    r.meet(when);
    transfer& s = of(from).sends[m.send_slot];
    s.meet(when);
    // One of the two ranks has called `meet`, so it does not wait.
    if (tell(to, static_cast<transfer*>(&r))) return to;
    return tell(from, &s) ? from : -1;
  }

  /// Whether every rank that has not ended is `stuck`: then no rank can end another rank's wait, and the waits never end.
  /// Called under the lock.
  bool all_stuck() const {
    return std::all_of(ranks.begin(), ranks.end(), [](auto const& r) { return r->ended || r->stuck; });
  }

  /// Publishes a failure, unless a failure was published before, and ends all waits.
  /// \param found_by the calling rank \returns the failure that was published first
  failure fail(failure const& what, int found_by) {
    failure first;
    {
      std::lock_guard const hold(mutex);
      set_failure(what, found_by);
      first = *first_failure;
    }
    announce_failure();
    return first;
  }
  /// Publishes a failure like `fail`, under the lock: the caller then releases the lock and calls `announce_failure`.
  void set_failure(failure const& what, int found_by) {
    if (!first_failure) {
      first_failure = what;
      finder = found_by;
    }
    tell_all();
  }

  void announce_failure() {
    wake_all();
    some_ended.notify_all();
  }

  /// Marks a rank's body as ended.
  /// \param thrown the body's exception, or null \param about the same exception as a failure
  void end(int rank, std::exception_ptr thrown, failure const& about) {
    {
      std::lock_guard const hold(mutex);
      of(rank).ended = true;
      if (thrown) {
        set_failure(about, rank);
        failures.push_back({rank, about, std::move(thrown)});
      }
      ++ended;
      tell_all();
    }
    wake_all();
    some_ended.notify_all();
  }

  /// An exception that a rank's body threw.
  struct thrown_failure {
    int rank;
    failure about;
    std::exception_ptr what;
  };

  thread_options const options;
  std::mutex mutex;
  std::vector<std::unique_ptr<rank_state>> ranks;
  std::vector<edge> edges;
  std::vector<group_buckets> buckets;    // indexed by rank_group
  std::array<gathering, 2> gatherings;   // indexed by gather_slot
  std::optional<failure> first_failure;  // published first, by any rank
  int finder = -1;                       // the rank that published `first_failure`
  std::vector<thrown_failure> failures;  // in the order in which bodies threw
  int ended = 0;
  std::condition_variable some_ended;

 private:
  static bool belong_together(action sent, action received) {
    bool const forward =
        sent.kind == kind::send_forward && received.kind == kind::receive_forward && sent.stage + 1 == received.stage;
    bool const backward =
        sent.kind == kind::send_backward && received.kind == kind::receive_backward && sent.stage == received.stage + 1;
    return (forward || backward) && sent.micro_batch == received.micro_batch;
  }

  clock::duration delay() {
    if (options.longest_delay.count() <= 0) return {};
    return std::chrono::microseconds(std::uniform_int_distribution<long>(0, options.longest_delay.count())(random));
  }

  std::mt19937_64 random;
};

}  // namespace detail
}  // namespace chevron
