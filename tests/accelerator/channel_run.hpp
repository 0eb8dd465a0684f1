#pragma once

// Programs of messages on the simulated device: each rank has a device, its computations are additions, and its messages run over
// the device's shared channels, late. The host of each rank enqueues its list, and asks for events; one thread is the host of
// all.

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <chevron/lower/program.hpp>
#include <chevron/plan/channels.hpp>
#include <chevron/plan/step_graph.hpp>

#include "accelerator/accelerator_streams.hpp"

namespace accelerator {

/// How a program ended on the device.
struct channel_outcome {
  bool runs = false;                 ///< all hosts came to the end of their lists, and all streams to that of their work
  std::vector<message_wait> cycle;   ///< otherwise: the messages that wait for each other
  std::vector<std::string> numbers;  ///< results that are not what a plain loop computes; of programs that run
  std::vector<fault> faults;         ///< accesses of memory without an order
  int left = 0;                      ///< blocks of memory
};

/// The host of a rank, and its device.
class channel_host {
 public:
  channel_host(chevron::program_view const& program, chevron::channel_rules rules, std::set<int> const& buffered, int rank)
      : program_(program), rules_(rules), graph_(program.plan), buffered_(buffered), rank_(rank), streams_(device(rank)) {}

  /// Goes on up to an event that has not passed. \returns whether it has enqueued anything
  bool go_on() {
    int const from = at_;
    while (at_ < program_.length(rank_) && (waited_ == nullptr || streams_.passed(*waited_))) {
      waited_ = nullptr;
      chevron::action const a = program_.at(rank_, at_).op;
      if (is_message(a)) {
        enqueue_messages();
        continue;
      }
      if (chevron::is_wait(a.kind)) streams_.wait(ends_.at({true, graph_.makes(a)}), goes_on);
      if (chevron::is_compute(a.kind)) compute(a);
      ++at_;
    }
    return at_ != from;
  }
  /// Whether the list and all that it enqueued have come to their ends.
  bool is_over() {
    bool over = at_ == program_.length(rank_) && (waited_ == nullptr || streams_.passed(*waited_));
    event done = streams_.make_event();
    streams_.record(done);
    over = streams_.passed(done) && over;
    for (auto& [key, channel] : channels_) {
      streams_.record(done, channel.on);
      over = streams_.passed(done) && over;
    }
    return over;
  }
  /// The messages that wait for each other where this rank's cannot run.
  std::vector<message_wait> cycle() {
    for (auto& [key, channel] : channels_) {
      auto found = late_streams::instance().cycle_of_messages(channel.on.number);
      if (!found.empty()) return found;
    }
    return {};
  }
  /// The results of the rank's F, B and I, by number of the result.
  std::map<int, double> results() const {
    std::map<int, double> out;
    for (auto const& [result, value] : values_) out[result] = value.cpu().template item<double>();
    return out;
  }

  /// What an F, B or I makes of what it takes: of another stage or microbatch it would be another number.
  static double made_of(chevron::action a, double taken) {
    return taken + (a.kind == chevron::kind::forward ? 1 : 1000) * (1 + static_cast<double>(a.stage));
  }
  static double first_of(chevron::action a) { return 1e6 * (1 + static_cast<double>(a.micro_batch)); }

 private:
  using event = accelerator_streams::event;
  using shared_channel = accelerator_streams::shared_channel;
  static bool goes_on() { return false; }
  static bool is_message(chevron::action a) { return chevron::is_send(a.kind) || chevron::is_receive(a.kind); }
  static bool parts_batches(chevron::action a) { return chevron::is_compute(a.kind) || chevron::is_wait(a.kind); }

  shared_channel& channel_of(chevron::instruction const& one) {
    bool const sends = chevron::is_send(one.op.kind);
    int const low = std::min<int>(rank_, one.peer), high = std::max<int>(rank_, one.peer);
    auto const key = rules_.model == chevron::channel_model::edge ? std::tuple(sends ? rank_ : one.peer, sends ? one.peer : rank_)
                     : rules_.model == chevron::channel_model::pair ? std::tuple(low, high)
                                                                    : std::tuple(0, 0);
    auto const found = channels_.find(key);
    if (found != channels_.end()) return found->second;
    std::string const name = "channel " + std::to_string(std::get<0>(key)) + ", " + std::to_string(std::get<1>(key));
    return channels_.emplace(key, streams_.share(name, rank_)).first->second;
  }

  /// A message, or a batch, behind all that the rank was asked to compute before.
  void enqueue_messages() {
    chevron::instruction const& first = program_.at(rank_, at_);
    shared_channel& channel = channel_of(first);
    bool const batched = rules_.model == chevron::channel_model::batched;
    event computed = streams_.make_event();
    std::vector<std::pair<bool, int>> enqueued;
    if (batched) streams_.begin_batch(channel);
    for (; at_ < program_.length(rank_) && !parts_batches(program_.at(rank_, at_).op); ++at_) {
      chevron::instruction const& one = program_.at(rank_, at_);
      if (!is_message(one.op)) continue;
      if (!batched && !enqueued.empty()) break;
      bool const sends = chevron::is_send(one.op.kind);
      int const result = sends ? graph_.makes(one.op) : graph_.needs(one.op);
      std::string const what = to_text(one.op).str();
      if (!sends) values_.emplace(result, at::empty({1}, of_device()));
      streams_.record(computed);
      streams_.wait(channel.on, computed);
      at::Tensor const value[] = {values_.at(result)};
      int const boundary = static_cast<int>(one.op.stage) - (one.op.kind == chevron::kind::send_forward ? 0 : 1);
      if (sends)
        streams_.send(channel, one.peer, value, what, buffered_.contains(boundary));
      else
        streams_.receive(channel, one.peer, value, what);
      enqueued.emplace_back(sends, result);
    }
    if (batched) streams_.end_batch(channel);
    for (auto const& key : enqueued) {
      event& ended = ends_[key];
      streams_.record(ended, channel.on);
      if (rules_.hosts_wait) waited_ = &ended;
    }
  }

  /// An F, B or I: an addition to what it takes, which has arrived, or which this rank has computed.
  void compute(chevron::action a) {
    if (graph_.makes(a) < 0) return;
    int const taken = graph_.needs(a);
    at::Tensor value;
    if (taken < 0) {
      value = at::full({1}, first_of(a), of_device());
    } else {
      if (graph_.comes_over(a) >= 0) streams_.wait(ends_.at({false, taken}), goes_on);
      value = values_.at(taken);
    }
    values_[graph_.makes(a)] = value.add(made_of(a, 0));
  }
  at::TensorOptions of_device() const { return at::TensorOptions().dtype(at::kDouble).device(device(rank_)); }

  chevron::program_view program_;
  chevron::channel_rules rules_;
  chevron::step_graph graph_;
  std::set<int> const& buffered_;
  int rank_;
  int at_ = 0;
  accelerator_streams streams_;
  std::map<std::tuple<int, int>, shared_channel> channels_;
  std::map<int, at::Tensor> values_;            // by result; of a message its memory
  std::map<std::pair<bool, int>, event> ends_;  // of messages: whether it is a send, its result
  event const* waited_ = nullptr;               // the host goes on once it has passed; of `ends_`
};

/// What a plain loop over the stages computes.
inline double wanted_result(chevron::plan_view const& plan, int result) {
  chevron::step_graph const graph(plan);
  auto const makes = [&](int of) {
    int const cell = of % graph.cells(), units = plan.size.units();
    return chevron::make_action(of < graph.cells() ? chevron::kind::forward : chevron::kind::backward, cell / units,
                                cell % units);
  };
  chevron::action a = makes(result);
  double added = channel_host::made_of(a, 0);
  for (; graph.needs(a) >= 0; added = channel_host::made_of(a, added)) a = makes(graph.needs(a));
  return added + channel_host::first_of(a);
}

/// Runs a program whose messages match one to one.
/// \param buffered sends over these boundaries between stages end without their receives
inline channel_outcome run_over_channels(chevron::program_view const& program, chevron::channel_rules rules,
                                         std::set<int> const& buffered = {}) {
  channel_outcome out;
  start_over(true);
  {
    std::list<channel_host> hosts;
    for (int r = 0; r < program.plan.size.ranks; ++r) hosts.emplace_back(program, rules, buffered, r);
    // One query may let others succeed: until nothing runs any more.
    for (bool moved = true; moved && !out.runs;) {
      std::uint64_t const before = late_streams::instance().ran();
      moved = false;
      out.runs = true;
      for (channel_host& host : hosts) moved = host.go_on() || moved;
      for (channel_host& host : hosts) out.runs = host.is_over() && out.runs;
      moved = moved || late_streams::instance().ran() != before;
    }
    for (channel_host& host : hosts) {
      if (!out.runs && out.cycle.empty()) out.cycle = host.cycle();
    }
    std::map<int, double> results;
    for (channel_host& host : hosts) {
      if (out.runs) results.merge(host.results());
    }
    for (auto const& [result, value] : results) {
      double const wanted = wanted_result(program.plan, result);
      if (value != wanted) out.numbers.push_back(std::to_string(value) + " is not " + std::to_string(wanted));
    }
    out.faults = detector::instance().faults();
    late_streams::instance().turn(true);  // nothing under way may hold memory
  }
  out.left = start_over();
  return out;
}

}  // namespace accelerator
