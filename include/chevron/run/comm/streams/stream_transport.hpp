#pragma once
// long: one class, whose members all work on its slots, channels and agreements

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chevron/lower/edges.hpp>
#include <chevron/run/comm/message_signature.hpp>
#include <chevron/run/comm/rendezvous.hpp>
#include <chevron/run/comm/streams/stream_watch.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/failure/failure.hpp>
#include <chevron/run/failure/failure_watch.hpp>
#include <chevron/run/failure/wait_table.hpp>

/// \file
/// The transport over streams: every directed edge has a channel and a stream of its own at both ends.

namespace chevron {

/// Between ranks that compute on a stream: NCCL between GPUs (nccl_transport.hpp), worker threads in tests. `Streams` makes
/// streams, events and channels; `host_streams` shows what it has to have.
///
/// - A channel is made and used once at the start, by all ranks in one global order, so that nothing is connected later. There
///   is one for each directed edge of the pipeline, one for the sums over replicas and one for gathers; each has a stream.
/// - `post_send` and `post_receive` put the transfer on the stream of its edge, behind what the rank was asked to compute so far;
///   `receive`, `wait_send` and `wait_all_reduce` put what the rank computes next behind the transfer. The host waits for the end of a
///   gather only: it needs the numbers.
/// - A receive slot keeps its memory from step to step. A receive into it comes after all that the rank was asked to compute
///   before it was posted, and so after the last use of what it held. Where the caller kept a tensor the slot gets new memory.
/// - Channels know nothing of shapes. The first time a message goes its way the sender tells shapes and dtypes through the
///   store; both sides keep them, and a sender whose later tensors differ stops before anything is sent.
/// - The streams are watched (stream_watch.hpp): what does not end within the deadline, a channel's own fault, and a failure
///   that another rank published end all that is under way on this rank; its next call throws.
template <class Streams>
class stream_transport : public transport {
 public:
  /// Joins the other ranks of the job. `store` and `watch` as `launch` gives them; every rank makes its transports in one order.
  /// \param join how long ranks wait for each other at the start
  /// \param arguments of the streams
  template <class... Arguments>
  stream_transport(chevron::topology const& where, c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<failure_watch> watch,
                   std::chrono::milliseconds join, Arguments&&... arguments)
      : transport(where),
        rendezvous_(std::move(store), watch, where),
        failures_(std::move(watch)),
        streams_(std::forward<Arguments>(arguments)...),
        watch_(streams_, *failures_) {
    rendezvous_.join(join);
    if (where.world() == 1) return;
    watch_.deadline(join);
    numbers_ = make_line("world", where.global_rank, where.world());
    for (auto* g : {&now_, &early_}) g->done = std::make_unique<point>(watch_);
    all_gather({}, {});
    if (where.replicas > 1) {
      sums_ = make_line("replicas of rank " + std::to_string(where.pipeline_rank()), where.replica(), where.replicas);
      at::Tensor const once = at::zeros({1}, streams_.device());
      start_all_reduce(0, once);
      wait_all_reduce(0);
    }
    watch_.deadline(deadline());
  }

  ~stream_transport() override {
    if (!failures_->failed() && std::uncaught_exceptions() == 0) {
      try {
        close();
      } catch (std::exception const&) {
        // Reported by those who wait; here there is nobody to tell.
      }
    }
    if (!closed_) streams_.abort();
  }

  /// The normal end: waits until every rank has come this far and all transfers are done. Implied by the destructor, which
  /// however cannot report.
  void close() {
    if (closed_) return;
    if (topology().world() > 1) {
      // Through the store: a rank that does something else yet would gather over the channel.
      ++done_.ends;
      all_gather_texts("", end_of_job, {.of = count::ends, .least = 1});
      while (!watch_.idle()) {
        check({.words = end_of_job, .step = step()});
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    closed_ = true;
  }

  at::Device device() const { return streams_.device(); }

  void connect(std::span<edge const> edges) override {
    int const me = topology().pipeline_rank();
    for (edge const& e : edges) {
      if (e.from != me && e.to != me) continue;
      bool const sends = e.from == me;
      int const peer = sends ? e.to : e.from;
      auto& mine = sends ? outgoing_ : incoming_;
      if (mine.contains(peer)) continue;
      line made = make_line(
          "edge from " + std::to_string(topology().global_of(e.from)) + " to " + std::to_string(topology().global_of(e.to)),
          sends ? 0 : 1, 2);
      at::Tensor const once[] = {at::zeros({1}, streams_.device())};
      point done(watch_);
      sends ? streams_.send(made->way, made->on, once) : streams_.receive(made->way, made->on, once);
      done.record(made->on, {.peer = topology().global_of(peer), .words = "the first use of their channel"});
      wait_on_host(done);
      mine.emplace(peer, std::move(made));
    }
  }

  void open(slot_counts const& slots) override {
    let_first_sends_go();
    agreed_.clear();
    late_.clear();
    ++turn_;
    sends_.clear();
    receives_.clear();
    for (int i = 0; i < slots.send; ++i) sends_.emplace_back().done = std::make_unique<point>(watch_);
    for (int i = 0; i < slots.receive; ++i) receives_.emplace_back().arrived = std::make_unique<point>(watch_);
  }

  void begin_step(long step) override {
    transport::begin_step(step);
    watch_.deadline(deadline());
    let_first_sends_go();
    check({.words = "the start of the step", .step = step});
  }

  void post_send(int peer, action what, std::uint16_t send_slot, std::span<at::Tensor const> values) override {
    awaited const mine = message(peer, what);
    check(mine);
    outgoing& slot = sends_.at(send_slot);
    slot.values.clear();
    for (at::Tensor const& value : values) slot.values.push_back(detail::sendable(value, mine, streams_.device(), "this rank"));
    auto const tag = detail::tag_in_turn(detail::tag_of(what), turn_);
    auto const known = agreed_.find(tag);
    bool const first = known == agreed_.end();
    if (first) {
      agreement& agreed = agreed_[tag];
      agreed.shapes = detail::shapes_of(slot.values);
      detail::strides_of(slot.values, false, agreed.strides);
      rendezvous_.publish(shapes_key(topology().pipeline_rank(), peer, tag), agreed.text());
    } else if (!detail::fits(slot.values, known->second.shapes)) {
      refuse(mine, known->second.shapes, detail::shapes_of(slot.values));
    } else {
      detail::conform(slot.values, known->second.strides);
    }
    for (at::Tensor& value : slot.values) {
      value = detail::packed(value);
      // The receiver posts the first one only when it needs this message, later than the program says: nothing here may wait for
      // that.
      if (first && value.defined()) value = value.clone();
    }
    line const& to = outgoing_.at(peer);
    behind_computation(*to);
    streams_.send(to->way, to->on, sent_of(slot.values));
    slot.done->record(to->on, mine);
    if (first) {
      first_sends_.push_back(std::move(slot));
      slot.values.clear();
      slot.done = std::make_unique<point>(watch_);
    }
  }

  void post_receive(int peer, action what, std::uint16_t receive_slot) override {
    awaited const mine = message(peer, what);
    check(mine);
    incoming& slot = receives_.at(receive_slot);
    slot.about = mine;
    slot.peer = peer;
    slot.tag = detail::tag_in_turn(detail::tag_of(what), turn_);
    auto& queue = late_[peer];
    auto const known = agreed_.find(slot.tag);
    slot.late = known == agreed_.end() || !queue.empty();
    slot.late ? queue.push_back(receive_slot) : post(slot, known->second.shapes);
  }

  std::span<at::Tensor> receive(std::uint16_t receive_slot) override {
    incoming& slot = receives_.at(receive_slot);
    // Messages of an edge come in order: what was posted before this one is received before it.
    while (slot.late) {
      auto& queue = late_.at(slot.peer);
      incoming& next = receives_.at(queue.front());
      auto known = agreed_.find(next.tag);
      if (known == agreed_.end()) {
        auto const told =
            rendezvous_.wait_for(shapes_key(next.peer, topology().pipeline_rank(), next.tag), next.about, deadline());
        known = agreed_.emplace(next.tag, agreement::of_text(told)).first;
      }
      queue.pop_front();
      next.late = false;
      post(next, known->second.shapes);
    }
    wait(*slot.arrived);
    slot.given = slot.values;
    detail::lay_out(slot.given, agreed_.at(slot.tag).strides);
    return slot.given;
  }

  void wait_send(std::uint16_t send_slot) override {
    outgoing& slot = sends_.at(send_slot);
    if (slot.values.empty()) return;  // a first one: waited for before the next step
    wait(*slot.done);
    slot.values.clear();
  }

  void start_all_reduce(int bucket, at::Tensor values) override {
    if (topology().replicas == 1) return;
    awaited const mine{.words = sum_words, .step = step()};
    check(mine);
    if (!values.is_contiguous()) {
      throw usage_error("the sum of gradients of bucket " + std::to_string(bucket) +
                        " needs a contiguous tensor. Remedy: .contiguous()");
    }
    auto const b = static_cast<std::size_t>(bucket);
    while (summed_.size() <= b) summed_.push_back(std::make_unique<point>(watch_));
    behind_computation(*sums_);
    streams_.sum(sums_->way, sums_->on, values);
    summed_[b]->record(sums_->on, mine);
  }
  void wait_all_reduce(int bucket) override {
    if (topology().replicas > 1) wait(*summed_.at(static_cast<std::size_t>(bucket)));
  }

  void all_gather(std::span<double const> mine, std::span<double> all) override {
    auto const* const words = doing() != nullptr ? doing() : "all_gather";
    start_all_gather_in(now_, mine, words);
    finish_all_gather_in(now_, all, words, {.of = count::gathers, .least = ++done_.gathers});
  }
  void start_all_gather(std::span<double const> mine) override {
    ++done_.early_gathers;
    start_all_gather_in(early_, mine, early_words);
  }
  void finish_all_gather(std::span<double> all) override {
    finish_all_gather_in(early_, all, early_words, {.of = count::early_gathers, .least = done_.early_gathers});
  }
  std::vector<std::string> all_gather_text(std::string const& mine) override {
    return all_gather_texts(mine, doing() != nullptr ? doing() : "all_gather of texts",
                            {.of = count::texts, .least = done_.texts + 1});
  }

 protected:
  void publish(error const& found) override {
    failures_->report(detail::failure_by(topology().global_rank, found.what(), found.code(), found.context()));
  }

 private:
  using stream = typename Streams::stream;
  using event = typename Streams::event;
  using channel = typename Streams::channel;
  using point = typename stream_watch<Streams>::point;
  using count = detail::wait_need::count;

  static constexpr char const* sum_words = "sum of gradients";
  static constexpr char const* early_words = "all_gather of what decides the last step";
  static constexpr char const* end_of_job = "the end of the job";

  /// A channel, with its stream at this end.
  struct line_end {
    stream on;
    event computed;  ///< up to where the rank had computed when the last transfer was asked for
    channel way;
  };
  using line = std::unique_ptr<line_end>;
  struct outgoing {
    std::vector<at::Tensor> values;
    std::unique_ptr<point> done;
  };
  struct incoming {
    awaited about{};
    std::uint32_t tag = 0;
    int peer = -1;
    bool late = false;  ///< its shapes are not known yet, or those of one before it
    std::vector<at::Tensor> values, given;
    std::unique_ptr<point> arrived;
  };
  /// What both sides of a message keep. What a rank computes next must not wait for the host, so strides are those of the first
  /// time: later tensors are given them. One that is expanded arrives with memory for each element, since the next need not be.
  struct agreement {
    detail::message_shapes shapes;
    detail::message_strides strides;

    std::string text() const {
      std::vector<std::int64_t> all = shapes;
      all.insert(all.end(), strides.begin(), strides.end());
      std::string out(all.size() * sizeof(std::int64_t), '\0');
      std::memcpy(out.data(), all.data(), out.size());
      return out;
    }
    static agreement of_text(std::string const& text) {
      std::vector<std::int64_t> all(text.size() / sizeof(std::int64_t));
      std::memcpy(all.data(), text.data(), all.size() * sizeof(std::int64_t));
      auto const end = all.begin() + all.at(0);
      return {{all.begin(), end}, {end, all.end()}};
    }
  };
  struct gathering {
    at::Tensor mine, all;
    std::unique_ptr<point> done;
  };

  line make_line(std::string const& name, int rank, int size) {
    awaited const mine{.words = "the other end of a channel"};
    std::string const key = "channel/" + name;
    if (rank == 0) rendezvous_.publish(key, Streams::make_id());
    auto made = std::make_unique<line_end>(line_end{streams_.make_stream(), streams_.make_event(), {}});
    made->way = streams_.connect(rendezvous_.wait_for(key, mine, deadline()), rank, size, [this] { return failures_->failed(); });
    if (std::string const fault = streams_.fault(); !fault.empty()) lost(mine, fault);
    return made;
  }

  awaited message(int peer, action what) const {
    return {.peer = topology().global_of(peer), .what = what, .step = step(), .within = doing()};
  }

  void check(awaited const& mine) { failures_->throw_if_failed(mine); }

  /// What the rank computes next comes after this.
  void wait(point const& p) {
    if (!streams_.wait(p.at(), [this] { return failures_->failed(); })) lost(p.about());
    check(p.about());
  }
  /// What the host does next comes after this.
  void wait_on_host(point const& p, detail::wait_need const& need = {}) {
    failures_->host_waits(p.about(), {need, &done_, &rendezvous_.prefix()});
    struct end {
      failure_watch& watch;
      ~end() { watch.host_goes_on(); }
    } const ends{*failures_};
    if (!streams_.wait_on_host(p.at(), [this] { return failures_->failed(); })) lost(p.about());
    check(p.about());
  }
  /// The streams have ended before their work was done: the failure that ended them is published, or about to be.
  [[noreturn]] void lost(awaited const& mine, std::string const& why = "the streams were ended") {
    throw_failure(failures_->report({.rank = mine.peer, .step = mine.step, .action = mine.action_text(), .reason = why}), mine,
                  topology().global_rank);
  }

  /// What the rank computes next comes after the transfers, and so may be given their memory.
  void let_first_sends_go() {
    for (outgoing& first : first_sends_) wait(*first.done);
    first_sends_.clear();
  }

  std::vector<std::string> all_gather_texts(std::string const& mine, char const* words, detail::wait_need const& need) {
    ++done_.texts;
    return rendezvous_.all_gather(mine, {.words = words, .step = step()}, deadline(), {need, &done_, &rendezvous_.prefix()});
  }

  void behind_computation(line_end& to) {
    streams_.record(to.computed);
    streams_.wait(to.on, to.computed);
  }

  void post(incoming& slot, detail::message_shapes const& shapes) {
    slot.given.clear();
    detail::make_room(slot.values, shapes, streams_.device());
    line const& from = incoming_.at(slot.peer);
    behind_computation(*from);
    streams_.receive(from->way, from->on, sent_of(slot.values));
    slot.arrived->record(from->on, slot.about);
  }

  /// The memory of those of a message's tensors that have anything to be sent.
  std::span<at::Tensor const> sent_of(std::vector<at::Tensor> const& values) {
    scratch_.clear();
    for (at::Tensor const& value : values) {
      if (value.defined() && value.numel() > 0) scratch_.push_back(detail::as_row(value));
    }
    return scratch_;
  }

  std::string shapes_key(int from, int to, std::uint32_t tag) const {
    return "shapes" + std::to_string(turn_) + "/" + std::to_string(topology().global_of(from)) + "/" +
           std::to_string(topology().global_of(to)) + "/" + std::to_string(tag);
  }
  [[noreturn]] void refuse(awaited const& mine, detail::message_shapes const& agreed, detail::message_shapes const& actual) {
    detail::refuse_shapes(*failures_, mine, topology().global_rank, agreed, actual);
  }

  void start_all_gather_in(gathering& g, std::span<double const> mine, char const* words) {
    // A gather of nothing is still one that waits for all.
    auto const width = static_cast<std::int64_t>(std::max<std::size_t>(mine.size(), 1));
    if (!g.mine.defined() || g.mine.numel() != width) {
      g.mine = streams_.numbers(width);
      g.all = streams_.numbers(width * topology().world());
    }
    std::copy(mine.begin(), mine.end(), g.mine.template data_ptr<double>());
    if (topology().world() == 1) {
      g.all.copy_(g.mine);
      return;
    }
    awaited const about{.words = words, .step = step()};
    check(about);
    streams_.all_gather(numbers_->way, numbers_->on, g.mine, g.all);
    g.done->record(numbers_->on, about);
  }
  void finish_all_gather_in(gathering& g, std::span<double> all, char const* words, detail::wait_need const& need) {
    if (topology().world() > 1) wait_on_host(*g.done, need);
    if (all.size() > static_cast<std::size_t>(g.all.numel())) {
      throw usage_error(std::string(words) + " has " + std::to_string(g.all.numel()) + " numbers, not " +
                        std::to_string(all.size()));
    }
    std::copy_n(g.all.template data_ptr<double>(), all.size(), all.begin());
  }

  rendezvous rendezvous_;
  std::shared_ptr<failure_watch> failures_;
  Streams streams_;
  stream_watch<Streams> watch_;
  line numbers_, sums_;                                  // null in a world of one; with one replica
  std::map<int, line> outgoing_, incoming_;              // by peer
  std::unordered_map<std::uint32_t, agreement> agreed_;  // by tag
  std::map<int, std::deque<std::uint16_t>> late_;        // by peer: receives that are to be posted, in order
  std::vector<outgoing> sends_;
  std::vector<incoming> receives_;
  std::vector<outgoing> first_sends_;
  std::vector<std::unique_ptr<point>> summed_;  // by bucket
  gathering now_, early_;
  std::vector<at::Tensor> scratch_;
  unsigned turn_ = 0;  // how often `open` was called
  detail::wait_progress done_;
  bool closed_ = false;
};

}  // namespace chevron
