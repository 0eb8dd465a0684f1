#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>

#include <chevron/run/threads_hub.hpp>
#include <chevron/run/transport.hpp>

/// \file
/// Ranks as threads of one process: no launcher, no sockets, and copies only from device to device.

namespace chevron {

namespace detail {

inline auto only(int peer) {
  return [peer](int r) { return r == peer; };
}

}  // namespace detail

/// One rank of a `threads_hub`. Tensors are handed over, not copied; sums over replicas add in the order of replicas,
/// ((r0 + r1) + r2) …, so they are the same in every run.
class threads_transport final : public transport {
 public:
  threads_transport(std::shared_ptr<detail::threads_hub> shared, int global_rank)
      : transport({shared->options.pipeline_ranks, shared->options.replicas, global_rank}), hub_(std::move(shared)) {
    deadline(hub_->options.deadline);
  }

  bool hands_over() const override { return true; }

  void open(slot_counts const& slots) override {
    std::lock_guard const hold(hub_->mutex);
    mine().sends.resize(static_cast<std::size_t>(slots.send));
    mine().receives.resize(static_cast<std::size_t>(slots.receive));
  }

  void post_send(int peer, action what, std::uint16_t slot, std::span<at::Tensor const> values) override {
    int const to = where().global_of(peer);
    hub::message message{tensors(values.begin(), values.end()), {}, what, slot};
    message.given.give(values);
    int sleeper = -1;
    {
      std::lock_guard const hold(hub_->mutex);
      check_running([&] { return to_text(what).str(); });
      mine().sends.at(slot) = {state::posted, to, what, {}};
      hub_->edge_between(rank(), to).sent.push(std::move(message));
      sleeper = hub_->meet(rank(), to);
    }
    hub_->wake(sleeper);
  }

  void post_receive(int peer, action what, std::uint16_t slot) override {
    int const from = where().global_of(peer);
    int sleeper = -1;
    {
      std::lock_guard const hold(hub_->mutex);
      check_running([&] { return to_text(what).str(); });
      auto& r = mine().receives.at(slot);
      r.where = state::posted;
      r.peer = from;
      r.what = what;
      r.values.clear();
      hub_->edge_between(from, rank()).receiving.push(slot);
      sleeper = hub_->meet(from, rank());
    }
    hub_->wake(sleeper);
  }

  std::span<at::Tensor> receive(std::uint16_t slot) override {
    std::unique_lock hold(hub_->mutex);
    auto& r = mine().receives.at(slot);
    wait(hold, &r, detail::only(r.peer), r.peer, [&] { return to_text(r.what).str(); }, [&](clock::time_point now, clock::time_point& again) {
      if (r.where != state::met) return false;
      again = r.arrives;
      return r.arrives <= now;
    });
    r.where = state::idle;
    r.given.take(r.values);
    return r.values;
  }

  void wait_send(std::uint16_t slot) override {
    if (!hub_->options.rendezvous) return;
    std::unique_lock hold(hub_->mutex);
    auto& s = mine().sends.at(slot);
    wait(hold, &s, detail::only(s.peer), s.peer, [&] { return to_text(s.what).str(); }, [&](clock::time_point now, clock::time_point& again) {
      if (s.where != state::met) return false;
      again = s.done;
      return s.done <= now;
    });
    s.where = state::idle;
  }

  void start_sum(int bucket, at::Tensor values) override {
    int const replicas = where().replicas;
    if (replicas == 1) return;
    auto const b = static_cast<std::size_t>(bucket);
    if (started_.size() <= b) started_.resize(b + 1);
    ++started_[b];
    std::vector<at::Tensor> parts;
    std::vector<handover> given;
    {
      std::lock_guard const hold(hub_->mutex);
      check_running([] { return std::string("sum of gradients"); });
      auto& all = hub_->sums[static_cast<std::size_t>(where().pipeline_rank())];
      if (all.size() <= b) all.resize(b + 1);
      auto& sum = all[b];
      sum.arrived.resize(static_cast<std::size_t>(replicas));
      sum.given.resize(static_cast<std::size_t>(replicas));
      sum.given[static_cast<std::size_t>(where().replica())].give(std::span(&values, 1));
      sum.arrived[static_cast<std::size_t>(where().replica())] = std::move(values);
      if (++sum.count < replicas) return;
      parts = std::move(sum.arrived);
      given = std::move(sum.given);
      sum.count = 0;
    }
    // The last to come adds for all, outside the lock: until `done` counts up nobody touches the tensors.
    for (std::size_t r = 1; r < parts.size(); ++r) {
      if (parts[r].sizes() != parts[0].sizes() || parts[r].dtype() != parts[0].dtype()) {
        throw preflight_error("replicas 0 and " + std::to_string(r) + " sum gradients of different shapes in bucket " + std::to_string(bucket),
                              here(-1, "sum of gradients"));
      }
      given[r].wait_for();
      if (r == 1) given[0].wait_for();
      parts[0].add_(parts[r].to(parts[0].device()));
    }
    for (std::size_t r = 1; r < parts.size(); ++r) parts[r].copy_(parts[0]);
    handover sum;
    sum.give(parts);
    {
      std::lock_guard const hold(hub_->mutex);
      hub_->sums[static_cast<std::size_t>(where().pipeline_rank())][b].sum = std::move(sum);
      ++hub_->sums[static_cast<std::size_t>(where().pipeline_rank())][b].done;
      hub_->tell_all();
    }
    hub_->wake_all();
  }

  void wait_sum(int bucket) override {
    if (where().replicas == 1) return;
    auto const b = static_cast<std::size_t>(bucket);
    std::unique_lock hold(hub_->mutex);
    auto& all = hub_->sums[static_cast<std::size_t>(where().pipeline_rank())];
    auto const absent = [&](int r) {
      bool const same_stages = r % where().pipeline_ranks == where().pipeline_rank();
      return same_stages && all[b].count > 0 && !all[b].arrived[static_cast<std::size_t>(r / where().pipeline_ranks)].defined();
    };
    wait(hold, &hub::all_ranks, absent, -1, [] { return std::string("sum of gradients"); },
         [&](clock::time_point, clock::time_point&) { return all[b].done >= started_.at(b); });
    all[b].sum.wait_for();
  }

  void gather(std::span<double const> mine, std::span<double> all) override {
    start_gather_in(hub_->numbers, std::vector<double>(mine.begin(), mine.end()), "gather");
    finish_gather_in(hub_->numbers, mine.size(), all, "gather");
  }

  void start_gather(std::span<double const> mine) override {
    start_gather_in(hub_->early_numbers, std::vector<double>(mine.begin(), mine.end()), early);
    early_size_ = mine.size();
  }
  void finish_gather(std::span<double> all) override { finish_gather_in(hub_->early_numbers, early_size_, all, early); }

  std::vector<std::string> gather_text(std::string const& mine) override {
    start_gather_in(hub_->texts, mine, "gather of texts");
    return *wait_gather_in(hub_->texts, "gather of texts");
  }

 private:
  using hub = detail::threads_hub;
  using state = hub::state;
  using clock = hub::clock;
  static constexpr std::chrono::microseconds patience{30};

  int rank() const { return where().global_rank; }
  hub::rank_state& mine() { return hub_->of(rank()); }
  place here(int peer, std::string what) const { return {rank(), peer, step(), std::move(what)}; }

  template <class Value>
  void start_gather_in(hub::gathering<Value>& g, Value mine, char const* what) {
    {
      std::lock_guard const hold(hub_->mutex);
      check_running([&] { return std::string(what); });
      g.parts[static_cast<std::size_t>(rank())] = std::move(mine);
      g.rounds[static_cast<std::size_t>(rank())] = g.done + 1;
      if (++g.count < where().world()) return;
      // The result of the round before may go: all ranks are here, so all have read it.
      g.result = std::make_shared<std::vector<Value> const>(g.parts);
      g.count = 0;
      ++g.done;
      hub_->tell_all();
    }
    hub_->wake_all();
  }

  template <class Value>
  std::shared_ptr<std::vector<Value> const> wait_gather_in(hub::gathering<Value>& g, char const* what) {
    std::unique_lock hold(hub_->mutex);
    long const round = g.rounds[static_cast<std::size_t>(rank())];
    wait(hold, &hub::all_ranks, [](int) { return true; }, -1, [&] { return std::string(what); },
         [&](clock::time_point, clock::time_point&) { return g.done >= round; });
    return g.result;
  }

  void finish_gather_in(hub::gathering<std::vector<double>>& g, std::size_t count, std::span<double> all, char const* what) {
    auto const result = wait_gather_in(g, what);
    auto out = all.begin();
    for (std::size_t r = 0; r < result->size(); ++r) {
      auto const& part = (*result)[r];
      if (part.size() != count || static_cast<std::size_t>(all.end() - out) < part.size()) {
        throw preflight_error("rank " + std::to_string(r) + " gathers " + std::to_string(part.size()) + " numbers where rank " +
                                  std::to_string(rank()) + " gathers " + std::to_string(count),
                              here(static_cast<int>(r), what));
      }
      out = std::copy(part.begin(), part.end(), out);
    }
  }

  template <class What>
  void check_running(What const& what) const {
    if (hub_->failed_rank >= 0 && hub_->failed_rank != rank()) {
      throw peer_lost("rank " + std::to_string(hub_->failed_rank) + " failed: " + hub_->failure, here(hub_->failed_rank, what()));
    }
  }

  /// Waits under the lock until `ready(now, again)` says so; `again` is when to look next if nobody wakes us. `needed(r)`: without
  /// rank r this cannot come to an end.
  ///
  /// Going to sleep and being woken takes both ranks longer than most messages are away: so first, for a moment, it gives way to
  /// whoever wants the core, and looks again.
  template <class Needed, class What, class Ready>
  void wait(std::unique_lock<std::mutex>& hold, void const* awaited, Needed needed, int peer, What what, Ready ready) {
    hub::rank_state& me = mine();
    auto const begun = clock::now();
    auto const last = begun + deadline();
    auto const patient_until = begun + patience;
    auto now = begun;
    me.awaits = awaited;
    struct at_end {
      hub::rank_state& me;
      ~at_end() {
        me.awaits = nullptr;
        me.sleeps = false;
        me.waits_for.clear();
      }
    } const no_more{me};
    for (;; now = clock::now()) {
      auto again = last;
      if (ready(now, again)) return;
      check_running(what);
      bool const coming = again != last;  // it is on its way, only delayed
      if (!coming) check_ended(needed, what);
      if (now >= last) {
        std::string const other = peer >= 0 ? "rank " + std::to_string(peer) + " did not answer" : std::string("not all ranks came");
        throw timeout_error(other + " within " + std::to_string(deadline().count()) + " ms" + what_others_wait_for(), here(peer, what()));
      }
      if (now < patient_until) {
        unsigned const known = me.news.load(std::memory_order_relaxed);
        auto const until = std::min(again, patient_until);
        hold.unlock();
        while (me.news.load(std::memory_order_acquire) == known && clock::now() < until) std::this_thread::yield();
        hold.lock();
        continue;
      }
      if (me.waits_for.empty()) me.waits_for = what();
      me.sleeps = true;
      me.woken.wait_until(hold, std::min(again, last));
      me.sleeps = false;
    }
  }

  template <class Needed, class What>
  void check_ended(Needed needed, What const& what) const {
    for (int r = 0; r < where().world(); ++r) {
      if (r != rank() && needed(r) && hub_->of(r).ended) {
        throw peer_lost("rank " + std::to_string(r) + " has ended", here(r, what()));
      }
    }
  }

  std::string what_others_wait_for() const {
    std::string out;
    for (int r = 0; r < where().world(); ++r) {
      if (r != rank() && !hub_->of(r).waits_for.empty()) {
        out += (out.empty() ? "; " : ", ") + ("rank " + std::to_string(r)) + " waits in " + hub_->of(r).waits_for;
      }
    }
    return out;
  }

  std::shared_ptr<hub> hub_;
  static constexpr char const* early = "gather of what decides the last step";
  std::vector<long> started_;  // sums begun, by bucket
  std::size_t early_size_ = 0;
};

/// Runs `body(transport&)` once for each rank, each in a thread of its own, and waits for all of them. When one throws, the
/// others' waits end with `peer_lost`; the first failure is thrown again here.
template <class Body>
void run_threads(thread_options const& options, Body const& body) {
  if (options.pipeline_ranks < 1 || options.replicas < 1) {
    throw usage_error("cannot run " + std::to_string(options.pipeline_ranks) + " pipeline ranks × " + std::to_string(options.replicas) +
                      " replicas: both must be at least 1");
  }
  auto const hub = std::make_shared<detail::threads_hub>(options);
  int const world = options.pipeline_ranks * options.replicas;
  int const threads_before = at::get_num_threads();
  std::vector<std::exception_ptr> failures(static_cast<std::size_t>(world));
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      at::set_num_threads(options.intra_op_threads);
      try {
        threads_transport line(hub, r);
        body(static_cast<transport&>(line));
      } catch (std::exception const& e) {
        failures[static_cast<std::size_t>(r)] = std::current_exception();
        hub->fail(r, e.what());
      } catch (...) {
        failures[static_cast<std::size_t>(r)] = std::current_exception();
        hub->fail(r, "an exception that is no std::exception");
      }
      hub->end(r);
    });
  }
  for (std::thread& t : threads) t.join();
  at::set_num_threads(threads_before);
  if (hub->failed_rank >= 0) std::rethrow_exception(failures[static_cast<std::size_t>(hub->failed_rank)]);
}

}  // namespace chevron
