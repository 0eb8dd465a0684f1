#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>

#include <chevron/run/error.hpp>
#include <chevron/run/gathers.hpp>
#include <chevron/run/gloo_group.hpp>
#include <chevron/run/launch.hpp>
#include <chevron/run/message.hpp>
#include <chevron/run/near_messages.hpp>
#include <chevron/run/shared_memory.hpp>
#include <chevron/run/shared_sums.hpp>
#include <chevron/run/store_room.hpp>
#include <chevron/run/transport.hpp>
#include <chevron/run/waits.hpp>
#include <chevron/run/watch.hpp>

/// \file
/// The transport between processes: c10d's Gloo.
///
/// Gloo checks nothing: a receive buffer that is too small aborts the process, one that is too large is filled in part, and
/// dtypes are not compared. So the first message of each (direction, stage, microbatch) is preceded by a header with its shapes
/// and dtypes, both sides keep it, and a sender whose later tensors differ stops before Gloo sees them. Every message has a tag
/// of its own, so one can never be taken for another.
///
/// Between ranks of one machine, too, a message of Gloo's is three writes and as many threads woken. So there, from its second
/// time on, a message of up to 1 MiB is handed over in shared memory (near_messages.hpp), and so are gathers if all ranks are on
/// one machine (gathers.hpp). The header of the first time says where. Larger messages stay with Gloo, whose threads move them
/// while the ranks compute; so do the connections by which a lost rank is noticed. Replicas of a stage that are all on one
/// machine sum in shared memory, too (shared_sums.hpp).

namespace chevron {

struct gloo_options {
  std::string address = "127.0.0.1";      ///< of this machine; where the others connect to
  std::chrono::milliseconds join{60000};  ///< how long ranks wait for each other at the start
  bool shared_memory = true;              ///< between ranks of one machine that can open each other's
};

class gloo_transport final : public transport {
 public:
  /// Joins the other ranks of the job. `store` and `watch` as `launch` gives them; every rank makes its transports in one order.
  gloo_transport(layout const& where, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<failure_watch> watch,
                 gloo_options const& options = {})
      : transport(where),
        store_(std::move(store)),
        watch_(std::move(watch)),
        room_(store_, watch_, where),
        waits_(*this, watch_),
        gathers_(where, waits_) {
    if (where.world() > 1) join(options);
  }
  gloo_transport(layout const& where, launched const& job)
      : gloo_transport(where, job.store, job.watch, {.address = job.interface_address, .join = job.join}) {}

  ~gloo_transport() override {
    if (!waits_.broken() && std::uncaught_exceptions() == 0) {
      try {
        close();
      } catch (std::exception const&) {
        waits_.set_broken();
      }
    }
    if (closed_ || where().world() == 1) return;
    watch_->look_away();
    // A broken group's destructor waits for operations that will never end: let it be, the process is about to end anyway.
    (void)world_.release();
    (void)replicas_.release();
  }

  /// The normal end: waits until every rank has come this far and all sends are done, then closes the connections. Implied by
  /// the destructor, which however cannot report.
  void close() {
    if (closed_ || where().world() == 1) return;
    finish_first_sends();
    watch_->look_away();
    awaited const mine = everybody(end_of_job);
    waits_.collective(waits_.posting(mine, [&] { return world_->barrier(); }), mine);
    // Nobody closes a connection before all have left the barrier.
    room_.leave();
    sends_.clear();
    receives_.clear();
    sums_.clear();
    replicas_.reset();
    world_.reset();
    closed_ = true;
  }

  /// Also forgets the shapes of earlier programs: all ranks open together.
  void open(slot_counts const& slots) override {
    finish_first_sends();
    if (near_ != nullptr) near_->forget(step());
    agreed_.clear();
    ++turn_;
    sends_.clear();
    receives_.clear();
    sends_.resize(static_cast<std::size_t>(slots.send));
    receives_.resize(static_cast<std::size_t>(slots.receive));
  }

  void begin_step(long step) override {
    transport::begin_step(step);
    finish_first_sends();
    watch_->throw_if_failed({.words = "the start of the step", .step = step});
  }

  void post_send(int peer, action what, std::uint16_t send_slot, std::span<at::Tensor const> values) override {
    awaited const mine = message(peer, what);
    watch_->throw_if_failed(mine);
    auto& slot = sends_.at(send_slot);
    slot.about = mine;
    slot.works.clear();
    slot.values.clear();
    for (auto const& value : values) slot.values.push_back(detail::sendable(value, mine, at::kCPU, "Gloo"));
    auto const tag = detail::tag_in_turn(detail::tag_of(what), turn_);
    auto const known = agreed_.find(tag);
    bool const first = known == agreed_.end();
    if (!first && !detail::fits(slot.values, known->second.shapes)) {
      refuse(mine, known->second.shapes, detail::shapes_of(slot.values));
    }
    if (!first && known->second.near.place != nullptr) {
      near_->hand_over(known->second.near, slot.values, mine, [&] { take_what_came(); });
      slot.values.clear();
      return;
    }
    if (first) {
      // The receiver cannot post before it has read the header, and it may first have to send to us: a sender that waited here
      // would close a circle. So the first of each message is sent from a copy, and waited for before the next step.
      for (auto& value : slot.values) {
        if (value.defined()) value = value.clone();
      }
      send_header(slot, agreed_.emplace(tag, agree(slot)).first->second, tag);
    }
    for (std::size_t i = 0; i < slot.values.size(); ++i) send(slot, slot.values[i], tag, i + 1);
    if (first) {
      first_sends_.push_back(std::move(slot));
      slot = {};
    }
  }

  void post_receive(int peer, action what, std::uint16_t receive_slot) override {
    awaited const mine = message(peer, what);
    watch_->throw_if_failed(mine);
    auto& slot = receives_.at(receive_slot);
    slot.about = mine;
    slot.tag = detail::tag_in_turn(detail::tag_of(what), turn_);
    slot.works.clear();
    slot.comes = nullptr;
    auto const known = agreed_.find(slot.tag);
    slot.header_comes = known == agreed_.end();
    if (slot.header_comes) {
      slot.header = at::empty({header_words + 1}, at::kLong);
      slot.header_work = post_one(slot.about, slot.header, slot.tag, 0);
    } else if (known->second.near.place != nullptr) {
      slot.comes = &known->second;
      slot.number = ++known->second.near.count;
    } else {
      post_values(slot, known->second.shapes);
    }
  }

  std::span<at::Tensor> receive(std::uint16_t receive_slot) override {
    auto& slot = receives_.at(receive_slot);
    if (slot.header_comes) {
      waits_.work(*slot.header_work, slot.about);
      auto const* words = slot.header.data_ptr<std::int64_t>();
      detail::message_shapes shapes(words, words + std::min<std::int64_t>(words[0], header_words));
      if (words[0] > header_words) {
        auto rest = at::empty({words[0] - header_words}, at::kLong);
        waits_.work(*post_one(slot.about, rest, slot.tag, 0), slot.about);
        shapes.insert(shapes.end(), rest.data_ptr<std::int64_t>(), rest.data_ptr<std::int64_t>() + rest.numel());
      }
      std::int64_t const place = words[header_words];
      slot.header_comes = false;
      slot.header_work.reset();
      post_values(slot, shapes);
      agreement agreed{.shapes = std::move(shapes)};
      if (near_ != nullptr) agreed.near = near_->from(slot.about.peer, slot.values, place);
      agreed_.emplace(slot.tag, std::move(agreed));
    }
    if (slot.comes != nullptr) {
      near_->wait_for(slot.comes->near, slot.number, slot.about);
      take(slot);
    }
    for (auto& work : slot.works) waits_.work(*work, slot.about);
    slot.works.clear();
    return slot.values;
  }

  void wait_send(std::uint16_t send_slot) override {
    auto& slot = sends_.at(send_slot);
    for (auto& work : slot.works) waits_.work(*work, slot.about);
    slot.works.clear();
    slot.values.clear();
  }

  void start_sum(int bucket, at::Tensor values) override {
    if (where().replicas == 1) return;
    if (!values.is_contiguous()) {
      throw usage_error("the sum of gradients of bucket " + std::to_string(bucket) +
                        " needs a contiguous tensor. Remedy: .contiguous()");
    }
    if (near_sums_ != nullptr) return near_sums_->start(bucket, std::move(values));
    std::vector<at::Tensor> list{std::move(values)};
    sums_[bucket] = waits_.posting(everybody(sum_of_gradients), [&] { return replicas_->allreduce(list); });
  }

  void wait_sum(int bucket) override {
    if (where().replicas == 1) return;
    awaited const mine = everybody(sum_of_gradients);
    if (near_sums_ != nullptr) return near_sums_->finish(bucket, [&](auto const& done) { waits_.flag(done, mine); });
    if (auto work = std::exchange(sums_[bucket], {})) waits_.collective(std::move(work), mine);
  }

  void gather(std::span<double const> mine, std::span<double> all) override {
    check_room(mine.size(), all.size());
    gather_bytes(mine.data(), mine.size_bytes(), all.data(), "gather");
  }

  void start_gather(std::span<double const> mine) override {
    early_numbers_ = mine.size();
    gathers_.start(board::early_gather, mine.data(), mine.size_bytes(), everybody(early));
  }

  void finish_gather(std::span<double> all) override {
    check_room(early_numbers_, all.size());
    gathers_.finish(board::early_gather, all.data(), everybody(early));
  }

  std::vector<std::string> gather_text(std::string const& mine) override {
    auto const world = static_cast<std::size_t>(where().world());
    if (world == 1) return {mine};
    double const length = static_cast<double>(mine.size());
    std::vector<double> lengths(world);
    gather({&length, 1}, lengths);
    auto const longest = static_cast<std::size_t>(*std::max_element(lengths.begin(), lengths.end()));
    std::string padded = mine;
    padded.resize(longest);
    std::string all(longest * world, '\0');
    gather_bytes(padded.data(), longest, all.data(), "gather of texts");
    std::vector<std::string> out;
    for (std::size_t r = 0; r < world; ++r) out.push_back(all.substr(r * longest, static_cast<std::size_t>(lengths[r])));
    return out;
  }

 private:
  using work_ptr = detail::bounded_waits::work_ptr;
  using board = detail::shared_memory::board;

  static constexpr std::int64_t header_words = 64;
  static constexpr char const* end_of_job = "the end of the job";
  static constexpr char const* early = "gather of what decides the last step";
  static constexpr char const* sum_of_gradients = "sum of gradients";

  /// What both sides know of a message that comes again.
  struct agreement {
    detail::message_shapes shapes;
    detail::near_message near{};
  };
  struct outgoing {
    awaited about;
    std::vector<work_ptr> works;
    std::vector<at::Tensor> values;
    std::vector<at::Tensor> headers;
  };
  struct incoming {
    awaited about;
    std::uint32_t tag = 0;
    bool header_comes = false;
    at::Tensor header;
    work_ptr header_work;
    agreement const* comes = nullptr;  // in shared memory, for the `number`th time; null if it is not awaited there
    std::uint64_t number = 0;
    std::vector<work_ptr> works;
    std::vector<at::Tensor> values;
  };

  awaited message(int peer, action what) const { return {.peer = where().global_of(peer), .what = what, .step = step()}; }
  awaited everybody(char const* words) const { return {.words = words, .step = step()}; }

  /// As the sender: decides how this message goes from its second time on.
  agreement agree(outgoing const& slot) {
    agreement out{.shapes = detail::shapes_of(slot.values)};
    if (near_ != nullptr) out.near = near_->to(slot.about.peer, slot.values);
    return out;
  }

  void send_header(outgoing& slot, agreement const& agreed, std::uint32_t tag) {
    auto const& shapes = agreed.shapes;
    auto first_part = at::zeros({header_words + 1}, at::kLong);
    first_part.data_ptr<std::int64_t>()[header_words] = near_ != nullptr ? near_->place_of(agreed.near) : 0;
    auto const first_count = std::min<std::int64_t>(shapes[0], header_words);
    std::copy_n(shapes.begin(), first_count, first_part.data_ptr<std::int64_t>());
    slot.headers = {first_part};
    send(slot, first_part, tag, 0);
    if (shapes[0] == first_count) return;
    auto rest = at::empty({shapes[0] - first_count}, at::kLong);
    std::copy(shapes.begin() + first_count, shapes.end(), rest.data_ptr<std::int64_t>());
    slot.headers.push_back(rest);
    send(slot, rest, tag, 0);
  }

  [[noreturn]] void refuse(awaited const& mine, detail::message_shapes const& agreed, detail::message_shapes const& actual) {
    waits_.set_broken();
    detail::refuse_shapes(*watch_, mine, where().global_rank, agreed, actual);
  }

  void send(outgoing& slot, at::Tensor& value, std::uint32_t tag, std::size_t index) {
    if (!value.defined() || value.numel() == 0) return;
    std::vector<at::Tensor> list{value};
    slot.works.push_back(
        waits_.posting(slot.about, [&] { return world_->send(list, slot.about.peer, detail::tag_of_tensor(tag, index)); }));
  }

  work_ptr post_one(awaited const& about, at::Tensor& value, std::uint32_t tag, std::size_t index) {
    std::vector<at::Tensor> list{value};
    return waits_.posting(about, [&] { return world_->recv(list, about.peer, detail::tag_of_tensor(tag, index)); });
  }

  void post_values(incoming& slot, detail::message_shapes const& shapes) {
    detail::make_room(slot.values, shapes, at::kCPU);
    for (std::size_t i = 0; i < slot.values.size(); ++i) {
      at::Tensor& value = slot.values[i];
      if (value.defined() && value.numel() > 0) slot.works.push_back(post_one(slot.about, value, slot.tag, i + 1));
    }
  }

  void take(incoming& slot) {
    auto const& agreed = *std::exchange(slot.comes, nullptr);
    detail::make_room(slot.values, agreed.shapes, at::kCPU);
    near_->take(agreed.near, slot.number, slot.about.peer, slot.values);
  }
  void take_what_came() {
    for (auto& slot : receives_) {
      if (slot.comes != nullptr && detail::near_messages::has_come(slot.comes->near, slot.number)) take(slot);
    }
  }

  void finish_first_sends() {
    for (auto& slot : first_sends_) {
      for (auto& work : slot.works) waits_.work(*work, slot.about);
    }
    first_sends_.clear();
  }

  void gather_bytes(void const* mine, std::size_t bytes, void* all, char const* words) {
    gathers_.start(board::gather, mine, bytes, everybody(words));
    gathers_.finish(board::gather, all, everybody(words));
  }
  void check_room(std::size_t mine, std::size_t room) const {
    if (room == mine * static_cast<std::size_t>(where().world())) return;
    throw usage_error("gather of " + std::to_string(mine) + " numbers needs room for " + std::to_string(where().world()) +
                      " times as many, not for " + std::to_string(room));
  }

  /// Meets all ranks in the store, then connects to them.
  void join(gloo_options const& options) {
    awaited const mine{.words = "the other ranks to join"};
    auto const rank = where().global_rank;
    auto const patience = std::min(options.join, deadline());
    auto const guarded = [&](auto const& work) {
      try {
        work();
      } catch (error const&) {
        waits_.set_broken();
        throw;
      } catch (std::exception const& e) {
        waits_.fail(mine, failure_watch::interruption::none, detail::message_of(e));
      }
    };
    guarded([&] {
      room_.meet(patience);
      world_ = detail::connect_gloo(options.address, store_, room_.prefix() + "world/", rank, where().world(), patience, 1);
    });
    gathers_.connect(*world_);
    check_connections();
    memory_ = detail::shared_memory::make(options.shared_memory, rank, where().world(), *this);
    if (memory_ != nullptr) {
      near_ = std::make_unique<detail::near_messages>(*memory_, where(), waits_);
      gathers_.share(*memory_);
    }
    if (where().replicas > 1) guarded([&] { join_replicas(options.address, patience); });
    for (int peer = 0; peer < where().world(); ++peer) {
      if (peer == rank) continue;
      std::vector<at::Tensor> list{at::empty({1}, at::kByte)};
      watch_->look_at(peer, waits_.posting(mine, [&] { return world_->recv(list, peer, detail::never_sent); }));
    }
  }

  /// With the other copies of this rank's stages: in shared memory if all can read it, else over Gloo.
  void join_replicas(std::string const& address, std::chrono::milliseconds patience) {
    auto const me = where().pipeline_rank();
    std::vector<int> copies;
    for (int r = 0; r < where().replicas; ++r) copies.push_back(r * where().pipeline_ranks + me);
    if (memory_ != nullptr && memory_->are_near(copies)) {
      near_sums_ = std::make_unique<detail::shared_sums>(*memory_, std::move(copies), where().replica(), watch_);
      return;
    }
    replicas_ = detail::connect_gloo(address, store_, room_.prefix() + "replicas" + std::to_string(me) + "/", where().replica(),
                                     where().replicas, patience, 2);
  }

  /// LibTorch's Gloo is built against headers we do not have: one exchange with known numbers shows that both sides of this
  /// program and that library understand each other.
  void check_connections() {
    std::vector<double> all(static_cast<std::size_t>(where().world()));
    double const mine = 1.5 * where().global_rank;
    gather({&mine, 1}, all);
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (all[r] != 1.5 * static_cast<double>(r)) {
        throw preflight_error("Gloo gives wrong numbers. Remedy: build against the LibTorch that is loaded",
                              {.rank = where().global_rank});
      }
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<failure_watch> watch_;
  store_room room_;
  detail::bounded_waits waits_;
  detail::gathers gathers_;
  detail::gloo_group world_;     // messages and gathers
  detail::gloo_group replicas_;  // this stage's copies; null if there is one only, or they share memory

  std::unique_ptr<detail::shared_memory> memory_;   // null: everything goes by Gloo
  std::unique_ptr<detail::near_messages> near_;     // what does not
  std::unique_ptr<detail::shared_sums> near_sums_;  // null: sums go by Gloo

  std::unordered_map<std::uint32_t, agreement> agreed_;  // by tag: every message seen
  std::vector<outgoing> sends_;
  std::vector<incoming> receives_;
  std::vector<outgoing> first_sends_;
  std::unordered_map<int, work_ptr> sums_;
  std::size_t early_numbers_ = 0;  // of `start_gather`
  unsigned turn_ = 0;              // how often `open` was called
  bool closed_ = false;
};

}  // namespace chevron
