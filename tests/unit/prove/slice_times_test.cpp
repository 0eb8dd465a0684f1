// Timelines of plans whose slices have costs of their own, beside those by factors of one microbatch's costs.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/plan/slices.hpp>
#include <chevron/prove/slice_times.hpp>
#include <chevron/search.hpp>

using namespace chevron;

namespace {

/// Costs of a plan's whole microbatches, different on each stage.
owned_costs drawn_costs(int stages, std::mt19937& random) {
  owned_costs out;
  auto const drawn = [&](int count) {
    buffer<double> list(count);
    for (double& one : list) one = 1 + static_cast<double>(random() % 100) / 16;
    return list;
  };
  for (auto* list : {&out.forward, &out.backward_input, &out.backward_weight}) *list = drawn(stages);
  out.communication = drawn(std::max(stages - 1, 1));
  out.latency = drawn(std::max(stages - 1, 1));
  out.communication_occupies = random() % 2 == 0 ? occupies::wire : occupies::receiver;
  return out;
}

/// The costs of slices that have these shares of a microbatch's tokens, all in proportion to them.
sliced_costs in_proportion(owned_costs const& whole, std::vector<double> const& shares) {
  sliced_costs out;
  for (double const share : shares) {
    owned_costs one = whole;
    for (auto* list : {&one.forward, &one.backward_input, &one.backward_weight, &one.communication})
      for (double& cost : *list) cost *= share;
    out.slices.push_back(std::move(one));
  }
  return out;
}

}  // namespace

TEST_CASE("slices in proportion to their tokens have the timeline of factors") {
  std::mt19937 random(7);
  int plans = 0;
  for (char const* name : {"Seq1F1B", "SeqZB-H1", "SeqInterleaved1F1B", "GPipe"}) {
    for (int const ranks : {2, 3, 4}) {
      for (int const slices : {2, 4}) {
        int const chunks = name == std::string("SeqInterleaved1F1B") ? 2 : 1;
        plan const p = catalogue::make_plan(name, {ranks, 5, chunks, slices});
        REQUIRE_FALSE(p.problem);
        owned_costs whole = drawn_costs(p.stages, random);
        std::vector<double> const ends = slice_ends(slices, 0.6);
        std::vector<double> shares;
        for (std::size_t i = 0; i < ends.size(); ++i) shares.push_back(ends[i] - (i > 0 ? ends[i - 1] : 0));
        sliced_costs const each = in_proportion(whole, shares);
        whole.lengths = factors_of_slices(ends, 0);
        timeline const by_factors = simulate(p, whole.view()), by_slice = simulate(p, each);
        REQUIRE(by_slice.complete);
        for (int i = 0; i < plan_view(p).total(); ++i) {
          CHECK(by_slice.start[i] == doctest::Approx(by_factors.start[i]).epsilon(1e-12));
          CHECK(by_slice.end[i] == doctest::Approx(by_factors.end[i]).epsilon(1e-12));
        }
        for (int r = 0; r < ranks; ++r) CHECK(busy(p, each, r) == doctest::Approx(busy(p, whole.view(), r)).epsilon(1e-12));
        ++plans;
      }
    }
  }
  CHECK(plans == 24);
}

TEST_CASE("steps of slices back to back take the time of factors") {
  std::mt19937 random(9);
  int slower = 0;
  for (char const* name : {"Seq1F1B", "SeqZB-H1", "SeqInterleaved1F1B"}) {
    for (int const ranks : {2, 4}) {
      for (int draw = 0; draw < 6; ++draw) {
        plan const p = catalogue::make_plan(name, {ranks, 5, name == std::string("SeqInterleaved1F1B") ? 2 : 1, 4});
        REQUIRE_FALSE(p.problem);
        owned_costs whole = drawn_costs(p.stages, random);
        std::vector<double> const ends = slice_ends(4, 0.6);
        std::vector<double> shares;
        for (std::size_t i = 0; i < ends.size(); ++i) shares.push_back(ends[i] - (i > 0 ? ends[i - 1] : 0));
        sliced_costs const each = in_proportion(whole, shares);
        whole.lengths = factors_of_slices(ends, 0);
        step_time const by_factors = steady_step_time(p, whole.view()), by_slice = steady_step_time(p, each);
        REQUIRE(by_slice.settled());
        CHECK(by_slice.most == doctest::Approx(by_factors.most).epsilon(1e-9));
        double most_busy = 0;
        for (int r = 0; r < ranks; ++r) most_busy = std::max(most_busy, busy(p, each, r));
        CHECK(by_slice.most >= most_busy * (1 - 1e-12));
        slower += by_slice.most > most_busy * 1.001;
      }
    }
  }
  CHECK(slower > 6);
}

namespace {

/// Ends a step with work of each rank's own; the first rank and the last wait for each other before.
struct drawn_ending {
  std::vector<double> work;
  bool meet = false;

  void operator()(double const* /*end*/, double* clock) const {
    if (meet) clock[0] = clock[work.size() - 1] = std::max(clock[0], clock[work.size() - 1]);
    for (std::size_t r = 0; r < work.size(); ++r) clock[r] += work[r];
  }
  double most() const { return std::accumulate(work.begin(), work.end(), 0.0); }
};

}  // namespace

TEST_CASE("what ranks do between two steps is in the time of a step, as in a long row of steps") {
  std::mt19937 random(11);
  int met = 0;
  for (char const* name : {"1F1B", "ZB-H2", "ZBVZeroBubble", "DualPipeV"}) {
    for (int draw = 0; draw < 12; ++draw) {
      plan const p = catalogue::make_plan(name, {.ranks = 3, .micro_batches = 6});
      REQUIRE_FALSE(p.problem);
      sliced_costs const costs{{drawn_costs(p.stages, random)}};
      drawn_ending ending{{0, 0, 0}, draw % 2 == 1};
      for (double& one : ending.work) one = static_cast<double>(random() % 64) / 4;
      step_time const found = steady_step_time(p, costs, ending), without = steady_step_time(p, costs);
      CHECK(found.settled());
      CHECK(found.most >= without.most * (1 - 1e-9));
      cost_view const view = costs.slices.front().view();
      detail::wires const links(p, view);
      int const total = plan_view(p).total();
      buffer<double> clock(3 + links.count, zeroed), start(total), end(total);
      double at_sixty = 0;
      for (int step = 1; step <= 84; ++step) {
        REQUIRE(detail::play(p, view, links, clock.data, start.data, end.data) == total);
        ending(end.data, clock.data);
        if (step == 60) at_sixty = clock[0];
      }
      CHECK((clock[0] - at_sixty) / 24 == doctest::Approx(found.most).epsilon(1e-9));
      ending.meet = false;
      met += draw % 2 == 1 && steady_step_time(p, costs, ending).most < found.most * 0.999;
    }
  }
  CHECK(met > 1);
}

TEST_CASE("one rank's steps take its work and what ends a step") {
  plan const p = catalogue::make_plan("1F1B", {.ranks = 1, .micro_batches = 4});
  owned_costs one;
  for (auto* list : {&one.forward, &one.backward_input, &one.backward_weight}) *list = buffer<double>(1, 1.0);
  one.communication = buffer<double>(1, 0.0);
  CHECK(steady_step_time(p, sliced_costs{{one}}, drawn_ending{{2.5}}).most == 4 * 3 + 2.5);
  one.unshard = buffer<double>(1, 0.5);
  CHECK(steady_step_time(p, sliced_costs{{one}}, drawn_ending{{2.5}}).most == 4 * 3 + 2.5 + 0.5);
}

TEST_CASE("a slice that takes longer delays its microbatch alone") {
  plan const p = catalogue::make_plan("Seq1F1B", {1, 2, 1, 2});  // F0.0 F0.1 B0.1 F1.0 B0.0 …
  owned_costs short_one;
  for (auto* list : {&short_one.forward, &short_one.backward_input, &short_one.backward_weight}) *list = buffer<double>(1, 1.0);
  short_one.communication = buffer<double>(1, 0.0);
  sliced_costs costs{{short_one, short_one}};
  costs.slices[1].forward[0] = 5;
  timeline const when = simulate(p, costs);
  for (int i = 0; i < plan_view(p).total(); ++i) {
    action const a = p.actions[i];
    double const took = when.end[i] - when.start[i];
    CHECK(took == (a.kind == kind::backward ? 2 : a.micro_batch % 2 == 1 ? 5 : 1));
  }
  CHECK(makespan(p, costs) == 2 * (1 + 5 + 2 + 2));
  CHECK(busy(p, costs, 0) == makespan(p, costs));
}

TEST_CASE("cuts of equal time ascend, leave each slice a token, and are multiples") {
  for (std::int64_t const length : {8, 9, 100, 4096}) {
    for (int const slices : {1, 2, 3, 8}) {
      for (double const attention : {0.0, 0.3, 1.0}) {
        for (std::int64_t const multiple : {1, 4}) {
          if (length / multiple < slices + 1 && multiple > 1) continue;
          std::vector<std::int64_t> const cuts = cuts_of_equal_time(length, slices, attention, multiple);
          REQUIRE(cuts.size() == static_cast<std::size_t>(slices - 1));
          std::int64_t before = 0;
          for (std::int64_t const one : cuts) {
            CHECK(one > before);
            CHECK(one % multiple == 0);
            before = one;
          }
          CHECK(before < length);
        }
      }
    }
  }
  CHECK(cuts_of_equal_time(4096, 4, 0) == std::vector<std::int64_t>{1024, 2048, 3072});
  CHECK(cuts_of_equal_time(1000, 2, 0.5) == std::vector<std::int64_t>{618});
}
