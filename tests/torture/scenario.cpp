#include "scenario.hpp"

#include <sstream>
#include <stdexcept>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/plan/forward_part.hpp>
#include <chevron/plan/text.hpp>
#include <chevron/prove/proved_plan.hpp>

namespace torture {

namespace {

std::vector<std::string> const process_kinds{"kill", "exit", "throw", "bad_alloc", "close_sockets", "stop", "hang", "hold_locks", "slow"};
std::vector<std::string> const thread_kinds{"throw", "bad_alloc", "hang", "hold_locks", "slow"};

/// Calls `add(scenario, action)` for each action of a plan's program, with each kind of fault, over Gloo and in threads: the
/// fault strikes before the action in step `step`.
template <class Add>
void each_action(std::string const& schedule, chevron::plan const& plan, long step, Add const& add) {
  auto const program = chevron::lower(chevron::prove(plan));
  auto const view = program.view();
  for (std::string const backend : {"gloo", "threads"}) {
    for (std::string const& kind : backend == "gloo" ? process_kinds : thread_kinds) {
      for (int rank = 0; rank < pipeline_ranks; ++rank) {
        for (int i = 0; i < view.length(rank); ++i) {
          chevron::action const& what = view.at(rank, i).op;
          scenario one{.schedule = schedule, .backend = backend, .rank = rank, .point = "", .kind = kind};
          one.point = "step " + std::to_string(step) + ", before " + std::string(chevron::to_text(what).str());
          add(one, what);
        }
      }
    }
  }
}

void add_actions(std::vector<scenario>& out, std::string const& schedule) {
  auto const plan = chevron::catalogue::make_plan(schedule, {.ranks = pipeline_ranks, .micro_batches = micro_batches});
  each_action(schedule, plan, struck_step, [&](scenario one, chevron::action const& what) {
    // In turns, so that all of them meet all kinds of actions.
    std::size_t const turn = out.size() % 4;
    one.post_validation = turn == 1;
    // Ranks have a turn for UNSHARD only where shares are gathered late.
    bool const unshards = what.kind == chevron::kind::unshard;
    one.replicas = unshards || (one.backend == "gloo" && turn == 2) ? 2 : 1;
    one.saves = turn == 3;
    if (one.replicas == 2 && out.size() % 8 >= 4) one.rank += pipeline_ranks;
    one.shares = unshards || (one.replicas == 2 && out.size() % 16 >= 8);
    one.gradients = one.shares && out.size() % 32 >= 16;
    one.late = unshards || (one.shares && out.size() % 64 >= 32);
    one.cut = !unshards && ((turn == 0 && out.size() % 8 >= 4) || ((turn == 1 || turn == 3) && out.size() % 16 >= 8));
    if (one.cut) one.rank = 2 * one.rank + (out.size() % 32 >= 16 ? 1 : 0);
    out.push_back(one);
  });
}

/// Adds faults within a sharded optimizer's step: after a rank has stepped its share, before or while other ranks gather it.
void add_gathers(std::vector<scenario>& out) {
  for (std::string const schedule : {"1F1B", "ZBVZeroBubble"}) {
    for (std::string const backend : {"gloo", "threads"}) {
      for (std::string const& kind : backend == "gloo" ? process_kinds : thread_kinds) {
        for (std::string const point : {"stepped", "gathering"}) {
          for (int rank = 0; rank < 2 * pipeline_ranks; ++rank) {
            out.push_back({.schedule = schedule,
                           .backend = backend,
                           .replicas = 2,
                           .post_validation = rank % 2 == 1,
                           .shares = true,
                           .gradients = schedule != "1F1B",
                           .late = rank % 4 >= 2,
                           .rank = rank,
                           .point = "step " + std::to_string(struck_step) + ", " + point,
                           .kind = kind});
          }
        }
      }
    }
  }
}

/// Adds faults within the evaluation before the step after `struck_step`, at each action of its program.
void add_evaluations(std::vector<scenario>& out) {
  for (std::string const schedule : {"1F1B", "ZBVZeroBubble"}) {
    auto const plan = chevron::catalogue::make_plan(schedule, {.ranks = pipeline_ranks, .micro_batches = micro_batches});
    each_action(schedule, chevron::forward_part(plan, micro_batches), struck_step + 1, [&](scenario one, chevron::action const&) {
      one.evaluates = true;
      std::size_t const turn = out.size() % 4;
      one.post_validation = turn == 1;
      one.replicas = turn == 2 ? 2 : 1;
      one.shares = one.late = one.replicas == 2 && out.size() % 8 >= 4;
      one.cut = turn == 3;
      if (one.cut) one.rank = 2 * one.rank + (out.size() % 8 >= 4 ? 1 : 0);
      out.push_back(one);
    });
  }
}

}  // namespace

std::string scenario::text() const {
  return schedule + " " + backend + " x" + std::to_string(replicas) + (post_validation ? " post-validation" : "") +
         (shares ? " shares" : "") + (gradients ? " gradients" : "") + (late ? " late" : "") + (saves ? " saves" : "") +
         (evaluates ? " evaluates" : "") + (cut ? " cut" : "") + " | " + fault();
}

scenario scenario_of(std::string const& line) {
  auto const bar = line.find(" | ");
  auto const colon = line.rfind(": ");
  if (bar == std::string::npos || colon == std::string::npos || colon < bar) throw std::runtime_error("no scenario: " + line);
  scenario out;
  std::istringstream head(line.substr(0, bar));
  std::string word;
  head >> out.schedule >> out.backend >> word;
  out.replicas = std::stoi(word.substr(1));
  while (head >> word) {
    (word == "saves"       ? out.saves
     : word == "evaluates" ? out.evaluates
     : word == "cut"       ? out.cut
     : word == "shares"    ? out.shares
     : word == "gradients" ? out.gradients
     : word == "late"      ? out.late
                           : out.post_validation) = true;
  }
  std::string const fault = line.substr(bar + 3, colon - bar - 3);
  auto const comma = fault.find(", ");
  out.rank = std::stoi(fault.substr(5));
  out.point = fault.substr(comma + 2);
  out.kind = line.substr(colon + 2);
  return out;
}

std::vector<scenario> all_scenarios() {
  std::vector<scenario> out;
  chevron::catalogue::for_each([&](auto const& one) { add_actions(out, one.name); });
  add_gathers(out);
  add_evaluations(out);
  std::string const saved_step = std::to_string(struck_step + 1);
  for (int rank = 0; rank < pipeline_ranks; ++rank) {
    for (std::string const kind : {"kill", "stop", "exit", "throw", "bad_alloc"})
      out.push_back({.schedule = "1F1B", .backend = "gloo", .rank = rank, .point = "joining", .kind = kind});
    for (std::string const kind : {"kill", "stop", "exit"})
      out.push_back({.schedule = "1F1B", .backend = "gloo", .rank = rank, .point = "leaving", .kind = kind});
    for (std::string const point : {"saving", "publishing"}) {
      for (std::string const kind : {"kill", "stop", "exit", "throw", "bad_alloc", "hang", "disk_full"}) {
        // With a full disk a job fails at the write of the manifest, by rank 0.
        if (kind == "disk_full" && (rank != 0)) continue;
        out.push_back(
            {.schedule = "ZB-H1", .backend = "gloo", .saves = true, .rank = rank, .point = "step " + saved_step + ", " + point, .kind = kind});
      }
    }
    out.push_back({.schedule = "ZB-H1", .backend = "gloo", .saves = true, .rank = rank,
                   .point = "step " + std::to_string(struck_step) + ", after OPTIMIZER_STEP", .kind = "disk_full"});
  }
  return out;
}

}  // namespace torture
