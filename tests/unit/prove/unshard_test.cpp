// The gather of a stage's parameters before its first computation of a step: the starts of actions, and the added time of a step.
#include <algorithm>
#include <cmath>
#include <vector>

#include <chevron/schedule.hpp>
#include <chevron/show.hpp>

#include <doctest/doctest.h>

using namespace chevron;

namespace {

plan made(char const* schedule, int ranks, int micro_batches) {
  return catalogue::make_plan(schedule, {.ranks = ranks, .micro_batches = micro_batches});
}

}  // namespace

TEST_CASE("each action starts at the latest of its rank, its input and its stage's parameters") {
  for (char const* const schedule : {"GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble", "LoopedBFS", "SeqZB-H1"}) {
    for (double const gather : {0.25, 1.0, 7.0}) {
      CAPTURE(schedule);
      plan const p = made(schedule, 4, 8);
      REQUIRE(!p.problem);
      costs const each{.forward = 1, .backward_input = 1.25, .backward_weight = 0.75, .communication = 0.5, .unshard = gather};
      plan_view const plan = p;
      step_graph const graph(plan);
      timeline const when = simulate(plan, each);
      REQUIRE(when.complete);
      std::vector<double> made_at(static_cast<std::size_t>(graph.results()), 0);
      for (int i = 0; i < plan.total(); ++i) {
        if (int const result = graph.makes(plan.actions[i]); result >= 0)
          made_at[static_cast<std::size_t>(result)] = when.end.data[i];
      }
      for (int r = 0; r < plan.size.ranks; ++r) {
        for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
          action const a = plan.actions[i];
          int before = 0;
          for (int s = 0; s <= static_cast<int>(a.stage); ++s) before += plan.rank_of[s] == r ? 1 : 0;
          double earliest = std::max(before * gather, i > plan.begin[r] ? when.end.data[i - 1] : 0.0);
          if (int const needed = graph.needs(a); needed >= 0) {
            double const crosses = graph.comes_over(a) >= 0 ? each.communication : 0;
            earliest = std::max(earliest, made_at[static_cast<std::size_t>(needed)] + crosses);
          }
          CHECK(when.start.data[i] == doctest::Approx(earliest));
        }
      }
      critical_path const path = critical_path_of(plan, each, when);
      double along = 0;
      for (path_step const& step : path) {
        along += step.communicating + when.end.data[step.action] - when.start.data[step.action];
        CHECK(step.communicating >= 0);
      }
      CHECK(along == doctest::Approx(makespan(plan, when)));
    }
  }
}

TEST_CASE("rank 0 waits for its first chunk's parameters; the fill hides the gathers of later chunks and ranks") {
  for (int ranks = 2; ranks <= 5; ++ranks) {
    for (char const* const schedule : {"1F1B", "GPipe", "ZB-H1", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble"}) {
      plan const p = made(schedule, ranks, 2 * ranks);
      CAPTURE(ranks);
      CAPTURE(schedule);
      double const alone = makespan(p, costs{});
      CHECK(makespan(p, costs{.unshard = 0.5}) == alone + 0.5);
      CHECK(makespan(p, costs{.unshard = 1}) == alone + 1);
      // Longer than the fill: a rank's last chunk waits for all gathers of its rank.
      CHECK(makespan(p, costs{.unshard = 100}) >= 100.0 * p.size.chunks);
    }
  }
}

TEST_CASE("costs by stage, copies of costs, and steps back to back have the gathers") {
  plan const p = made("Interleaved1F1B", 2, 4);
  owned_costs by_stage = copy_of(costs{.unshard = 3}, 4);
  CHECK(makespan(p, by_stage.view()) == makespan(p, costs{.unshard = 3}));
  CHECK(makespan(p, copy_of(by_stage.view(), 4).view()) == makespan(p, costs{.unshard = 3}));
  by_stage.unshard.data[0] = 0;
  by_stage.unshard.data[1] = 0;
  CHECK(makespan(p, by_stage.view()) < makespan(p, costs{.unshard = 3}));
  CHECK(copy_of(costs{}, 4).view().unshard == nullptr);
  CHECK(steady_step_time(p, costs{.unshard = 3}).most >= steady_step_time(p, costs{}).most + 3);
}

TEST_CASE("a picture has a box for each gather, below its rank's computations") {
  plan const p = made("ZBVZeroBubble", 2, 4);
  show::picture const drawn = show::picture_of(p, costs{.unshard = 0.5});
  std::vector<double> ends;
  for (show::box const& b : drawn.boxes) {
    if (b.op.kind != kind::unshard) continue;
    CHECK(b.end - b.start == 0.5);
    CHECK(p.rank_of.data[b.op.stage] == b.rank);
    ends.push_back(b.end);
  }
  CHECK(ends == std::vector<double>{0.5, 0.5, 1, 1});
  CHECK(show::svg(drawn).find("gather of parameters") != std::string::npos);
}
