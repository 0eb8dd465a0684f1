#include "recorded_schedule.hpp"

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "rank_list.hpp"
#include "request.hpp"

namespace plan_program {
namespace {

using chevron::action;
using chevron::kind;

/// A rank's messages with a peer in one direction.
struct planned_wire {
  std::vector<action> const* step =
      nullptr;          ///< messages of one step in the schedule, in their order; null: the schedule has none
  std::vector<int> at;  ///< indices into the rank's operations
};

/// Places in the steps of a rank whose dump has lost the operations before.
///
/// A step ends in a collective, between two of which, alike, each wire has one step's messages. Where several kinds of
/// collectives are so spaced, as sums of a stage's gradients before the last messages of a step, the step begins behind the kind
/// with which no message is before the message that it needs: a send of an output follows the receive of its input, a gradient
/// the activation.
class lost_steps {
 public:
  lost_steps(rank_dump const& dump, std::vector<planned_wire> const& wires) : dump_(dump), wires_(wires) {}

  /// By wire: the place in its step of the first message that the dump has; nothing where the dump does not tell.
  std::optional<std::vector<std::size_t>> first_places() const {
    std::set<std::vector<std::size_t>> found;
    std::map<std::tuple<std::string, std::string, std::vector<std::vector<std::int64_t>>>, int> before;
    for (int i = 0; i < static_cast<int>(dump_.operations.size()); ++i) {
      recorded_operation const& one = dump_.operations[static_cast<std::size_t>(i)];
      if (!one.is_collective()) continue;
      auto const [last, is_first] = before.try_emplace({one.name, one.group, one.inputs.sizes}, i);
      if (!is_first && is_step(last->second, i) && is_causal(last->second)) found.insert(places_behind(last->second));
      last->second = i;
    }
    return found.size() == 1 ? std::optional(*found.begin()) : std::nullopt;
  }

 private:
  static int before(planned_wire const& wire, int index) {
    return static_cast<int>(std::lower_bound(wire.at.begin(), wire.at.end(), index) - wire.at.begin());
  }
  bool is_step(int begin, int end) const {
    return std::all_of(wires_.begin(), wires_.end(), [&](planned_wire const& wire) {
      return wire.step == nullptr || before(wire, end) - before(wire, begin) == static_cast<int>(wire.step->size());
    });
  }
  std::vector<std::size_t> places_behind(int begin) const {
    std::vector<std::size_t> out;
    for (planned_wire const& wire : wires_) {
      int const n = wire.step == nullptr ? 1 : static_cast<int>(wire.step->size());
      out.push_back(static_cast<std::size_t>((n - before(wire, begin) % n) % n));
    }
    return out;
  }
  /// Whether the messages have an order that a program can have, if a step begins behind operation `begin`.
  bool is_causal(int begin) const {
    std::map<std::tuple<int, kind, int, int>, int> called;  // by step, kind, stage and microbatch
    for (planned_wire const& wire : wires_) {
      if (wire.step == nullptr) continue;
      int const n = static_cast<int>(wire.step->size()), base = before(wire, begin),
                steps = static_cast<int>(wire.at.size()) / n + 1;
      for (int k = 0; k < static_cast<int>(wire.at.size()); ++k) {
        int const place = k - base + steps * n;
        action const a = (*wire.step)[static_cast<std::size_t>(place % n)];
        called[{place / n - steps, a.kind, static_cast<int>(a.stage), static_cast<int>(a.micro_batch)}] =
            wire.at[static_cast<std::size_t>(k)];
      }
    }
    return std::all_of(called.begin(), called.end(), [&](auto const& one) {
      auto const& [step, what, stage, micro_batch] = one.first;
      auto const follows = [&, step = step, stage = stage, micro_batch = micro_batch](kind earlier) {
        auto const found = called.find({step, earlier, stage, micro_batch});
        return found == called.end() || found->second < one.second;
      };
      if (what == kind::send_forward) return follows(kind::receive_forward);
      if (what == kind::receive_backward) return follows(kind::send_forward);
      return what != kind::send_backward ||
             (follows(kind::receive_backward) && follows(kind::receive_forward) && follows(kind::send_forward));
    });
  }

  rank_dump const& dump_;
  std::vector<planned_wire> const& wires_;
};

/// The first wire with another number of messages in a round of its rank than in a step of the schedule, or in as many steps as
/// the round has on the rank's other wires.
std::optional<std::size_t> unlike_round(std::vector<planned_wire> const& wires, recorded_rounds const& rounds) {
  if (rounds.period == 0) return std::nullopt;
  int steps = 0;
  for (std::size_t w = 0; w < wires.size(); ++w) {
    if (wires[w].step == nullptr) continue;
    int const n = static_cast<int>(wires[w].step->size());
    int const messages = static_cast<int>(std::count_if(wires[w].at.begin(), wires[w].at.end(), [&](int i) {
      return i >= *rounds.expected && i < *rounds.expected + rounds.period;
    }));
    if (steps == 0) steps = messages / n;
    if (steps == 0 || messages != steps * n) return w;
  }
  return std::nullopt;
}

}  // namespace

void write_planned_actions(recorder_dumps& dumps, chevron::program_view const& program,
                           std::vector<recorded_rounds> const& rounds) {
  int const ranks = program.plan.size.ranks;
  std::map<std::tuple<int, int, bool>, std::vector<action>> planned;  // by rank, peer and side (true: sends)
  for (int r = 0; r < ranks; ++r) {
    for (int i = 0; i < program.length(r); ++i) {
      chevron::instruction const& one = program.at(r, i);
      if (is_send(one.op.kind) || is_receive(one.op.kind)) planned[{r, one.peer, is_send(one.op.kind)}].push_back(one.op);
    }
  }
  bool any = false;
  std::set<std::string> remarks;
  std::vector<int> unknown;
  std::string unlike;
  for (auto& dump : dumps.by_rank) {
    if (!dump) continue;
    std::map<std::string, std::map<std::pair<int, bool>, planned_wire>> groups;  // by group; of a group by peer and side
    for (int i = 0; i < static_cast<int>(dump->operations.size()); ++i) {
      recorded_operation const& one = dump->operations[static_cast<std::size_t>(i)];
      if (one.peer >= 0 && static_cast<int>(dumps.groups.at(one.group).ranks.size()) == ranks)
        groups[one.group][{one.peer, one.is_send()}].at.push_back(i);
    }
    for (auto& [key, wires] : groups) {
      any = true;
      std::vector<int> const& members = dumps.groups.at(key).ranks;
      auto const place_of = [&members = members](int rank) {
        return static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
      };
      for (auto const& [wire, step] : planned) {
        if (std::get<0>(wire) == place_of(dump->rank))
          wires[{members[static_cast<std::size_t>(std::get<1>(wire))], std::get<2>(wire)}].step = &step;
      }
      std::vector<planned_wire> all;
      std::vector<std::string> names;
      for (auto const& [wire, messages] : wires) {
        all.push_back(messages);
        names.push_back((wire.second ? "to rank " : "from rank ") + std::to_string(wire.first));
        if (messages.step != nullptr) continue;
        remarks.insert("rank " + std::to_string(dump->rank) + (wire.second ? " sends to rank " : " receives from rank ") +
                       std::to_string(wire.first) + ", and the schedule has no such message");
      }
      if (auto const w = unlike_round(all, rounds[static_cast<std::size_t>(dump->rank)])) {
        if (unlike.empty()) {
          unlike = "a round of rank " + std::to_string(dump->rank) + " has another number of messages " + names[*w] +
                   " than a step of the schedule, " + std::to_string(all[*w].step->size()) +
                   ": give --ranks, --chunks and --microbatches of the job";
        }
        continue;
      }
      std::optional<std::vector<std::size_t>> first;
      if (!dump->is_whole() && !(first = lost_steps(*dump, all).first_places())) {
        unknown.push_back(dump->rank);
        continue;
      }
      for (std::size_t w = 0; w < all.size(); ++w) {
        if (all[w].step == nullptr || all[w].at.empty()) continue;
        auto const message = [&, w](std::size_t k) -> recorded_operation& {
          return dump->operations[static_cast<std::size_t>(all[w].at[k])];
        };
        std::size_t begin = 0;
        if (!first) {
          while (message(begin).inputs.elements() != message(all[w].at.size() - 1).inputs.elements()) ++begin;
        }
        for (std::size_t k = begin; k < all[w].at.size(); ++k) {
          action const a = (*all[w].step)[(k - begin + (first ? (*first)[w] : 0)) % all[w].step->size()];
          message(k).planned = to_text(a, program.plan.size.slices).str();
        }
      }
    }
  }
  if (!any) {
    throw usage("no process group of " + std::to_string(ranks) +
                " ranks has messages. Remedy: give --ranks as many pipeline ranks as the job has");
  }
  dumps.remarks.insert(dumps.remarks.end(), remarks.begin(), remarks.end());
  if (!unlike.empty()) dumps.remarks.push_back(unlike);
  if (!unknown.empty()) {
    std::sort(unknown.begin(), unknown.end());
    unknown.erase(std::unique(unknown.begin(), unknown.end()), unknown.end());
    dumps.remarks.push_back(
        "the actions of " + rank_list(unknown) +
        " in the schedule are unknown: dumps that lack operations have no whole step between two collectives");
  }
}

}  // namespace plan_program
