// computes: thousands of random plans
#include <chevron/plan/step_graph.hpp>
#include <chevron/schedule.hpp>

#include <algorithm>
#include <string>
#include <vector>

#include "unit/prove/mutants.hpp"

#include <doctest/doctest.h>

using namespace chevron;
using namespace chevron::tests;

namespace {

bool sweep_passes(plan_view const& p) {
  buffer<std::uint8_t> state(p.stages * p.size.units(), zeroed);
  buffer<int> next(p.size.ranks), after(p.size.ranks);
  return detail::plays_through<false>(p, state.data, next.data, after.data) && detail::slices_in_order(p);
}

}  // namespace

TEST_CASE("of plans, right and wrong, the sweep of the proof says what the graph says") {
  int passed = 0, refused = 0;
  for (unsigned seed = 0; seed < 6000; ++seed) {
    dice d{std::mt19937(seed)};
    plan p = lawful_plan(d);
    if (seed % 3 != 0) p = mutant(d, p);
    if (detail::check_placement(p)) continue;
    bool const by_sweep = sweep_passes(p);
    INFO("seed " << seed);
    // Own actions are no part of the sweep, but of the lists.
    bool const by_graph = !detail::diagnose(p);
    CHECK((p.view().has_own_kinds() ? by_sweep || !by_graph : by_sweep == by_graph));
    ++(by_sweep ? passed : refused);
  }
  CHECK(passed > 1500);
  CHECK(refused > 1500);
}

TEST_CASE("in a timeline each action begins after all that the graph has it need, and messages take their time") {
  costs const each{.forward = 2, .backward_input = 3, .backward_weight = 1, .communication = 0.5, .latency = 0.25};
  for (unsigned seed = 0; seed < 1000; ++seed) {
    dice d{std::mt19937(seed)};
    plan const p = lawful_plan(d);
    plan_view const plan = p;
    step_graph const graph(plan);
    timeline const when = simulate(plan, each);
    REQUIRE(when.complete);
    std::vector<double> made(static_cast<std::size_t>(graph.results()), -1);
    std::vector<double> ended(static_cast<std::size_t>(graph.cells() * compute_kinds), -1);  // by cell and kind
    for (int i = 0; i < plan.total(); ++i) {
      action const a = plan.actions[i];
      if (int const result = graph.makes(a); result >= 0) made[static_cast<std::size_t>(result)] = when.end.data[i];
      ended[static_cast<std::size_t>(graph.cell_of(a) * compute_kinds + static_cast<int>(a.kind))] = when.end.data[i];
    }
    INFO("seed " << seed);
    for (int i = 0; i < plan.total(); ++i) {
      action const a = plan.actions[i];
      double const start = when.start.data[i];
      if (int const result = graph.needs(a); result >= 0) {
        double const there = made[static_cast<std::size_t>(result)];
        CHECK(there >= 0);
        CHECK(start >= there + (graph.comes_over(a) >= 0 ? 0.75 : 0));
      }
      if (int const carried = graph.carries_from(a); carried >= 0) {
        auto const end_of = [&](kind k) {
          int const cell = graph.cell_of(static_cast<int>(a.stage), carried);
          return ended[static_cast<std::size_t>(cell * compute_kinds + static_cast<int>(k))];
        };
        double const end =
            makes_output(a.kind) ? end_of(kind::forward) : std::max(end_of(kind::backward), end_of(kind::backward_input));
        CHECK((end >= 0 && end <= start));
      }
      for (int k = 0; k < compute_kinds; ++k) {
        double const end = ended[static_cast<std::size_t>(graph.cell_of(a) * compute_kinds + k)];
        if ((row_of(a.kind).after & kind_bit(static_cast<kind>(k))) != 0) CHECK((end >= 0 && end <= start));
        if ((row_of(a.kind).excludes & kind_bit(static_cast<kind>(k))) != 0) CHECK((end < 0 || end > start));
      }
    }
  }
}

TEST_CASE("a result goes to the stage that needs it, and a message from the stage that makes it") {
  plan const p = catalogue::make_plan("ZBVZeroBubble", {.ranks = 3, .micro_batches = 4});
  step_graph const graph(p);
  for (int s = 0; s < p.stages; ++s) {
    for (int k = 0; k < program_kinds; ++k) {
      action const a = make_action(static_cast<kind>(k), s, 1);
      if (int const to = graph.to(a); to >= 0 && is_compute(a.kind)) {
        action const taker = make_action(a.kind, to, 1);
        CHECK(graph.needs(taker) == graph.makes(a));
        CHECK(graph.comes_over(taker) == graph.crosses(a));
        CHECK(graph.from(taker) == s);
      }
    }
    action const send = make_action(kind::send_forward, s, 1);
    if (s + 1 < p.stages) CHECK(graph.makes(send) == graph.needs(detail::receive_of(send)));
  }
}

TEST_CASE("each action has a number of its own and begins after its source, which says where it comes from") {
  costs const each{.forward = 2, .backward_input = 3, .backward_weight = 1, .communication = 0.5};
  for (unsigned seed = 0; seed < 300; ++seed) {
    dice d{std::mt19937(seed)};
    plan const p = lawful_plan_of_fbiw(d);
    plan_view const plan = p;
    step_graph const graph(plan);
    timeline const when = simulate(plan, each);
    std::vector<int> at(static_cast<std::size_t>(3 * graph.cells()), -1);
    INFO("seed " << seed);
    for (int i = 0; i < plan.total(); ++i) {
      int& place = at[static_cast<std::size_t>(graph.number_of(plan.actions[i]))];
      CHECK(place < 0);
      place = i;
    }
    for (int i = 0; i < plan.total(); ++i) {
      action const a = plan.actions[i];
      int const source = graph.source_of(a);
      CHECK((source == step_graph::none) == (a.kind == kind::forward && a.stage == 0));
      if (source == step_graph::none) continue;
      int const place = at[static_cast<std::size_t>(source)];
      REQUIRE(place >= 0);
      CHECK(when.end.data[place] <= when.start.data[i]);
      CHECK(plan.actions[place].micro_batch == a.micro_batch);
      CHECK(static_cast<int>(plan.actions[place].stage) == (graph.from(a) >= 0 ? graph.from(a) : static_cast<int>(a.stage)));
    }
  }
}

static_assert([] {
  for (int k = 0; k < compute_kinds; ++k) {
    kind const what = static_cast<kind>(k);
    if (hands_on(what) != (row_of(what).to != 0)) return false;
  }
  return true;
}());
