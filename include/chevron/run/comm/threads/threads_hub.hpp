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

#include <ATen/core/Tensor.h>

#include <chevron/plan/text.hpp>
#include <chevron/run/comm/threads/thread_collectives.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/device/stream_handoff.hpp>
#include <chevron/run/failure/failure.hpp>

/// \file
/// The memory that the ranks of one process share: mailboxes, collectives over replicas, gathers and the first failure.

namespace chevron {

/// How ranks as threads behave.
struct thread_options {
  int pipeline_ranks = 1;
  int replicas = 1;
  int shards = 1;           ///< ranks within each stage
  int expert_replicas = 1;  ///< neighbouring replicas that hold a stage's experts together
  /// A send completes only when its receive is posted, as with Gloo and NCCL; else at once.
  bool rendezvous = false;
  /// Each message arrives after a random time up to this, drawn from `seed`: shakes out orders that rely on luck.
  std::chrono::microseconds longest_delay{0};
  std::uint64_t seed = 0;
  std::chrono::milliseconds deadline{300000};
  /// Threads that one operation of one rank may use. Results of some operations depend on it in the last bits.
  int intra_op_threads = 1;
  /// After a rank has failed the others have this long to notice; then the process ends, for threads cannot be ended alone.
  std::chrono::milliseconds grace{1500};
};

namespace detail {

/// The ends of every directed edge meet here, under one lock: a handful of ranks, short critical sections. Whoever waits, waits
/// on the condition variable of its own rank.
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
    awaited about;      // as its sender would wait for it
    unsigned turn = 0;  // how often the sender's transport was opened
    std::uint16_t send_slot = 0;
  };
  /// First in, first out, without giving memory back.
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
    queue<message> sent;             // no receive posted yet
    queue<std::uint16_t> receiving;  // nothing sent yet
  };
  enum class state : std::uint8_t { idle, posted, met };
  struct send_slot {
    state where = state::idle;
    awaited about{};
    clock::time_point done{};

    /// Whether the transfer is over.
    /// \param again when to ask again, where that is known
    bool is_over(clock::time_point now, clock::time_point& again) const {
      if (where != state::met) return false;
      again = done;
      return done <= now;
    }
  };
  struct receive_slot {
    state where = state::idle;
    awaited about{};
    unsigned turn = 0;
    clock::time_point arrives{};
    tensors values;
    stream_handoff given;

    /// As that of a send.
    bool is_over(clock::time_point now, clock::time_point& again) const {
      if (where != state::met) return false;
      again = arrives;
      return arrives <= now;
    }
  };
  struct rank_state {
    std::vector<send_slot> sends;
    std::vector<receive_slot> receives;
    unsigned turn = 0;             // how often its transport was opened
    void const* awaits = nullptr;  // a slot of its own, or `all_ranks`
    std::atomic<unsigned> news{0};
    bool sleeps = false;  // until `woken`; before that it looks at `news`
    std::condition_variable woken;
    bool ended = false;
    awaited waits_for;  // while it `waits`; for the others' error messages
    bool waits = false;
    bool stuck = false;  // it waits, has found nothing there, and nobody has brought anything since
  };
  struct bucket {
    explicit bucket(std::size_t members) : brought(members) {}
    thread_collective brought;
    stream_handoff result;
    long done = 0;  // how many collectives this bucket has had
  };
  using group_buckets = std::vector<std::vector<bucket>>;  // by the group's first rank, by number
  using parts = std::vector<std::vector<std::byte>>;  // by rank
  struct gathering {
    parts arrived;
    std::vector<long> rounds;  // by rank: the round it came to last
    int count = 0;
    long done = 0;
    std::shared_ptr<parts const> result;
  };

  edge& edge_between(int from, int to) {
    return edges[static_cast<std::size_t>(from) * ranks.size() + static_cast<std::size_t>(to)];
  }
  rank_state& of(int rank) { return *ranks[static_cast<std::size_t>(rank)]; }

  /// What a rank awaits that waits for no slot of its own but for what all ranks do together.
  static constexpr char all_ranks = 0;

  /// Has a rank look again, if this is what it waits for. Under the lock.
  /// \returns whether it sleeps: then `wake` follows, without the lock, since the lock is what it takes first of all
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
  /// The same for all ranks, whatever they wait for.
  void tell_all() {
    for (auto& r : ranks) {
      r->stuck = false;
      r->news.fetch_add(1, std::memory_order_release);
    }
  }
  void wake_all() {
    for (auto& r : ranks) r->woken.notify_one();
  }

  /// Brings the oldest send and the oldest receive of an edge together, if there are both: called after each new one, it leaves
  /// none behind. Under the lock.
  /// \returns a rank to `wake`, or -1
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
    r.arrives = when;
    r.where = state::met;
    send_slot& s = of(from).sends[m.send_slot];
    s.done = when;
    s.where = state::met;
    // One of them has called this, and waits for nothing yet.
    if (tell(to, &r)) return to;
    return tell(from, &s) ? from : -1;
  }

  /// Does every rank that has not ended wait for what only another of them could bring? Then that is for ever. Under the lock.
  bool all_stuck() const {
    return std::all_of(ranks.begin(), ranks.end(), [](auto const& r) { return r->ended || r->stuck; });
  }

  /// The first failure wins; everybody who waits hears of it.
  /// \returns what was published first, by whichever rank
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
  /// The same under the lock; `announce_failure` follows.
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

  /// A rank's body is over.
  /// \param thrown what it has thrown, if anything
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

  /// What a rank's body threw.
  struct thrown_failure {
    int rank;
    failure about;
    std::exception_ptr what;
  };

  thread_options const options;
  std::mutex mutex;
  std::vector<std::unique_ptr<rank_state>> ranks;
  std::vector<edge> edges;
  std::vector<group_buckets> buckets;    // by rank_group
  std::array<gathering, 2> gatherings;   // by slot
  std::optional<failure> first_failure;  // as it was published first, by whichever rank
  int finder = -1;                       // the rank that did
  std::vector<thrown_failure> failures;  // in the order in which bodies ended by them
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
