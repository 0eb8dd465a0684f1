// timeout: 120
#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/prove/memory.hpp>

#include "static/analysis_claims.hpp"

using namespace chevron;
using namespace chevron::tests;

namespace {

using dice = std::mt19937;

int up_to(dice& any, int most) { return std::uniform_int_distribution<int>(0, most)(any); }

/// A random lawful plan: any placement, any order in which the work can be done one action at a time, any pairs.
plan random_plan(dice& any) {
  plan made;
  int const ranks = 1 + up_to(any, 3);
  int const micro_batches = 1 + up_to(any, 4);
  int const stages = ranks + up_to(any, 3);
  bool const forward_only = up_to(any, 9) == 0;
  made.size = {ranks, micro_batches, (stages + ranks - 1) / ranks};
  made.stages = stages;
  made.forward_only = forward_only;
  made.rank_of = buffer<std::int16_t>(stages);
  for (int s = 0; s < stages; ++s) made.rank_of.data[s] = static_cast<std::int16_t>(s < ranks ? s : up_to(any, ranks - 1));
  std::shuffle(made.rank_of.data, made.rank_of.data + stages, any);

  enum : char { nothing, forwarded, gone_back, finished };
  std::vector<char> state(static_cast<std::size_t>(stages * micro_batches));
  std::vector<bool> split(state.size());
  for (std::size_t i = 0; i < split.size(); ++i) split[i] = up_to(any, 1) == 0;
  auto const at = [&](int s, int m) -> char& { return state[static_cast<std::size_t>(s * micro_batches + m)]; };
  std::vector<std::vector<action>> lists(static_cast<std::size_t>(ranks));
  while (true) {
    std::vector<action> ready;
    for (int s = 0; s < stages; ++s) {
      for (int m = 0; m < micro_batches; ++m) {
        bool const whole = !split[static_cast<std::size_t>(s * micro_batches + m)];
        if (at(s, m) == nothing && (s == 0 || at(s - 1, m) != nothing)) ready.push_back(make_action(kind::forward, s, m));
        if (forward_only) continue;
        if (at(s, m) == forwarded && (s + 1 == stages || at(s + 1, m) >= gone_back))
          ready.push_back(make_action(whole ? kind::backward : kind::backward_input, s, m));
        if (at(s, m) == gone_back && !whole) ready.push_back(make_action(kind::backward_weight, s, m));
      }
    }
    if (ready.empty()) break;
    auto const run = [&](action a) {
      at(static_cast<int>(a.stage), static_cast<int>(a.micro_batch)) = a.kind == kind::forward           ? forwarded
                                                                       : a.kind == kind::backward_weight ? finished
                                                                                                         : gone_back;
      lists[static_cast<std::size_t>(made.rank_of.data[a.stage])].push_back(a);
    };
    action first = ready[static_cast<std::size_t>(up_to(any, static_cast<int>(ready.size()) - 1))];
    action second{};
    if (first.kind == kind::forward && up_to(any, 1) == 0) {
      for (action b : ready) {
        bool const backward = b.kind == kind::backward || b.kind == kind::backward_input;
        if (backward && made.rank_of.data[b.stage] == made.rank_of.data[first.stage]) second = b, first.fused = 1;
      }
    }
    run(first);
    if (first.fused != 0) run(second);
  }
  int total = 0;
  for (auto const& list : lists) total += static_cast<int>(list.size());
  made.actions = buffer<action>(total);
  made.begin = buffer<int>(ranks + 1);
  int filled = 0;
  for (int r = 0; r < ranks; ++r) {
    made.begin.data[r] = filled;
    for (action a : lists[static_cast<std::size_t>(r)]) made.actions.data[filled++] = a;
  }
  made.begin.data[ranks] = filled;
  return made;
}

/// Costs of quarters, so that sums are exact; some are 0. Every other time microbatches are of unequal length.
struct any_costs : stage_costs<8> {
  double computation[5] = {1, 1, 1, 1, 1}, transfer[5] = {1, 1, 1, 1, 1};
  int unequal = 0;

  operator cost_view() const {
    cost_view out = stage_costs<8>::view();
    if (unequal > 0) out.lengths = {computation, transfer, unequal};
    return out;
  }
};

any_costs random_costs(dice& any, int micro_batches) {
  any_costs out;
  out.unequal = up_to(any, 1) * micro_batches;
  for (int m = 0; m < out.unequal; ++m) {
    out.computation[m] = (1 + up_to(any, 7)) / 4.0;
    out.transfer[m] = up_to(any, 8) / 4.0;
  }
  for (auto* list : {out.forward, out.backward_input, out.backward_weight}) {
    for (int s = 0; s < 8; ++s) list[s] = up_to(any, 8) / 4.0;
  }
  for (double& c : out.communication) c = up_to(any, 4) / 4.0;
  out.hidden = up_to(any, 4) / 4.0;
  for (double& c : out.latency) c = up_to(any, 4) / 4.0;
  out.communication_occupies = static_cast<occupies>(up_to(any, 4));
  out.first_input_gradient = up_to(any, 1) == 0;
  return out;
}

/// The times of a plan as a graph of tasks, actions and transfers alike, relaxed until nothing moves: slow, and independent of
/// the simulation. Tasks follow the documented rules: a pair is one task, a transfer is a task of the ranks or wire that it
/// occupies, a latency is a task that occupies nothing.
struct oracle {
  struct task {
    double takes = 0;
    std::vector<int> after_end;    // begins when these have ended
    std::vector<int> after_start;  // begins when these have begun
    double start = 0;
  };
  std::vector<task> tasks;
  std::vector<int> task_of;  // by action

  oracle(plan_view const& plan, any_costs const& of) : task_of(static_cast<std::size_t>(plan.total())) {
    stage_costs<8> const& equal = of;
    cost_view const costs = equal.view();
    bool const sender = costs.communication_occupies == occupies::sender || costs.communication_occupies == occupies::both;
    bool const receiver = costs.communication_occupies == occupies::receiver || costs.communication_occupies == occupies::both;
    auto const crosses = [&](action a, int direction) {  // whether a message goes in or out
      int const other = static_cast<int>(a.stage) + direction;
      return a.kind != kind::backward_weight && other >= 0 && other < plan.stages && plan.rank_of[other] != plan.rank_of[a.stage];
    };
    auto const transfer = [&](action a, int direction) {
      int const other = static_cast<int>(a.stage) + direction;
      return costs.of_message(std::min(other, static_cast<int>(a.stage))) * of.transfer[a.micro_batch];
    };
    auto const forward = [](action a) { return a.kind == kind::forward ? 1 : -1; };
    std::vector<int> receive_of(task_of.size(), -1), send_of(task_of.size(), -1);
    auto const add = [&](double takes, int after) {
      tasks.push_back({takes, {}, {}, 0});
      if (after >= 0) tasks.back().after_end.push_back(after);
      return static_cast<int>(tasks.size()) - 1;
    };
    for (int r = 0; r < plan.size.ranks; ++r) {
      int before = -1;
      for (int i = plan.begin[r]; i < plan.begin[r + 1];) {
        int const last = plan.actions[i].fused != 0 ? i + 1 : i;
        for (int h = i; h <= last; ++h) {
          if (!receiver || !crosses(plan.actions[h], -forward(plan.actions[h]))) continue;
          before = receive_of[static_cast<std::size_t>(h)] = add(transfer(plan.actions[h], -forward(plan.actions[h])), before);
        }
        auto const computes = [&](action a) {
          return of.computation[a.micro_batch] * costs.of(a.kind, static_cast<int>(a.stage));
        };
        double const one = computes(plan.actions[i]);
        double const two = last > i ? computes(plan.actions[last]) : 0;
        before = add(one + two - (last > i ? costs.hidden * std::min(one, two) : 0), before);
        for (int h = i; h <= last; ++h) task_of[static_cast<std::size_t>(h)] = before;
        for (int h = i; h <= last; ++h) {
          if (!sender || !crosses(plan.actions[h], forward(plan.actions[h]))) continue;
          before = send_of[static_cast<std::size_t>(h)] = add(transfer(plan.actions[h], forward(plan.actions[h])), before);
        }
        i = last + 1;
      }
    }
    std::map<std::pair<int, int>, int> newest_on;  // by the ranks that a wire joins: the transfer that was added last
    for (int i = 0; i < plan.total(); ++i) {
      action const a = plan.actions[i];
      for (int j = 0; j < plan.total(); ++j) {
        action const b = plan.actions[j];
        bool const gradients = a.kind != kind::forward && a.kind != kind::backward_weight && b.kind != kind::forward &&
                               b.kind != kind::backward_weight;
        if (a.micro_batch != b.micro_batch || !((a.kind == kind::forward && b.kind == kind::forward) || gradients)) continue;
        if (static_cast<int>(b.stage) != static_cast<int>(a.stage) + forward(a) || plan.rank_of[a.stage] == plan.rank_of[b.stage])
          continue;
        std::size_t const from = static_cast<std::size_t>(i), to = static_cast<std::size_t>(j);
        int const needs = receiver ? receive_of[to] : task_of[to];
        double const latency = costs.of_latency(static_cast<int>(std::min(a.stage, b.stage)));
        int way = -1;
        if (sender && receiver) {
          way = add(latency, -1);
          tasks.back().after_start.push_back(send_of[from]);
        } else if (sender || receiver) {
          way = add(latency, sender ? send_of[from] : task_of[from]);
        } else {
          way = add(transfer(a, forward(a)), task_of[from]);
          if (costs.communication_occupies == occupies::wire) {
            auto const [newest, first] = newest_on.try_emplace({plan.rank_of[a.stage], plan.rank_of[b.stage]}, way);
            if (!first) tasks.back().after_end.push_back(std::exchange(newest->second, way));
          }
          way = add(latency, way);
        }
        tasks[static_cast<std::size_t>(needs)].after_end.push_back(way);
      }
    }
    relax();
  }
  void relax() {
    for (bool moved = true; moved;) {
      moved = false;
      for (task& t : tasks) {
        double earliest = 0;
        for (int i : t.after_end) {
          task const& before = tasks[static_cast<std::size_t>(i)];
          earliest = std::max(earliest, before.start + before.takes);
        }
        for (int i : t.after_start) earliest = std::max(earliest, tasks[static_cast<std::size_t>(i)].start);
        moved = moved || t.start != earliest;
        t.start = earliest;
      }
    }
  }
  task const& of(int action) const { return tasks[static_cast<std::size_t>(task_of[static_cast<std::size_t>(action)])]; }
  double makespan() const {
    double last = 0;
    for (int i : task_of)
      last = std::max(last, tasks[static_cast<std::size_t>(i)].start + tasks[static_cast<std::size_t>(i)].takes);
    return last;
  }
};

/// A claim about every shape with up to so many ranks and 32 microbatches that the schedule has.
bool everywhere(char const* schedule, bool (*claim)(plan_view const&), int most_ranks) {
  int points = 0;
  for (int ranks = 1; ranks <= most_ranks; ++ranks) {
    for (int micro_batches = 1; micro_batches <= 32; ++micro_batches) {
      plan const made = catalogue::make_plan(schedule, shape{ranks, micro_batches});
      if (made.problem) continue;
      ++points;
      CAPTURE(ranks);
      CAPTURE(micro_batches);
      if (!claim(made)) return false;
    }
  }
  return points >= 16;
}

}  // namespace

TEST_SUITE("analysis") {
  TEST_CASE("random plans with pairs run when a relaxation of all their tasks says so") {
    dice any(4);
    int pairs = 0;
    for (int round = 0; round < 3000; ++round) {
      plan const made = random_plan(any);
      any_costs const c = random_costs(any, made.size.micro_batches);
      timeline const when = simulate(made, c);
      REQUIRE(when.complete);
      oracle const expected(made, c);
      bool same = true;
      for (int i = 0; i < made.view().total(); ++i) {
        same =
            same && when.start.data[i] == expected.of(i).start && when.end.data[i] == expected.of(i).start + expected.of(i).takes;
        pairs += made.actions.data[i].fused != 0 ? 1 : 0;
      }
      CHECK(same);
      // All that is said of a rank's time adds up.
      buffer<idle_time> const idle = idle_times(made, c, when);
      for (int r = 0; r < made.size.ranks; ++r) {
        CHECK(idle.data[r].idle() + idle.data[r].communicating + busy(made, c, r) == makespan(made, when));
        CHECK(std::min({idle.data[r].fill, idle.data[r].steady, idle.data[r].drain}) >= 0);
      }
    }
    CHECK(pairs > 3000);
  }

  TEST_CASE("no random plan beats the bounds, in whichever order its microbatches of unequal length go") {
    dice any(7);
    int met = 0;
    for (int round = 0; round < 3000; ++round) {
      plan const made = random_plan(any);
      any_costs const c = random_costs(any, made.size.micro_batches);
      timeline const when = simulate(made, c);
      for (int limit : {0, peak_in_flight(made)}) {
        lower_bounds const least = bounds(made, c, {static_cast<double>(limit), 1});
        CHECK(least.makespan <= makespan(made, when) * (1 + 1e-12));
        CHECK(least.span <= span(made, when) * (1 + 1e-12));
        met += least.makespan >= makespan(made, when) * (1 - 1e-12) ? 1 : 0;
      }
    }
    CHECK(met > 300);
  }

  TEST_CASE("what lies on the critical path delays the end, by as much as it is delayed") {
    dice any(5);
    for (int round = 0; round < 1000; ++round) {
      plan const made = random_plan(any);
      any_costs const c = random_costs(any, made.size.micro_batches);
      timeline const when = simulate(made, c);
      critical_path const path = critical_path_of(made, c, when);
      REQUIRE(path.count > 0);
      double at = 0;
      for (path_step const& step : path) {
        at += step.communicating;
        CHECK(when.start.data[step.action] == at);
        at = when.end.data[step.action];
      }
      CHECK(at == makespan(made, when));
      oracle late(made, c);
      path_step const& any_step = path.steps.data[up_to(any, path.count - 1)];
      late.tasks[static_cast<std::size_t>(late.task_of[static_cast<std::size_t>(any_step.action)])].takes += 0.5;
      late.relax();
      CHECK(late.makespan() == makespan(made, when) + 0.5);
    }
  }

  TEST_CASE("the time of a step in a long row: within its bounds, never above the span, as a row of steps in one plan has it") {
    dice any(6);
    int shorter = 0;
    for (int round = 0; round < 1500; ++round) {
      plan const made = random_plan(any);
      any_costs const c = random_costs(any, made.size.micro_batches);
      step_time const t = steady_step_time(made, c);
      CHECK(t.least <= t.most);
      CHECK(t.settled());
      // After many steps, twelve more (a multiple of the periods that so few ranks allow) take a time within the bounds.
      double const more = makespan(back_to_back(made, 72), c) - makespan(back_to_back(made, 60), c);
      CHECK(more / 12 <= t.most + 1e-9);
      CHECK(more / 12 >= t.least - 1e-9);
      double most_busy = 0;
      for (int r = 0; r < made.size.ranks; ++r) most_busy = std::max(most_busy, busy(made, c, r));
      CHECK(t.most >= most_busy);
      if (c.communication_occupies == occupies::nobody) {
        CHECK(t.most <= span(made, c) + 1e-9);
        shorter += t.most < span(made, c) - 1e-9 ? 1 : 0;
      }
    }
    CHECK(shorter > 0);  // a rank that begins early only to wait inside its step begins later from the second step on
  }

  TEST_CASE("the claims over a large grid") {
    catalogue::for_each([](auto const& schedule) {
      CAPTURE(schedule.name);
      CHECK(everywhere(schedule.name, accounted_for, 5));
    });
    CHECK(everywhere("1F1B", idle_of_one_f_one_b, 8));
    for (char const* name : {"ZB-H2", "ZBVZeroBubble"}) CHECK(everywhere(name, steady_is_busy, 8));
    for (char const* name : {"GPipe", "1F1B", "ZB-H1", "ZB-H2"}) CHECK(everywhere(name, steady_is_span, 8));
  }
}
