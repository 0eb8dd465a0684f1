#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <chevron/lower/program.hpp>
#include <chevron/plan/channels.hpp>

/// \file
/// The meaning of channels, written a second time, to check `check_channel_order`: a machine in which ranks and transfers take
/// turns at random. Shares no code and no approach with lower/.

namespace chevron::tests {

/// A machine that runs the messages of a program over channels. Each rank has a line of batches for each of its channels; a
/// batch of one message, except in `batched`. Messages of first batches are exchanged; a batch leaves its line once all of its
/// messages have been exchanged.
class channel_machine {
 public:
  channel_machine(program_view const& program, channel_rules rules) : program_(program), rules_(rules) {}

  /// Sends of these boundaries between stages end without their receives.
  std::set<int> buffered;

  /// Whether every rank reaches its end and no message is left.
  bool runs_through(std::mt19937& random) {
    int const ranks = program_.plan.size.ranks;
    at_.assign(static_cast<std::size_t>(ranks), 0);
    lines_.assign(static_cast<std::size_t>(ranks), {});
    ended_.clear();
    enqueued_for_.clear();
    for (bool moved = true; moved;) {
      moved = false;
      std::vector<int> order;
      for (int r = 0; r < 2 * ranks; ++r) order.push_back(r);
      std::shuffle(order.begin(), order.end(), random);
      for (int turn : order) moved = (turn < ranks ? step(turn) : exchange(turn - ranks)) || moved;
    }
    for (int r = 0; r < ranks; ++r) {
      if (at_[static_cast<std::size_t>(r)] != program_.length(r)) return false;
      for (auto const& [channel, line] : lines_[static_cast<std::size_t>(r)]) {
        if (!line.empty()) return false;
      }
    }
    return true;
  }

 private:
  /// One end of a message. The boundary is the lower of both stages.
  struct end {
    bool sends;
    bool gradient;
    int boundary;
    int micro_batch;
    auto operator<=>(end const&) const = default;
    end other() const { return {!sends, gradient, boundary, micro_batch}; }
  };
  using batch = std::vector<end>;

  static bool is_end(action a) {
    return a.kind == kind::send_forward || a.kind == kind::send_backward || a.kind == kind::receive_forward ||
           a.kind == kind::receive_backward;
  }
  static bool parts_batches(action a) {
    return !is_end(a) && a.kind != kind::reduce_gradients && a.kind != kind::unshard && a.kind != kind::optimizer_step;
  }
  static end end_of(action a) {
    int const stage = static_cast<int>(a.stage), m = static_cast<int>(a.micro_batch);
    if (a.kind == kind::send_forward) return {true, false, stage, m};
    if (a.kind == kind::receive_forward) return {false, false, stage - 1, m};
    if (a.kind == kind::send_backward) return {true, true, stage - 1, m};
    return {false, true, stage, m};
  }

  /// What a rank's line is for: a pair of ranks in a direction, a pair, or everything.
  std::tuple<int, int> channel_of(int rank, end const& e, int peer) const {
    if (rules_.model == channel_model::edge) return e.sends ? std::tuple{rank, peer} : std::tuple{peer, rank};
    if (rules_.model == channel_model::pair) return {std::min(rank, peer), std::max(rank, peer)};
    return {0, 0};
  }

  bool has_ended(end const& e) const { return ended_.count(e) > 0; }

  /// Runs one instruction of a rank, with the rest of its batch.
  bool step(int rank) {
    int& at = at_[static_cast<std::size_t>(rank)];
    if (at == program_.length(rank)) return false;
    action const a = program_.at(rank, at).op;
    int const stage = static_cast<int>(a.stage), m = static_cast<int>(a.micro_batch);
    if (is_end(a)) {
      auto& lines = lines_[static_cast<std::size_t>(rank)];
      batch together;
      int past = at;
      for (; past < program_.length(rank) && !parts_batches(program_.at(rank, past).op); ++past) {
        if (!is_end(program_.at(rank, past).op)) continue;
        if (rules_.model != channel_model::batched && !together.empty()) break;
        together.push_back(end_of(program_.at(rank, past).op));
      }
      auto const channel = channel_of(rank, together.front(), program_.at(rank, at).peer);
      if (enqueued_for_.count({rank, at}) == 0) {
        lines[channel].push_back(together);
        enqueued_for_.insert({rank, at});
        if (rules_.hosts_wait) return true;
      }
      if (rules_.hosts_wait && !std::all_of(together.begin(), together.end(), [&](end const& e) { return has_ended(e); }))
        return false;
      at = past;
      return true;
    }
    if (a.kind == kind::wait_send_forward && !has_ended({true, false, stage, m})) return false;
    if (a.kind == kind::wait_send_backward && !has_ended({true, true, stage - 1, m})) return false;
    auto const elsewhere = [&](int other) {
      return other >= 0 && other < program_.plan.stages && program_.plan.rank_of_stage(other) != rank;
    };
    if (a.kind == kind::forward && elsewhere(stage - 1) && !has_ended({false, false, stage - 1, m})) return false;
    if ((a.kind == kind::backward || a.kind == kind::backward_input) && elsewhere(stage + 1) &&
        !has_ended({false, true, stage, m}))
      return false;
    ++at;
    return true;
  }

  /// Exchanges what a rank's first batches send, and removes first batches that are done.
  bool exchange(int rank) {
    bool moved = false;
    for (auto& [channel, line] : lines_[static_cast<std::size_t>(rank)]) {
      if (line.empty()) continue;
      for (end const& e : line.front()) {
        if (has_ended(e)) continue;
        if (e.sends && buffered.count(e.boundary) > 0) moved = ended_.insert(e).second;
        if (!e.sends && has_ended(e.other())) moved = ended_.insert(e).second;
        if (!e.sends || has_ended(e) || !is_first(e.other())) continue;
        ended_.insert(e);
        ended_.insert(e.other());
        moved = true;
      }
      if (!std::all_of(line.front().begin(), line.front().end(), [&](end const& e) { return has_ended(e); })) continue;
      line.pop_front();
      moved = true;
    }
    return moved;
  }
  bool is_first(end const& wanted) const {
    for (auto const& lines : lines_) {
      for (auto const& [channel, line] : lines) {
        if (!line.empty() && std::find(line.front().begin(), line.front().end(), wanted) != line.front().end()) return true;
      }
    }
    return false;
  }

  program_view program_;
  channel_rules rules_;
  std::vector<int> at_;
  std::vector<std::map<std::tuple<int, int>, std::deque<batch>>> lines_;
  std::set<std::pair<int, int>> enqueued_for_;
  std::set<end> ended_;
};

}  // namespace chevron::tests
