#include "recorded_schedule.hpp"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "request.hpp"

namespace plan_program {

void write_planned_actions(recorder_dumps& dumps, chevron::program_view const& program) {
  int const ranks = program.plan.size.ranks;
  // By rank, peer and side (true: sends), in the order of the rank's program.
  std::map<std::tuple<int, int, bool>, std::vector<std::string>> planned;
  for (int r = 0; r < ranks; ++r) {
    for (int i = 0; i < program.length(r); ++i) {
      chevron::instruction const& one = program.at(r, i);
      if (is_send(one.op.kind) || is_receive(one.op.kind))
        planned[{r, one.peer, is_send(one.op.kind)}].push_back(to_text(one.op, program.plan.size.slices).str());
    }
  }
  bool any = false;
  std::set<std::string> remarks;
  for (auto& dump : dumps.by_rank) {
    if (!dump) continue;
    std::map<std::tuple<std::string, int, bool>, std::vector<recorded_operation*>> wires;  // by group, peer and side
    for (recorded_operation& one : dump->operations) {
      if (one.peer >= 0) wires[{one.group, one.peer, one.is_send()}].push_back(&one);
    }
    for (auto& [wire, messages] : wires) {
      auto const& [key, peer, sends] = wire;
      std::vector<int> const& members = dumps.groups.at(key).ranks;
      if (static_cast<int>(members.size()) != ranks) continue;
      auto const place_of = [&members = members](int rank) {
        return static_cast<int>(std::find(members.begin(), members.end(), rank) - members.begin());
      };
      any = true;
      if (!dump->is_whole()) {
        remarks.insert("the actions of rank " + std::to_string(dump->rank) +
                       " in the schedule are unknown, since its dump lacks operations");
        continue;
      }
      auto const actions = planned.find({place_of(dump->rank), place_of(peer), sends});
      if (actions == planned.end()) {
        remarks.insert("rank " + std::to_string(dump->rank) + (sends ? " sends to rank " : " receives from rank ") +
                       std::to_string(peer) + ", and the schedule has no such message");
        continue;
      }
      std::int64_t const usual = messages.back()->inputs.elements();
      auto first = messages.begin();
      while ((*first)->inputs.elements() != usual) ++first;
      std::size_t const begin = static_cast<std::size_t>(first - messages.begin());
      for (std::size_t k = begin; k < messages.size(); ++k)
        messages[k]->planned = actions->second[(k - begin) % actions->second.size()];
    }
  }
  if (!any) {
    throw usage("no process group of " + std::to_string(ranks) +
                " ranks has messages. Remedy: give --ranks as many pipeline ranks as the job has");
  }
  dumps.remarks.insert(dumps.remarks.end(), remarks.begin(), remarks.end());
}

}  // namespace plan_program
