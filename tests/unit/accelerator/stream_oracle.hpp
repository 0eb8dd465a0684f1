#pragma once

#include <cstddef>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <chevron/lower/program.hpp>
#include "accelerator/stream_order.hpp"

/// \file
/// The meaning of stream operations, written a second time and as plainly as possible, to check check_streams.hpp without its
/// code. A machine does the operations of all streams one by one, in a random order that streams allow; memory holds values,
/// and a reader checks them when it begins and when it ends.

namespace chevron::tests {

using stream_lists = std::vector<std::vector<stream_operation>>;

inline stream_lists stream_lists_of(program_view const& program) {
  stream_lists out;
  for (int r = 0; r < program.plan.size.ranks; ++r) {
    buffer<stream_operation> const list = stream_order(program, r);
    out.emplace_back(list.begin(), list.end());
  }
  return out;
}

class stream_machine {
 public:
  stream_machine(plan_view const& plan, stream_lists const& lists)
      : plan_(plan), ranks_(lists.size()), slots_(static_cast<std::size_t>(2 * plan.stages * plan.size.units()), -1) {
    for (std::size_t r = 0; r < lists.size() && host_fault_.empty(); ++r) issue(static_cast<int>(r), lists[r]);
  }

  /// The fault of the lists; empty: none was found. Delays each work in turn for as long as another can run, once before its
  /// begin and once before its end; all others run in random order. Every fault between two works shows when one of them is
  /// late.
  std::string fault(std::mt19937& random) {
    if (!host_fault_.empty()) return host_fault_;
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if (all_[i].what.does != stream_task::work) continue;
      for (bool const begun : {false, true}) {
        if (std::string const why = run(random, static_cast<int>(i), begun); !why.empty()) return why;
      }
    }
    return {};
  }
  /// Whether it comes to its end, whatever the memory says. That does not depend on the order.
  bool hangs(std::mt19937& random) {
    blind_ = true;
    bool const out = run(random, -1, false) == "hangs";
    blind_ = false;
    return out;
  }

 private:
  struct operation {
    stream_operation what{};
    int rank = 0;
    int position = 0;
    int record = -1;                   // of a wait
    int turn = 0;                      // of an addition to gradients: how many came before, in the order of the host
    int channel = -1;                  // of a message
    int memory = -1;                   // of a receive: its slot
    bool first = false, last = false;  // the step before, and the step's own end: on the compute stream
    std::vector<int> lost{};           // results whose memory this one may have been given
  };
  enum class state : char { queued, begun, ended };

  bool local(int stage, int rank) const { return plan_.rank_of[stage] == rank; }
  int result(bool gradient, int stage, int m) const { return ((gradient ? plan_.stages : 0) + stage) * plan_.size.units() + m; }
  /// The slice of its microbatch, on its stage, whose carry an F takes, or whose carry's gradient a B or I.
  static bool takes_from_before(action a) { return a.kind == kind::forward; }
  bool carries(action a) const {
    int const slice = static_cast<int>(a.micro_batch) % plan_.size.slices;
    bool const computes_gradient = a.kind == kind::backward || a.kind == kind::backward_input;
    return takes_from_before(a) ? slice > 0 : computes_gradient && slice + 1 < plan_.size.slices;
  }
  int carried_by(action a) const { return static_cast<int>(a.micro_batch) + (takes_from_before(a) ? -1 : 1); }
  int sent_by(action a) const {
    return result(a.kind == kind::send_backward, static_cast<int>(a.stage), static_cast<int>(a.micro_batch));
  }
  int received_by(action a) const {
    bool const gradient = a.kind == kind::receive_backward;
    return result(gradient, static_cast<int>(a.stage) + (gradient ? 1 : -1), static_cast<int>(a.micro_batch));
  }
  static bool computes(kind k) {
    return k == kind::forward || k == kind::backward || k == kind::backward_input || k == kind::backward_weight;
  }
  static bool adds(kind k) { return k == kind::backward || k == kind::backward_weight; }
  static bool sends(kind k) { return k == kind::send_forward || k == kind::send_backward; }
  static bool receives(kind k) { return k == kind::receive_forward || k == kind::receive_backward; }

  /// The host's part: passes handles of memory on in its own order, and only handles that it has.
  void issue(int rank, std::vector<stream_operation> const& list) {
    std::map<std::pair<event_kind, int>, int> recorded;
    std::map<int, int> in_send, in_receive;  // results by slot
    std::map<std::pair<kind, int>, int> issued;
    std::vector<int> lost;
    std::map<int, int> additions, uses_left;  // by stage; by result received
    std::vector<int> sums(static_cast<std::size_t>(plan_.stages));
    auto const stream_of = [&](stream_name s) -> std::vector<int>& {
      return streams_[{rank, {static_cast<int>(s.kind), static_cast<int>(s.peer)}}];
    };
    auto const queue = [&](operation one) {
      stream_of(one.what.on).push_back(static_cast<int>(all_.size()));
      all_.push_back(std::move(one));
    };
    auto const wrong = [&](char const* why) {
      if (host_fault_.empty()) host_fault_ = "rank " + std::to_string(rank) + "'s host: " + why;
    };
    first_.push_back(static_cast<int>(all_.size()));
    queue({.what = recording({event_kind::computed}, {stream_kind::compute}), .rank = rank, .first = true});
    all_.back().what.does = stream_task::work;
    for (std::size_t at = 0; at < list.size(); ++at) {
      operation one{.what = list[at], .rank = rank, .position = static_cast<int>(at)};
      stream_operation const& o = one.what;
      action const a = o.op;
      int const stage = static_cast<int>(a.stage), m = static_cast<int>(a.micro_batch);
      if (o.does == stream_task::let_go) {
        if (in_send.count(o.slot) == 0) return wrong("lets go of nothing");
        lost.push_back(in_send[o.slot]);
        in_send.erase(o.slot);
        continue;
      }
      auto const event = std::pair(o.event.kind, static_cast<int>(o.event.number));
      if (o.does == stream_task::record) recorded[event] = static_cast<int>(all_.size());
      if (o.does == stream_task::wait) {
        if (recorded.count(event) == 0) return wrong("waits for an event that was not recorded");
        one.record = recorded[event];
      }
      if (o.does == stream_task::work) {
        auto const has = [&](kind k, int s, int unit = -1) {
          return issued.count({k, result(false, s, unit < 0 ? m : unit)}) > 0;
        };
        auto const has_gradient = [&](int s, int unit = -1) {
          return has(kind::backward, s, unit) || has(kind::backward_input, s, unit);
        };
        if (sends(a.kind) || receives(a.kind)) {
          auto const ends = sends(a.kind) ? std::pair(rank, static_cast<int>(o.peer)) : std::pair(static_cast<int>(o.peer), rank);
          one.channel = static_cast<int>(channels_.try_emplace(ends, channels_.size()).first->second);
        }
        if (computes(a.kind)) {
          bool const weights = a.kind == kind::backward_weight, forward = a.kind == kind::forward;
          if (has(a.kind, stage)) return wrong("computes twice");
          if (!forward && !weights && has_gradient(stage)) return wrong("computes a gradient twice");
          if (weights && (!has(kind::backward_input, stage) || has(kind::backward, stage))) return wrong("W without I");
          if (!forward && !weights && !has(kind::forward, stage)) return wrong("no graph to go back");
          if (carries(a) && !(forward ? has(kind::forward, stage, carried_by(a)) : has_gradient(stage, carried_by(a))))
            return wrong("its carry is not there");
          int const from = weights ? -1 : forward ? stage - 1 : stage + 1;
          if (from >= 0 && from < plan_.stages) {
            if (local(from, rank) ? !(forward ? has(kind::forward, from) : has_gradient(from))
                                  : in_receive.count(o.slot) == 0 || in_receive[o.slot] != result(!forward, from, m))
              return wrong("its input is not there");
          }
          if (plan_.forward_only ? forward : adds(a.kind)) {
            for (int const done :
                 {stage > 0 ? result(false, stage - 1, m) : -1, stage + 1 < plan_.stages ? result(true, stage + 1, m) : -1})
              uses_left[done] = 0;
          }
          if (adds(a.kind)) {
            if (sums[a.stage] != 0) return wrong("adds to a sum");
            one.turn = additions[stage]++;
          }
          issued[{a.kind, result(false, stage, m)}] = 1;
          one.lost = lost;
        } else if (sends(a.kind)) {
          if (a.kind == kind::send_forward ? !has(kind::forward, stage) : !has_gradient(stage)) return wrong("nothing to send");
          if (in_send.count(o.slot) > 0) return wrong("a send in its slot");
          in_send[o.slot] = sent_by(a);
        } else if (receives(a.kind)) {
          if (in_receive.count(o.slot) > 0 && uses_left[in_receive[o.slot]] != 0) return wrong("receives over what is needed");
          in_receive[o.slot] = received_by(a);
          uses_left[received_by(a)] = 1;
          one.memory = static_cast<int>(memories_.try_emplace({rank, o.slot}, memories_.size()).first->second);
          slots_[static_cast<std::size_t>(received_by(a))] = one.memory;
        } else if (a.kind == kind::reduce_gradients) {
          if (sums[a.stage]++ != 0 || additions[stage] != plan_.size.units()) return wrong("sums too early, or twice");
        } else {
          for (int s = 0; s < plan_.stages; ++s) {
            if (local(s, rank) && sums[static_cast<std::size_t>(s)] == 0) return wrong("steps without a sum");
          }
          one.lost = lost;
        }
      }
      queue(std::move(one));
    }
    if (!in_send.empty()) wrong("keeps what was sent for ever");
    queue({.what = recording({event_kind::computed}, {stream_kind::compute}), .rank = rank, .last = true});
    all_.back().what.does = stream_task::work;
  }

  std::string run(std::mt19937& random, int late, bool begun) {
    state_.assign(all_.size(), state::queued);
    made_.assign(static_cast<std::size_t>(2 * plan_.stages * plan_.size.units()), 0);
    graph_ = carried_ = made_;
    additions_.assign(static_cast<std::size_t>(plan_.stages), 0);
    summing_ = summed_ = additions_;
    content_.assign(memories_.size(), -1);
    turn_.assign(all_.size(), 0);
    sends_.assign(channels_.size(), {});
    receives_ = sends_;
    working_.assign(ranks_, 0);
    for (operation const& o : all_) working_[static_cast<std::size_t>(o.rank)] += o.what.does == stream_task::work && !o.last;
    std::vector<std::pair<std::vector<int> const*, std::size_t>> heads;
    for (auto const& [name, of] : streams_) heads.emplace_back(&of, 0);
    std::vector<std::size_t> can;
    for (std::size_t left = all_.size(); left > 0;) {
      can.clear();
      bool late_can = false;
      std::size_t late_head = 0;
      for (std::size_t h = 0; h < heads.size(); ++h) {
        auto const& [of, at] = heads[h];
        if (at == of->size() || !can_move((*of)[at])) continue;
        int const i = (*of)[at];
        if (i == late && (state_[static_cast<std::size_t>(i)] == state::begun) == begun) {
          late_can = true;
          late_head = h;
        } else {
          can.push_back(h);
        }
      }
      if (can.empty() && !late_can) return "hangs";
      auto& [of, at] = heads[can.empty() ? late_head : can[random() % can.size()]];
      int const i = (*of)[at];
      if (std::string const why = move(i); !why.empty() && !blind_) {
        operation const& o = all_[static_cast<std::size_t>(i)];
        return "rank " + std::to_string(o.rank) + ", operation " + std::to_string(o.position) + ", " + to_text(o.what).str() +
               ": " + why;
      }
      if (state_[static_cast<std::size_t>(i)] == state::ended) ++at, --left;
    }
    return {};
  }

  bool can_move(int i) const {
    operation const& o = all_[static_cast<std::size_t>(i)];
    if (o.record >= 0) return state_[static_cast<std::size_t>(o.record)] == state::ended;
    if (o.what.does != stream_task::work || state_[static_cast<std::size_t>(i)] == state::queued) return true;
    if (o.channel < 0) return true;
    // A rendezvous: as many must have begun at the other end.
    auto const& there = sends(o.what.op.kind) ? receives_ : sends_;
    return there[static_cast<std::size_t>(o.channel)].size() > turn_[static_cast<std::size_t>(i)];
  }

  /// Begins or ends an operation.
  std::string move(int i) {
    operation const& o = all_[static_cast<std::size_t>(i)];
    state& now = state_[static_cast<std::size_t>(i)];
    bool const begins = now == state::queued;
    if (o.what.does != stream_task::work) {
      now = state::ended;
      return {};
    }
    now = begins ? state::begun : state::ended;
    int& working = working_[static_cast<std::size_t>(o.rank)];
    if (o.first) {
      if (!begins) --working;
      return {};
    }
    if (o.last) return working > 0 ? "something outlasts the step" : "";
    if (state_[static_cast<std::size_t>(first_[static_cast<std::size_t>(o.rank)])] != state::ended)
      return "begins before the step";
    if (!begins) --working;
    for (int const lost : begins ? o.lost : std::vector<int>{}) made_[static_cast<std::size_t>(lost)] = 0;
    action const a = o.what.op;
    if (computes(a.kind)) return compute(o, begins);
    auto const meets = [&](auto& of) {
      turn_[static_cast<std::size_t>(i)] = of[static_cast<std::size_t>(o.channel)].size();
      of[static_cast<std::size_t>(o.channel)].push_back(i);
    };
    if (sends(a.kind)) {
      if (begins) meets(sends_);
      return made_[static_cast<std::size_t>(sent_by(a))] != 0 ? "" : "what it sends is not there";
    }
    if (receives(a.kind)) {
      int& into = content_[static_cast<std::size_t>(o.memory)];
      if (begins) {
        into = -1;
        meets(receives_);
        return {};
      }
      int const from = sends_[static_cast<std::size_t>(o.channel)][turn_[static_cast<std::size_t>(i)]];
      into = sent_by(all_[static_cast<std::size_t>(from)].what.op);
      return into == received_by(a) ? "" : "another message arrives";
    }
    if (a.kind == kind::reduce_gradients) {
      (begins ? summing_ : summed_)[a.stage] = 1;
      return additions_[a.stage] == plan_.size.units() ? "" : "sums what is not complete";
    }
    for (int s = 0; s < plan_.stages; ++s) {
      if (local(s, o.rank) && summed_[static_cast<std::size_t>(s)] == 0) return "steps before the sums are there";
    }
    return {};
  }

  std::string compute(operation const& o, bool begins) {
    action const a = o.what.op;
    int const stage = static_cast<int>(a.stage), m = static_cast<int>(a.micro_batch);
    auto const there = [&](bool gradient, int from) {
      int const wanted = result(gradient, from, m);
      if (local(from, o.rank)) return made_[static_cast<std::size_t>(wanted)] != 0;
      int const memory = slots_[static_cast<std::size_t>(wanted)];
      return memory >= 0 && content_[static_cast<std::size_t>(memory)] == wanted;
    };
    bool const forward = a.kind == kind::forward, weights = a.kind == kind::backward_weight;
    // A W reads results of neighbouring stages on this rank from its graph.
    if (stage > 0 && (forward || !local(stage - 1, o.rank)) && !there(false, stage - 1)) return "its input is not there";
    if (!forward && stage + 1 < plan_.stages && (!weights || !local(stage + 1, o.rank)) && !there(true, stage + 1))
      return "its gradient is not there";
    if (carries(a) && carried_[static_cast<std::size_t>(result(!forward, stage, carried_by(a)))] == 0)
      return "its carry is not there";
    int& graph = graph_[static_cast<std::size_t>(result(false, stage, m))];
    if (graph != (forward ? 0 : weights ? 2 : 1)) return "its graph is not there";
    if (adds(a.kind)) {
      if (summing_[a.stage] != 0) return "adds to what is being summed";
      if (additions_[a.stage] != o.turn) return "adds out of turn";
    }
    if (begins) return {};
    if (!weights) carried_[static_cast<std::size_t>(result(!forward, stage, m))] = 1;
    if (forward) graph = 1, made_[static_cast<std::size_t>(result(false, stage, m))] = 1;
    if (!forward && !weights) graph = 2, made_[static_cast<std::size_t>(result(true, stage, m))] = 1;
    if (adds(a.kind)) ++additions_[a.stage];
    return {};
  }

  plan_view plan_;
  std::size_t ranks_;
  std::string host_fault_;
  std::vector<operation> all_;
  std::map<std::pair<int, std::pair<int, int>>, std::vector<int>> streams_;  // by rank and name
  std::vector<int> first_;                                                   // by rank
  std::map<std::pair<int, int>, std::size_t> channels_, memories_;           // by ranks; by rank and receive slot
  std::vector<int> slots_;                                                   // by result: the memory it is received into
  bool blind_ = false;
  // Of a run.
  std::vector<state> state_;
  std::vector<std::size_t> turn_;  // of a message that has begun: how many of its channel began before it
  std::vector<int> made_, carried_, graph_, additions_, summing_, summed_, working_, content_;
  std::vector<std::vector<int>> sends_, receives_;  // by channel, as they began
};

}  // namespace chevron::tests
