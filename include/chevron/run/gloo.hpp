#pragma once

#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#if !__has_include(<gloo/context.h>)
#error \
    "Gloo's headers are missing (LibTorch's wheel leaves them out). Remedy: add <include>/chevron/run/gloo_shim to the include path"
#endif
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <chevron/run/error.hpp>
#include <chevron/run/launch.hpp>
#include <chevron/run/message.hpp>
#include <chevron/run/shared_memory.hpp>
#include <chevron/run/store_room.hpp>
#include <chevron/run/transport.hpp>
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
/// time on, a message of up to 1 MiB is handed over in shared memory (shared_memory.hpp), and so are gathers if all ranks are on
/// one machine. The header of the first time says where. Larger messages stay with Gloo, whose threads move them while
/// the ranks compute; sums over replicas, and the connections by which a lost rank is noticed, are always Gloo's.

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
      : transport(where), store_(std::move(store)), watch_(std::move(watch)), room_(store_, watch_, where) {
    if (where.world() > 1) join(options);
  }
  gloo_transport(layout const& where, launched const& job)
      : gloo_transport(where, job.store, job.watch, {.address = job.interface_address, .join = job.join}) {}

  ~gloo_transport() override {
    if (!broken_ && std::uncaught_exceptions() == 0) {
      try {
        close();
      } catch (std::exception const&) {
        broken_ = true;
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
    collective(posting({.words = end_of_job, .step = step()}, [&] { return world_->barrier(); }), end_of_job);
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
    forget_messages();
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
    if (!first && known->second.shared != nullptr) {
      hand_over(slot, known->second);
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
    } else if (known->second.shared != nullptr) {
      slot.comes = &known->second;
      slot.number = ++known->second.count;
    } else {
      post_values(slot, known->second.shapes);
    }
  }

  std::span<at::Tensor> receive(std::uint16_t receive_slot) override {
    auto& slot = receives_.at(receive_slot);
    if (slot.header_comes) {
      wait(*slot.header_work, slot.about);
      auto const* words = slot.header.data_ptr<std::int64_t>();
      detail::message_shapes shapes(words, words + std::min<std::int64_t>(words[0], header_words));
      if (words[0] > header_words) {
        auto rest = at::empty({words[0] - header_words}, at::kLong);
        wait(*post_one(slot.about, rest, slot.tag, 0), slot.about);
        shapes.insert(shapes.end(), rest.data_ptr<std::int64_t>(), rest.data_ptr<std::int64_t>() + rest.numel());
      }
      std::int64_t const place = words[header_words];
      slot.header_comes = false;
      slot.header_work.reset();
      post_values(slot, shapes);
      agreed_.emplace(slot.tag, agree(slot, std::move(shapes), place));
    }
    if (slot.comes != nullptr) {
      in_memory(slot.about, [&] { return has_come(slot); });
      take(slot);
    }
    for (auto& work : slot.works) wait(*work, slot.about);
    slot.works.clear();
    return slot.values;
  }

  void wait_send(std::uint16_t send_slot) override {
    auto& slot = sends_.at(send_slot);
    for (auto& work : slot.works) wait(*work, slot.about);
    slot.works.clear();
    slot.values.clear();
  }

  void start_sum(int bucket, at::Tensor values) override {
    if (where().replicas == 1) return;
    auto& sum = sums_[bucket];
    if (!values.is_contiguous()) {
      throw usage_error("the sum of gradients of bucket " + std::to_string(bucket) +
                        " needs a contiguous tensor. Remedy: .contiguous()");
    }
    std::vector<at::Tensor> list{values};
    sum = posting({.words = "sum of gradients", .step = step()}, [&] { return replicas_->allreduce(list); });
  }

  void wait_sum(int bucket) override {
    if (where().replicas == 1) return;
    if (auto work = std::exchange(sums_[bucket], {})) collective(std::move(work), "sum of gradients");
  }

  void gather(std::span<double const> mine, std::span<double> all) override {
    if (all.size() != mine.size() * static_cast<std::size_t>(where().world())) {
      throw usage_error("gather of " + std::to_string(mine.size()) + " numbers needs room for " +
                        std::to_string(where().world()) + " times as many, not for " + std::to_string(all.size()));
    }
    if (where().world() == 1) {
      std::copy(mine.begin(), mine.end(), all.begin());
      return;
    }
    gather_bytes(mine.data(), mine.size_bytes(), all.data(), "gather");
  }

  void start_gather(std::span<double const> mine) override {
    if (!early_all_.defined() || early_mine_.numel() != static_cast<std::int64_t>(mine.size())) {
      early_mine_ = at::empty({static_cast<std::int64_t>(mine.size())}, at::kDouble);
      early_all_ = at::empty({where().world() * early_mine_.numel()}, at::kDouble);
    }
    std::copy(mine.begin(), mine.end(), early_mine_.data_ptr<double>());
    early_shown_ = on_boards(mine.size_bytes());
    if (where().world() == 1) {
      early_all_.copy_(early_mine_);
    } else if (early_shown_) {
      memory_->show(detail::shared_memory::board::early_gather, mine.data(), mine.size_bytes());
    } else if (!mine.empty()) {
      early_work_ = posting({.words = early, .step = step()}, [&] { return world_->_allgather_base(early_all_, early_mine_); });
    }
  }

  void finish_gather(std::span<double> all) override {
    if (auto work = std::exchange(early_work_, {})) collective(std::move(work), early);
    if (std::exchange(early_shown_, false)) {
      read_boards(detail::shared_memory::board::early_gather, early_mine_.nbytes(), early_all_.data_ptr(), early);
    }
    std::copy_n(early_all_.data_ptr<double>(), std::min<std::size_t>(all.size(), early_all_.nbytes() / sizeof(double)), all.begin());
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
    if (longest > 0) gather_bytes(padded.data(), longest, all.data(), "gather of texts");
    std::vector<std::string> out;
    for (std::size_t r = 0; r < world; ++r) out.push_back(all.substr(r * longest, static_cast<std::size_t>(lengths[r])));
    return out;
  }

 private:
  using work_ptr = c10::intrusive_ptr<c10d::Work>;
  using clock = failure_watch::clock;

  static constexpr std::int64_t header_words = 64;
  static constexpr char const* end_of_job = "the end of the job";
  static constexpr char const* early = "gather of what decides the last step";
  // All waits are ended by the watch; Gloo's own timeout, which breaks all its connections, is for the case that the watch
  // hangs (its store does not answer).
  static constexpr auto behind_the_watch = std::chrono::milliseconds(1500);

  /// What both sides know of a message that comes again.
  struct agreement {
    detail::message_shapes shapes;
    std::size_t bytes = 0;
    detail::shared_message* shared = nullptr;  // null: Gloo carries it
    std::uint64_t count = 0;                   // how often it went, or was to come, in shared memory
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

  void send_header(outgoing& slot, agreement const& agreed, std::uint32_t tag) {
    auto const& shapes = agreed.shapes;
    auto first_part = at::zeros({header_words + 1}, at::kLong);
    first_part.data_ptr<std::int64_t>()[header_words] =
        agreed.shared == nullptr ? 0 : memory_->offset_of(*agreed.shared);
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
    broken_ = true;
    detail::refuse_shapes(*watch_, mine, where().global_rank, agreed, actual);
  }

  /// Runs something that starts a transfer: Gloo throws at once if the connection is already broken.
  template <class Start>
  work_ptr posting(awaited const& mine, Start const& start) {
    try {
      return start();
    } catch (std::exception const& e) {
      fail(mine, failure_watch::interruption::none, detail::message_of(e));
    }
  }

  void send(outgoing& slot, at::Tensor& value, std::uint32_t tag, std::size_t index) {
    if (!value.defined() || value.numel() == 0) return;
    std::vector<at::Tensor> list{value};
    slot.works.push_back(
        posting(slot.about, [&] { return world_->send(list, slot.about.peer, detail::tag_of_tensor(tag, index)); }));
  }

  work_ptr post_one(awaited const& about, at::Tensor& value, std::uint32_t tag, std::size_t index) {
    std::vector<at::Tensor> list{value};
    return posting(about, [&] { return world_->recv(list, about.peer, detail::tag_of_tensor(tag, index)); });
  }

  void post_values(incoming& slot, detail::message_shapes const& shapes) {
    detail::make_room(slot.values, shapes, at::kCPU);
    for (std::size_t i = 0; i < slot.values.size(); ++i) {
      at::Tensor& value = slot.values[i];
      if (value.defined() && value.numel() > 0) slot.works.push_back(post_one(slot.about, value, slot.tag, i + 1));
    }
  }

  // ---- In shared memory

  /// As the sender: decides how this message goes from its second time on.
  agreement agree(outgoing const& slot) {
    agreement out{.shapes = detail::shapes_of(slot.values)};
    for (auto const& value : slot.values) out.bytes += value.defined() ? value.nbytes() : 0;
    if (memory_ == nullptr || !memory_->is_near(slot.about.peer)) return out;
    if (out.bytes > detail::shared_memory::largest_message) return out;
    out.shared = memory_->new_message();
    return out;
  }
  /// As the receiver: what the header says.
  agreement agree(incoming const& slot, detail::message_shapes shapes, std::int64_t place) {
    agreement out{.shapes = std::move(shapes)};
    for (auto const& value : slot.values) out.bytes += value.defined() ? value.nbytes() : 0;
    if (place != 0) out.shared = memory_->message_of(slot.about.peer, static_cast<std::uint64_t>(place));
    return out;
  }

  void hand_over(outgoing& slot, agreement& agreed) {
    detail::shared_message& message = *agreed.shared;
    auto const number = ++agreed.count;
    detail::shared_memory::block* room = nullptr;
    // This waits only if the receiver is two whole steps behind, or 256 MiB of messages wait to be taken.
    auto const is_room = [&] {
      return detail::read(message.taken) + 2 >= number && (room = memory_->free_block(agreed.bytes)) != nullptr;
    };
    in_memory(slot.about, [&] { return is_room() || (take_what_came() && is_room()); });
    std::byte* to = memory_->at(where().global_rank, room->offset);
    for (auto const& value : slot.values) {
      if (!value.defined() || value.numel() == 0) continue;
      std::memcpy(to, value.const_data_ptr(), value.nbytes());
      to += value.nbytes();
    }
    room->message = &message;
    room->number = number;
    message.offset[number % 2] = room->offset;
    detail::publish(message.sent, number);
    memory_->ring(slot.about.peer);
    slot.values.clear();
  }

  static bool has_come(incoming const& slot) { return detail::read(slot.comes->shared->sent) >= slot.number; }

  void take(incoming& slot) {
    auto const& agreed = *std::exchange(slot.comes, nullptr);
    std::byte const* from = memory_->at(slot.about.peer, agreed.shared->offset[slot.number % 2]);
    detail::make_room(slot.values, agreed.shapes, at::kCPU);
    for (at::Tensor const& value : slot.values) {
      if (!value.defined() || value.numel() == 0) continue;
      std::memcpy(value.mutable_data_ptr(), from, value.nbytes());
      from += value.nbytes();
    }
    detail::publish(agreed.shared->taken, slot.number);
    memory_->ring(slot.about.peer);
  }
  /// While this rank waits for room: another may wait for the same, from us.
  bool take_what_came() {
    for (auto& slot : receives_) {
      if (slot.comes != nullptr && has_come(slot)) take(slot);
    }
    return true;
  }

  /// Before other messages get the memory of these: all have been taken.
  void forget_messages() {
    if (memory_ == nullptr) return;
    in_memory({.words = "the others to take what was sent", .step = step()}, [&] { return memory_->all_taken(); });
    memory_->start_anew();
  }

  bool on_boards(std::size_t bytes) const {
    return memory_ != nullptr && memory_->all_near() && bytes > 0 && bytes <= detail::shared_memory::largest_gather;
  }

  void read_boards(detail::shared_memory::board which, std::size_t bytes, void* all, char const* words) {
    awaited const mine{.words = words, .step = step()};
    in_memory(mine, [&] { return memory_->all_shown(which); });
    auto* to = static_cast<std::byte*>(all);
    for (int r = 0; r < where().world(); ++r, to += bytes) {
      auto const [from, count] = memory_->shown_by(r, which);
      if (count != bytes) {
        throw preflight_error("rank " + std::to_string(r) + " gathers " + std::to_string(count) + " bytes where rank " +
                                  std::to_string(where().global_rank) + " gathers " + std::to_string(bytes),
                              {.rank = where().global_rank, .peer = r, .step = step(), .action = words});
      }
      std::memcpy(to, from, bytes);
    }
  }

  /// Waits for something that others do in shared memory.
  template <class Came>
  void in_memory(awaited const& mine, Came const& came) {
    if (came()) return;
    auto const last = clock::now() + deadline();
    watch_->begin_wait(mine, deadline());
    bool late = false;
    // Short naps: the watch, which knows of failures, does not ring.
    while (!came() && !watch_->failed() && !late) {
      auto const left = last - clock::now();
      memory_->sleep(came, std::clamp<clock::duration>(left, std::chrono::milliseconds(0), std::chrono::milliseconds(20)));
      late = left <= clock::duration::zero();
    }
    auto const ended = watch_->end_wait(late);
    if (!came()) fail(mine, ended, "");
  }

  /// Waits for a send or a receive.
  void wait(c10d::Work& work, awaited const& mine) {
    auto const longest = deadline();
    watch_->begin_wait(mine, longest, &work);
    bool done = false;
    std::string what;
    try {
      done = work.wait(longest + behind_the_watch);
    } catch (std::exception const& e) {
      what = detail::message_of(e);
    }
    auto const ended = watch_->end_wait();
    if (!done) fail(mine, ended, what);
  }

  /// Waits for a collective, whose work cannot be aborted: its thread stays behind if it must.
  void collective(work_ptr work, char const* words) {
    awaited const mine{.words = words, .step = step()};
    auto const done = std::make_shared<std::atomic<bool>>(false);
    work->getFuture()->addCallback([done, watch = watch_](c10::ivalue::Future&) { watch->wake(*done); });
    watch_->begin_wait(mine, deadline());
    bool const came = watch_->wait_for(*done);
    auto const ended = watch_->end_wait();
    if (!came) fail(mine, ended, "");
    try {
      work->wait();
    } catch (std::exception const& e) {
      fail(mine, failure_watch::interruption::none, detail::message_of(e));
    }
  }

  [[noreturn]] void fail(awaited const& mine, failure_watch::interruption ended, std::string const& what) {
    broken_ = true;
    failure found{.rank = mine.peer, .step = mine.step, .action = mine.action_text(), .reason = ""};
    bool const late = ended == failure_watch::interruption::deadline || what.find("imed out") != std::string::npos ||
                      what.find("timeout") != std::string::npos;
    if (late) {
      found.code = static_cast<int>(exit_code::timeout);
      found.reason = mine.peer >= 0 ? failure_watch::no_answer(mine.peer, deadline())
                                    : "the " + found.action + " did not end within " + std::to_string(deadline().count()) + " ms";
    } else {
      found.reason =
          (mine.peer >= 0 ? "rank " + std::to_string(mine.peer) + " was lost" : "a rank was lost, by the " + found.action) +
          (what.empty() ? "" : " (" + what + ")");
    }
    throw_failure(watch_->report(found), mine, where().global_rank);
  }

  void finish_first_sends() {
    for (auto& slot : first_sends_) {
      for (auto& work : slot.works) wait(*work, slot.about);
    }
    first_sends_.clear();
  }

  void gather_bytes(void const* mine, std::size_t bytes, void* all, char const* words) {
    if (bytes == 0) return;
    if (on_boards(bytes)) {
      memory_->show(detail::shared_memory::board::gather, mine, bytes);
      read_boards(detail::shared_memory::board::gather, bytes, all, words);
      return;
    }
    auto const size = static_cast<std::int64_t>(bytes);
    auto const world = where().world();
    if (!gathered_.defined() || gathered_.size(1) != size) {
      to_gather_ = at::empty({size}, at::kByte);
      gathered_ = at::empty({world, size}, at::kByte);
    }
    std::memcpy(to_gather_.data_ptr(), mine, bytes);
    // A view, since the shapes must match; the memory is the same.
    auto flat = gathered_.view({-1});
    collective(posting({.words = words, .step = step()}, [&] { return world_->_allgather_base(flat, to_gather_); }), words);
    std::memcpy(all, gathered_.data_ptr(), gathered_.nbytes());
  }

  /// Gloo writes to its sockets so that a peer's end kills the writer by SIGPIPE; as an error it can be reported. A program that
  /// has chosen what to do with this signal is left alone.
  static void survive_broken_pipes() {
    struct sigaction now {};
    if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
  }

  /// Meets all ranks in the store, then connects to them. Nothing is connected lazily: Gloo's lazy connections know no timeout.
  void join(gloo_options const& options) {
    survive_broken_pipes();
    awaited const mine{.words = "the other ranks to join"};
    auto const rank = where().global_rank;
    auto const patience = std::min(options.join, deadline());
    try {
      room_.meet(patience);
      auto const device = c10d::ProcessGroupGloo::createDeviceForHostname(options.address);
      world_ = group(device, "world/", rank, where().world(), patience, 1);
      if (where().replicas > 1) {
        replicas_ = group(device, "replicas" + std::to_string(where().pipeline_rank()) + "/", where().replica(), where().replicas,
                          patience, 2);
      }
    } catch (error const&) {
      broken_ = true;
      throw;
    } catch (std::exception const& e) {
      fail(mine, failure_watch::interruption::none, detail::message_of(e));
    }
    check_connections();
    memory_ = detail::shared_memory::make(options.shared_memory, rank, where().world(), *this);
    for (int peer = 0; peer < where().world(); ++peer) {
      if (peer == rank) continue;
      std::vector<at::Tensor> list{at::empty({1}, at::kByte)};
      watch_->look_at(peer, posting(mine, [&] { return world_->recv(list, peer, detail::never_sent); }));
    }
  }

  c10::intrusive_ptr<c10d::ProcessGroupGloo> group(std::shared_ptr<::gloo::transport::Device> const& device,
                                                   std::string const& name, int rank, int size,
                                                   std::chrono::milliseconds patience, int threads) {
    auto options = c10d::ProcessGroupGloo::Options::create(patience);
    options->devices.push_back(device);
    options->threads = threads;
    auto made = c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>(room_.prefix() + name, store_),
                                                            rank, size, options);
    // From here on the watch keeps the time; Gloo's default would break all connections in the middle of a long step.
    static_cast<c10d::Backend&>(*made).setTimeout(std::chrono::hours(24));
    return made;
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
  c10::intrusive_ptr<c10d::ProcessGroupGloo> world_;     // messages and gathers
  c10::intrusive_ptr<c10d::ProcessGroupGloo> replicas_;  // this stage's copies; null if there is one only

  std::unique_ptr<detail::shared_memory> memory_;        // null: everything goes by Gloo

  std::unordered_map<std::uint32_t, agreement> agreed_;  // by tag: every message seen
  std::vector<outgoing> sends_;
  std::vector<incoming> receives_;
  std::vector<outgoing> first_sends_;
  std::unordered_map<int, work_ptr> sums_;
  at::Tensor to_gather_, gathered_;
  at::Tensor early_mine_, early_all_;  // of `start_gather`
  work_ptr early_work_;
  bool early_shown_ = false;
  unsigned turn_ = 0;                                                 // how often `open` was called
  bool broken_ = false;
  bool closed_ = false;
};

}  // namespace chevron
