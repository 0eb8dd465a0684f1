#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>

#include <chevron/run/comm/message_signature.hpp>
#include <chevron/run/comm/threads/thread_collectives.hpp>
#include <chevron/run/comm/threads/threads_hub.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/wait_table.hpp>

/// \file
/// The transport between threads of one process, without launcher or sockets; only tensors that change device are copied.

namespace chevron {

/// The transport of one rank of a `threads_hub`. Messages pass tensors without a copy; sums add in the order of members, ((r0 +
/// r1) + r2) …, so that sums have the same bits in every run.
class threads_transport final : public transport {
 public:
  threads_transport(std::shared_ptr<detail::threads_hub> shared, int global_rank)
      : transport({shared->options.pipeline_ranks, shared->options.replicas, global_rank, shared->options.shards,
                   shared->options.expert_replicas}),
        hub_(std::move(shared)) {
    deadline(hub_->options.deadline);
  }

  bool is_zero_copy() const override { return true; }

  void post_send(int peer, action what, std::uint16_t slot, std::span<at::Tensor const> values) override {
    awaited const about = message(peer, what);
    hub::message sent{tensors(values.begin(), values.end()), {}, about, 0, slot};
    agree(sent.values, about);
    sent.given.record(values);
    int sleeper = -1;
    {
      std::lock_guard const hold(hub_->mutex);
      check_running(about);
      mine().sends.at(slot) = {state::posted, about, {}};
      sent.turn = mine().turn;
      hub_->edge_between(rank(), about.peer).sent.push(std::move(sent));
      sleeper = hub_->meet(rank(), about.peer);
    }
    hub_->wake(sleeper);
  }

  void post_receive(int peer, action what, std::uint16_t slot) override {
    awaited const about = message(peer, what);
    int sleeper = -1;
    {
      std::lock_guard const hold(hub_->mutex);
      check_running(about);
      auto& r = mine().receives.at(slot);
      r.where = state::posted;
      r.about = about;
      r.turn = mine().turn;
      r.values.clear();
      hub_->edge_between(about.peer, rank()).receiving.push(slot);
      sleeper = hub_->meet(about.peer, rank());
    }
    hub_->wake(sleeper);
  }

  std::span<at::Tensor> receive(std::uint16_t slot) override {
    std::unique_lock hold(hub_->mutex);
    auto& r = mine().receives.at(slot);
    wait_for(hold, r);
    r.given.acquire(r.values);
    return r.values;
  }

  void wait_send(std::uint16_t slot) override {
    if (!hub_->options.rendezvous) return;
    std::unique_lock hold(hub_->mutex);
    wait_for(hold, mine().sends.at(slot));
  }

 private:
  using hub = detail::threads_hub;
  using state = hub::state;
  using clock = hub::clock;
  static constexpr std::chrono::microseconds patience{30};

  /// Refuses messages with changed shapes: threads could pass them, but other transports refuse them.
  void agree(tensors const& values, awaited const& about) {
    auto& agreed = agreed_[detail::tag_of(about.what)];
    if (agreed.empty()) agreed = detail::shapes_of(values);
    if (detail::fits(values, agreed)) return;
    auto const tell = [this](failure const& told) { return hub_->fail(told, rank()); };
    detail::refuse_shapes(tell, about, rank(), agreed, detail::shapes_of(values));
  }

  int rank() const { return topology().global_rank; }
  hub::rank_state& mine() { return hub_->of(rank()); }

  void publish(error const& found) override { hub_->fail(detail::failure_by(rank(), found), rank()); }

  void open_slots(slot_counts const& slots) override {
    agreed_.clear();
    std::lock_guard const hold(hub_->mutex);
    ++mine().turn;
    mine().sends.resize(static_cast<std::size_t>(slots.send));
    mine().receives.resize(static_cast<std::size_t>(slots.receive));
  }

  void start_collective(rank_group among, group_collective what, int bucket, at::Tensor values,
                        std::span<std::int64_t const> cut) override {
    auto const b = static_cast<std::size_t>(bucket), size = static_cast<std::size_t>(topology().members(among));
    auto& started = started_[static_cast<std::size_t>(among)];
    if (started.size() <= b) started.resize(b + 1);
    ++started[b];
    detail::thread_collective whole;
    {
      std::lock_guard const hold(hub_->mutex);
      check_running(collective_at(among, bucket));
      auto& all = buckets(among);
      while (all.size() <= b) all.emplace_back(size);
      auto& brought = all[b].brought;
      brought.bring(static_cast<std::size_t>(topology().number_in(among)), {what, std::move(values), {cut.begin(), cut.end()}});
      if (!brought.is_complete()) return;
      whole = std::exchange(brought, detail::thread_collective(size));
    }
    // Outside the lock: no rank touches the tensors before `done` is incremented.
    detail::stream_handoff result =
        whole.carry_out(among, bucket, {.rank = rank(), .step = step(), .action = collective_at(among, bucket).action_text()});
    whole = detail::thread_collective();  // before `done` is incremented, after which ranks may free their tensors
    {
      std::lock_guard const hold(hub_->mutex);
      buckets(among)[b].result = std::move(result);
      ++buckets(among)[b].done;
      hub_->tell_all();
    }
    hub_->wake_all();
  }

  void wait_collective(rank_group among, int bucket) override {
    auto const b = static_cast<std::size_t>(bucket);
    std::unique_lock hold(hub_->mutex);
    auto& all = buckets(among);
    auto const absent = [&](int r) {
      for (int k = 0; all[b].brought.is_under_way() && k < topology().members(among); ++k) {
        if (topology().member(among, k) == r) return !all[b].brought.brought(static_cast<std::size_t>(k));
      }
      return false;
    };
    long const awaited_round = started_[static_cast<std::size_t>(among)].at(b);
    wait(
        hold, &hub::all_ranks, collective_at(among, bucket), [&](auto...) { return all[b].done >= awaited_round; }, absent);
    all[b].result.wait_for();
  }
  /// The buckets of this rank's group.
  std::vector<hub::bucket>& buckets(rank_group among) {
    auto const first = static_cast<std::size_t>(topology().member(among, 0));
    return hub_->buckets[static_cast<std::size_t>(among)][first];
  }

  void start_gather(gather_slot slot, std::span<std::byte const> given, awaited const& about) override {
    {
      std::lock_guard const hold(hub_->mutex);
      check_running(about);
      auto& g = gathering_in(slot);
      auto const me = static_cast<std::size_t>(rank());
      g.arrived[me].assign(given.begin(), given.end());
      g.rounds[me] = g.done + 1;
      if (++g.count < topology().world()) return;
      // Frees the result of the previous round: all ranks have started this round, so all have read that result.
      g.result = std::make_shared<hub::parts const>(g.arrived);
      g.count = 0;
      ++g.done;
      hub_->tell_all();
    }
    hub_->wake_all();
  }
  void finish_gather(gather_slot slot, awaited const& about, std::vector<std::span<std::byte const>>& parts) override {
    std::unique_lock hold(hub_->mutex);
    auto const& g = gathering_in(slot);
    long const round = g.rounds[static_cast<std::size_t>(rank())];
    wait(hold, &hub::all_ranks, about, [&](auto...) { return g.done >= round; });
    auto& result = results_[static_cast<std::size_t>(slot)];
    result = g.result;
    parts.assign(result->begin(), result->end());
  }
  hub::gathering& gathering_in(gather_slot slot) { return hub_->gatherings[static_cast<std::size_t>(slot)]; }

  void check_running(awaited const& mine) const {
    if (hub_->first_failure) throw_failure(*hub_->first_failure, mine, rank());
  }

  /// Publishes a failure that this rank found in a wait, under the lock, and throws the failure that was published first.
  [[noreturn]] void give_up(failure const& found, awaited const& mine) {
    hub_->set_failure(found, rank());
    hub_->announce_failure();
    throw_failure(*hub_->first_failure, mine, rank());
  }

  /// Waits under the lock until a message of this rank has been transferred.
  void wait_for(std::unique_lock<std::mutex>& hold, hub::transfer& t) {
    wait(hold, &t, t.about, [&](auto now, auto& again) { return t.is_over(now, again); });
    t.where = state::idle;
  }
  /// Waits under the lock until `ready(now, again)` returns true.
  ///
  /// Sleeping and waking take longer than most messages, so the rank first polls for 30 µs, yielding its core. The last rank
  /// that would sleep finds that no rank is left to wake it, and publishes a failure.
  /// \param awaits a slot of this rank, or `all_ranks`
  /// \param ready sets `again` to the time of the next check if no notification will come
  /// \param needed needed(r) returns whether a wait for several ranks cannot end without rank r
  template <class Ready, class Needed = bool (*)(int)>
  void wait(
      std::unique_lock<std::mutex>& hold, void const* awaits, awaited const& mine, Ready ready,
      Needed needed = [](int) { return true; }) {
    hub::rank_state& me = this->mine();
    auto const begun = clock::now();
    auto const last = begun + deadline();
    auto const patient_until = begun + patience;
    auto now = begun;
    me.awaits = awaits;
    me.waits_for = mine;
    auto const no_more = c10::make_scope_exit([&] {
      me.awaits = nullptr;
      me.sleeps = me.waits = me.stuck = false;
    });
    for (;; now = clock::now()) {
      auto again = last;
      if (ready(now, again)) return;
      check_running(mine);
      bool const coming = again != last;  // a delayed message is under way
      if (!coming) check_ended(needed, mine);
      if (now >= last) {
        awaited late = mine;
        late.peer = who_is_late(mine);
        failure found = detail::timeout_of(late, deadline());
        add_waits_of_others(found);
        give_up(found, mine);
      }
      if (now < patient_until) {
        unsigned const known = me.news.load(std::memory_order_relaxed);
        auto const until = std::min(again, patient_until);
        hold.unlock();
        while (me.news.load(std::memory_order_acquire) == known && clock::now() < until) std::this_thread::yield();
        hold.lock();
        continue;
      }
      me.waits = true;
      me.stuck = !coming;
      if (me.stuck && hub_->all_stuck()) {
        give_up({.code = static_cast<int>(exit_code::preflight),
                 .step = mine.step,
                 .action = mine.action_text(),
                 .reason = detail::wait_for_each_other(all_waits()),
                 .ranks = ranks_of(all_waits())},
                mine);
      }
      me.sleeps = true;
      me.woken.wait_until(hold, std::min(again, last));
      me.sleeps = false;
    }
  }

  template <class Needed>
  void check_ended(Needed needed, awaited const& mine) {
    for (int r = 0; r < topology().world(); ++r) {
      if (r == rank() || (mine.peer >= 0 && r != mine.peer) || !needed(r) || !hub_->of(r).ended) continue;
      give_up({.rank = r, .step = mine.step, .action = mine.action_text(), .reason = "rank " + std::to_string(r) + " has ended"},
              mine);
    }
  }

  /// Returns the rank that a timeout blames: follows waits from the peer to a rank that does not wait. For a collective, or if
  /// waits form a cycle, returns the first rank that neither waits nor has ended; -1 if there is none.
  int who_is_late(awaited const& mine) const {
    int late = mine.peer;
    for (int hops = 0; hops < topology().world() && late >= 0 && hub_->of(late).waits; ++hops)
      late = hub_->of(late).waits_for.peer;
    if (late >= 0 && late != rank() && !hub_->of(late).waits) return late;
    for (int r = 0; r < topology().world(); ++r) {
      if (r != rank() && !hub_->of(r).waits && !hub_->of(r).ended) return r;
    }
    return -1;
  }

  /// Adds the waits of the other ranks to a failure's reason: `; rank 2 waits in 2RECV_F0 from rank 1`.
  void add_waits_of_others(failure& found) const {
    char const* before = "; rank ";
    for (auto const& [r, text] : all_waits()) {
      if (r == rank()) continue;
      found.reason += std::exchange(before, ", rank ") + std::to_string(r) + " waits in " + text;
      found.ranks.push_back(r);
    }
  }
  /// The ranks that wait, each with its wait in words.
  std::vector<std::pair<int, std::string>> all_waits() const {
    std::vector<std::pair<int, std::string>> waits;
    for (int r = 0; r < topology().world(); ++r) {
      if (hub_->of(r).waits) waits.emplace_back(r, hub_->of(r).waits_for.text());
    }
    return waits;
  }
  static std::vector<int> ranks_of(std::vector<std::pair<int, std::string>> const& waits) {
    std::vector<int> out;
    for (auto const& each : waits) out.push_back(each.first);
    return out;
  }

  std::shared_ptr<hub> hub_;
  std::unordered_map<std::uint32_t, detail::message_shapes> agreed_;  // of messages that this rank sends, by tag
  std::array<std::vector<long>, detail::group_count> started_;        // number of started collectives, by group and bucket
  std::array<std::shared_ptr<hub::parts const>, 2> results_;          // results of gathers, by slot
};

}  // namespace chevron
