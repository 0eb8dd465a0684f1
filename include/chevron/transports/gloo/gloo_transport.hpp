#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/jobs/launch.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/fault_point.hpp>
#include <chevron/run/core/wait_table.hpp>
#include <chevron/transports/gloo/bounded_wait.hpp>
#include <chevron/transports/gloo/gloo_all_gather.hpp>
#include <chevron/transports/gloo/point_to_point.hpp>
#include <chevron/transports/gloo/process_group.hpp>
#include <chevron/transports/rendezvous.hpp>
#include <chevron/transports/shared_memory/shared_collectives.hpp>
#include <chevron/transports/shared_memory/shared_memory.hpp>

/// \file
/// The transport between processes, over c10d's Gloo. Ranks of one machine use shared memory instead if they can; Gloo's
/// connections always exist, since their breaking shows that a rank is lost.

namespace chevron {

/// Options of `gloo_transport`.
struct gloo_options {
  std::string address = "127.0.0.1";      ///< address of this machine, for connections from other ranks
  std::chrono::milliseconds join{60000};  ///< longest wait of ranks for each other at the start
  bool shared_memory = true;              ///< use shared memory between ranks that can open each other's files
};

/// A rank's connections over Gloo and shared memory, with the contract of `transport`.
class gloo_transport final : public transport {
 public:
  /// Joins the other ranks of the job. Every rank creates its transports in the same order.
  /// \param where this rank's place in the grid \param store, watch members of the job by `launch`
  /// \throws timeout_error if ranks do not join; peer_lost_error if a rank is lost; preflight_error if grids differ
  gloo_transport(chevron::topology const& where, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<failure_monitor> watch,
                 gloo_options const& options = {})
      : transport(where),
        store_(std::move(store)),
        watch_(std::move(watch)),
        rendezvous_(store_, watch_, where),
        waits_(*this, watch_),
        all_gather_(where, waits_),
        messages_(where, world_, waits_, *watch_) {
    done_.resize(static_cast<std::size_t>(where.world()));
    waits_.tells(done_, rendezvous_.prefix());
    if (where.world() > 1) join(options);
  }
  /// Joins the other ranks of a job with the options that `launch` found.
  gloo_transport(chevron::topology const& where, job const& job)
      : gloo_transport(where, job.store, job.watch, {.address = job.interface_address, .join = job.join}) {}

  /// Calls `close`, unless the job has failed or an exception is being thrown.
  ~gloo_transport() override {
    if (!waits_.broken() && !watch_->failed() && std::uncaught_exceptions() == 0) {
      try {
        close();
      } catch (std::exception const&) {
        waits_.set_broken();
      }
    }
    if (closed_ || topology().world() == 1) return;
    watch_->look_away();
    // Leaks the groups, since the process is about to end: a broken group's destructor would wait without end for operations.
    (void)world_.release();
    for (members_of_group& of : groups_) (void)of.sockets.release();
  }

  /// Waits until every rank has called `close` and all sends are done, then closes the connections. The destructor calls
  /// `close`, but cannot report errors.
  void close() {
    if (closed_ || topology().world() == 1) return;
    detail::fault_point(topology().global_rank, step(), "leaving");
    messages_.finish_first_sends();
    watch_->look_away();
    awaited const mine = everybody(end_of_job);
    ++done_[count::ends];
    auto barrier = waits_.posting(mine, [&] { return world_->barrier(); });
    needing(count::ends, done_[count::ends], [&] { waits_.collective(std::move(barrier), mine); });
    // No rank closes a connection before all ranks have left the barrier.
    rendezvous_.leave();
    messages_.clear();
    for (members_of_group& of : groups_) {
      of.buckets.clear();
      of.sockets.reset();
    }
    world_.reset();
    closed_ = true;
  }

  void begin_step(long step) override {
    transport::begin_step(step);
    messages_.finish_first_sends();
    watch_->throw_if_failed({.words = "the start of the step", .step = step});
  }

  void post_send(int peer, action what, std::uint16_t send_slot, std::span<at::Tensor const> values) override {
    auto& sent = done_.now.sent[static_cast<std::size_t>(topology().global_of(peer))];
    messages_.post_send(message(peer, what), send_slot, values);
    // The send is complete once the peer has posted this number of receives.
    sent_.at(send_slot) = {.of = count::received, .turn = done_.turn, .least = ++sent};
  }
  void post_receive(int peer, action what, std::uint16_t receive_slot) override {
    auto& posted = done_.now.received[static_cast<std::size_t>(topology().global_of(peer))];
    messages_.post_receive(message(peer, what), receive_slot);
    posted_.at(receive_slot) = {.of = count::sent, .turn = done_.turn, .least = ++posted};
  }
  std::span<at::Tensor> receive(std::uint16_t receive_slot) override {
    return waits_.needing(posted_.at(receive_slot), [&] { return messages_.receive(receive_slot); });
  }
  void wait_send(std::uint16_t send_slot) override {
    waits_.needing(sent_.at(send_slot), [&] { messages_.wait_send(send_slot); });
  }

 private:
  using work_ptr = detail::bounded_wait::work_ptr;
  using count = detail::wait_need::count;

  struct collective {
    std::vector<work_ptr> works;  // empty if members share memory
    std::uint64_t number = 0;
  };
  /// The connections of one of this rank's groups of ranks.
  struct members_of_group {
    detail::gloo_group sockets;                             // null if the group has one member, or shares memory
    std::unique_ptr<detail::shared_memory> own;             // null for replicas, which use `memory_`; groups may run at once
    std::unique_ptr<detail::shared_collectives> in_memory;  // null: collectives go over Gloo
    std::unordered_map<int, collective> buckets;
  };

  static constexpr char const* end_of_job = "the end of the job";

  void publish(error const& found) override { watch_->report(detail::failure_by(topology().global_rank, found)); }

  void open_slots(slot_counts const& slots) override {
    // `open` waits until receivers have taken the sends of first transfers; each receiver must post at least one receive.
    waits_.needing({.of = count::received, .turn = done_.turn, .least = 1}, [&] { messages_.open(slots, step()); });
    done_.open();
    sent_.assign(static_cast<std::size_t>(slots.send), {});
    posted_.assign(static_cast<std::size_t>(slots.receive), {});
  }

  /// Runs `work`, which waits for a call of all ranks.
  template <class Work>
  void needing(count of, std::uint64_t number, Work const& work) {
    waits_.needing({.of = of, .least = number}, work);
  }

  /// The counter of a group's collectives.
  static count count_of(rank_group among) {
    constexpr count counts[] = {count::sums, count::shard_sums, count::expert_sums, count::copy_sums};
    return counts[static_cast<std::size_t>(among)];
  }
  members_of_group& of(rank_group among) { return groups_[static_cast<std::size_t>(among)]; }

  void start_collective(rank_group among, group_collective what, int bucket, at::Tensor values,
                        std::span<std::int64_t const> cut) override {
    members_of_group& group = of(among);
    collective& one = group.buckets[bucket];
    one.number = ++done_[count_of(among)];
    if (group.in_memory != nullptr) return group.in_memory->start(what, bucket, std::move(values), cut);
    one.works.clear();
    auto const post = [&](auto const& start) { one.works.push_back(waits_.posting(collective_at(among, bucket), start)); };
    if (what != group_collective::share_gather) {
      // No reduce_scatter: c10d's Gloo would sum a copy of the whole tensor, too.
      std::vector<at::Tensor> list{std::move(values)};
      return post([&] { return group.sockets->allreduce(list); });
    }
    at::Tensor const all = detail::bytes_of(values);
    auto const width = static_cast<std::int64_t>(values.itemsize());
    for (int r = 0; r < topology().members(among); ++r) {
      auto const begin = cut[static_cast<std::size_t>(r)], end = cut[static_cast<std::size_t>(r) + 1];
      if (begin == end) continue;
      std::vector<at::Tensor> list{all.narrow(0, begin * width, (end - begin) * width)};
      c10d::BroadcastOptions from;
      from.rootRank = r;
      post([&] { return group.sockets->broadcast(list, from); });
    }
  }
  void wait_collective(rank_group among, int bucket) override {
    awaited const mine = collective_at(among, bucket);
    members_of_group& group = of(among);
    collective& one = group.buckets[bucket];
    detail::wait_need const need{
        .of = count_of(among), .least = one.number, .members = detail::call_members::of(among, topology())};
    waits_.needing(need, [&] {
      if (group.in_memory != nullptr)
        return group.in_memory->finish(bucket, mine.step, [&](auto const& done) { waits_.flag(done, mine); });
      for (work_ptr& each : std::exchange(one.works, {})) waits_.collective(std::move(each), mine);
    });
  }

  void start_gather(gather_slot slot, std::span<std::byte const> mine, awaited const& about) override {
    ++done_[detail::count_of(slot)];
    all_gather_.start(slot, mine, about);
  }
  void finish_gather(gather_slot slot, awaited const& about, std::vector<std::span<std::byte const>>& parts) override {
    waits_.needing(done_.need_of(detail::count_of(slot)), [&] { all_gather_.finish(slot, about, parts); });
  }

  /// Waits in the store until all ranks have joined, then connects to each rank.
  void join(gloo_options const& options) {
    awaited const mine{.words = "the other ranks to join"};
    auto const rank = topology().global_rank;
    auto const patience = std::min(options.join, deadline());
    auto const guarded = [&](auto const& work) {
      try {
        work();
      } catch (error const&) {
        waits_.set_broken();
        throw;
      } catch (std::exception const& e) {
        waits_.fail(mine, failure_monitor::interruption::none, detail::message_of(e));
      }
    };
    guarded([&] {
      rendezvous_.join(patience);
      world_ =
          detail::connect_gloo(options.address, store_, rendezvous_.prefix() + "world/", rank, topology().world(), patience, 1);
    });
    all_gather_.connect(*world_);
    check_connections();
    memory_ = detail::shared_memory::make(options.shared_memory, rank, topology().world(), *this);
    if (memory_ != nullptr) {
      messages_.share(*memory_);
      all_gather_.share(*memory_);
    }
    for (rank_group const among : detail::all_groups) {
      if (!topology().has(among)) continue;
      if (among != rank_group::replicas)
        of(among).own = detail::shared_memory::make(options.shared_memory, rank, topology().world(), *this);
      guarded([&] { join_group(among, options.address, patience); });
    }
    for (int peer = 0; peer < topology().world(); ++peer) {
      if (peer == rank) continue;
      std::vector<at::Tensor> list{at::empty({1}, at::kByte)};
      watch_->look_at(peer, waits_.posting(mine, [&] { return world_->recv(list, peer, detail::never_sent); }));
    }
    watch_->all_have_met(true);
  }

  /// Connects to the other members of a group: through shared memory if all members map each other's files, else over Gloo.
  void join_group(rank_group among, std::string const& address, std::chrono::milliseconds patience) {
    std::vector<int> ranks;
    for (int k = 0; k < topology().members(among); ++k) ranks.push_back(topology().member(among, k));
    members_of_group& group = of(among);
    auto* const memory = among == rank_group::replicas ? memory_.get() : group.own.get();
    if (memory != nullptr && memory->are_near(ranks)) {
      group.in_memory =
          std::make_unique<detail::shared_collectives>(*memory, among, std::move(ranks), topology().number_in(among), watch_);
      return;
    }
    std::string const keys = detail::member_of(among) + "s of " + std::to_string(ranks.front()) + "/";
    group.sockets = detail::connect_gloo(address, store_, rendezvous_.prefix() + keys, topology().number_in(among),
                                         topology().members(among), patience, 2);
  }

  /// Gathers known numbers and checks them. LibTorch's Gloo was built with headers that this program does not have: a wrong
  /// number shows that this program and the library are incompatible.
  void check_connections() {
    std::vector<double> all(static_cast<std::size_t>(topology().world()));
    double const mine = 1.5 * topology().global_rank;
    all_gather({&mine, 1}, all);
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r] != 1.5 * static_cast<double>(r)) {
        throw preflight_error("Gloo gives wrong numbers. Remedy: build against the LibTorch that is loaded",
                              {.rank = topology().global_rank});
      }
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<failure_monitor> watch_;
  rendezvous rendezvous_;
  detail::bounded_wait waits_;
  detail::gloo_all_gather all_gather_;
  detail::gloo_group world_;  // carries messages and gathers

  std::unique_ptr<detail::shared_memory> memory_;  // null: everything goes over Gloo
  std::array<members_of_group, detail::group_count> groups_;

  detail::point_to_point messages_;
  detail::wait_progress done_;
  std::vector<detail::wait_need> sent_, posted_;  // by slot, the need of a wait for the slot
  bool closed_ = false;
};

}  // namespace chevron
