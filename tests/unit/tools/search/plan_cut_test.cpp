// Layers divided for a given plan, against every way there is; bytes of layers; and searches whose even division keeps no limit.
// computes: every division of some layers
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/prove/footprint.hpp>
#include <chevron/schedule.hpp>
#include <chevron/search.hpp>

using namespace chevron;
using search::layer_costs;
using search::piece_costs;

namespace {

layer_costs drawn_costs(int count, std::mt19937& random) {
  auto const up_to = [&](double top) { return .1 + top * static_cast<double>(random()) / 4294967296.0; };
  layer_costs out;
  piece_costs const one{up_to(2), up_to(2), up_to(2)};
  for (int i = 0; i < count; ++i) out.layers.push_back(random() % 3 > 0 ? one : piece_costs{up_to(2), up_to(2), up_to(2)});
  out.embedding = {up_to(.5), 0, up_to(.5)};
  out.head = {up_to(5), up_to(5), up_to(5)};
  out.first_input = 0;
  out.communication = up_to(.2);
  return out;
}

/// Calls `look` with every division: each inner stage has a layer or more.
template <class Look>
void each_cut(int layers, int stages, std::vector<int>& cut, Look const& look) {
  auto const s = static_cast<int>(cut.size());
  if (s + 1 == stages) {
    cut.push_back(layers);
    look(cut);
    cut.pop_back();
    return;
  }
  int const after = std::max(stages - s - 2, 0);  // layers that the inner stages behind this one need
  for (int n = s == 0 ? 0 : 1; n + after <= layers; ++n) {
    cut.push_back(n);
    each_cut(layers - n, stages, cut, look);
    cut.pop_back();
  }
}

profile drawn_profile(int layers, std::mt19937& random) {
  profile out;
  out.stages = layers + 2;
  auto const up_to = [&](int top) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(top)) + 1; };
  for (int s = 0; s < out.stages; ++s) {
    out.layers.push_back(s > 0 && s + 1 < out.stages ? 1 : 0);
    out.forward.push_back(1);
    out.backward_input.push_back(1);
    out.backward_weight.push_back(1);
    out.backward.push_back(2);
    out.input_bytes.push_back(up_to(100));
    out.activation_bytes.push_back(100 + up_to(1000));
    out.kept_bytes.push_back(up_to(1000));
    out.gradient_bytes.push_back(up_to(1000));
    out.state_bytes.push_back(up_to(1000));
    out.static_bytes.push_back(out.gradient_bytes.back() + out.state_bytes.back() + up_to(1000));
  }
  out.communication.assign(static_cast<std::size_t>(out.stages) - 1, 0);
  return out;
}

}  // namespace

TEST_CASE("layers divided for a plan are no worse than even ones, and mostly the best of all ways") {
  std::mt19937 random(7);
  int cases = 0, best_of_all = 0;
  for (auto const& [name, chunks] :
       {std::pair{"1F1B", 1}, std::pair{"ZB-H1", 1}, std::pair{"ZBVZeroBubble", 2}, std::pair{"Interleaved1F1B", 2}}) {
    for (int const ranks : {2, 3}) {
      for (int draw = 0; draw < 6; ++draw) {
        plan const p = catalogue::make_plan(name, {.ranks = ranks, .micro_batches = 6, .chunks = chunks});
        REQUIRE(!p.problem);
        int const layers = p.stages + static_cast<int>(random() % 3);
        layer_costs const costs = drawn_costs(layers, random);
        search::plan_cut const found = search::cut_for(p, costs);
        REQUIRE(std::accumulate(found.layers.begin(), found.layers.end(), 0) == layers);
        owned_costs const of_found = costs.of(found.layers), of_even = costs.of(search::even_layers(layers, p.stages));
        CHECK(found.makespan == doctest::Approx(makespan(p, of_found.view())));
        CHECK(found.makespan <= makespan(p, of_even.view()) * (1 + 1e-12));
        double least = found.makespan;
        std::vector<int> cut;
        each_cut(layers, p.stages, cut,
                 [&](std::vector<int> const& one) { least = std::min(least, makespan(p, costs.of(one).view())); });
        CHECK(found.makespan <= least * 1.12);
        best_of_all += found.makespan <= least * (1 + 1e-9);
        ++cases;
      }
    }
  }
  CHECK(cases == 48);
  CHECK(best_of_all >= 40);
}

TEST_CASE("layers divided for a short span have that span, which makespans of other divisions hide") {
  std::mt19937 random(9);
  int differ = 0;
  for (int draw = 0; draw < 40; ++draw) {
    plan const p = catalogue::make_plan(draw % 2 == 0 ? "ZB-H2" : "1F1B", {.ranks = 3, .micro_batches = 6});
    search::sliced_layer_costs const costs{{drawn_costs(9, random)}};
    auto const spans = search::cut_for(p, costs, search::no_excess{}, 20'000'000, search::objective::span);
    auto const makespans = search::cut_for(p, costs);
    auto const span_of = [&](std::vector<int> const& cut) { return span(p, simulate(p, costs.of(cut))); };
    CHECK(spans.makespan == doctest::Approx(span_of(spans.layers)));
    CHECK(spans.makespan <= span_of(search::even_layers(9, 3)) * (1 + 1e-12));
    CHECK(makespans.makespan == doctest::Approx(makespan(p, costs.of(makespans.layers))));
    differ += span_of(spans.layers) < span_of(makespans.layers) * (1 - 1e-9);
  }
  CHECK(differ > 3);
}

TEST_CASE("a plan fits into memory before it is short") {
  std::mt19937 random(8);
  int differ = 0, near = 0;
  for (int draw = 0; draw < 20; ++draw) {
    plan const p = catalogue::make_plan("1F1B", {.ranks = 3, .micro_batches = 6});
    layer_costs const costs = drawn_costs(9, random);
    profile const bytes = drawn_profile(9, random);
    search::layer_bytes const of_layers = search::layer_bytes_of(bytes);
    REQUIRE(of_layers.problem.empty());
    auto const peak = [&](std::vector<int> const& cut) {
      stage_bytes const of = of_layers.of(cut);
      std::int64_t most = 0;
      for (int r = 0; r < 3; ++r) most = std::max(most, peak_memory(p, of.view(), r));
      return most;
    };
    std::int64_t least = peak(search::even_layers(9, 3));
    std::vector<int> cut;
    each_cut(9, 3, cut, [&](std::vector<int> const& one) { least = std::min(least, peak(one)); });
    auto const excess = [&](std::vector<int> const& one) { return std::max<std::int64_t>(peak(one) - least, 0); };
    search::plan_cut const found = search::cut_for(p, costs, excess), free = search::cut_for(p, costs);
    CHECK(found.excess == excess(found.layers));
    CHECK(found.excess <= excess(search::even_layers(9, 3)));
    near += found.excess <= least / 10;
    differ += found.layers != free.layers;
  }
  CHECK(differ > 5);
  CHECK(near >= 16);  // moves of one layer may end before the least
}

TEST_CASE("a plan with more stages than pieces has no layers") {
  plan const p = catalogue::make_plan("1F1B", {.ranks = 6, .micro_batches = 6});
  layer_costs costs;
  costs.layers.assign(3, {1, 1, 1});
  CHECK(search::cut_for(p, costs).layers.empty());
  costs.layers.assign(4, {1, 1, 1});
  CHECK(search::cut_for(p, costs).layers == std::vector<int>{0, 1, 1, 1, 1, 0});
}

TEST_CASE("bytes of layers add up to the profile's, however they are divided") {
  std::mt19937 random(9);
  for (int draw = 0; draw < 50; ++draw) {
    int const layers = 1 + static_cast<int>(random() % 9);
    profile const p = drawn_profile(layers, random);
    search::layer_bytes const of_layers = search::layer_bytes_of(p);
    REQUIRE(of_layers.problem.empty());
    auto const sum = [](std::vector<std::int64_t> const& list) {
      return std::accumulate(list.begin(), list.end(), std::int64_t{0});
    };
    std::vector<int> const cut = search::even_layers(layers, std::min(layers, 3));
    stage_bytes const of = of_layers.of(cut);
    CHECK(sum(of.fixed) == sum(p.static_bytes));
    CHECK(sum(of.activation) == sum(p.activation_bytes));
    // W of the first stage, which has no input gradient, needs all that F stored.
    std::int64_t more = 0;
    for (int i = 0; i < cut[0]; ++i) {
      auto const layer = static_cast<std::size_t>(i) + 1;
      more += std::max<std::int64_t>(p.activation_bytes[layer] - p.kept_bytes[layer], 0);
    }
    CHECK(sum(of.kept) == sum(p.kept_bytes) + more);
    CHECK(sum(of.gradient) == sum(p.gradient_bytes));
    CHECK(of.input.front() == p.input_bytes.front());
    // An R-th of the state, rounded up in each stage.
    stage_bytes const shared = of_layers.of(cut, 4);
    std::int64_t const saved = sum(of.fixed) - sum(shared.fixed), state = sum(p.state_bytes);
    CHECK(saved <= state - state / 4);
    CHECK(saved >= state - state / 4 - static_cast<std::int64_t>(cut.size()));
  }
}

TEST_CASE("stages of several layers: those of the ends take as much as their neighbours, the rest is embedding and head") {
  profile p;
  p.stages = 3;
  p.layers = {2, 4, 2};
  p.forward = p.backward = p.backward_input = p.backward_weight = {1, 1, 1};
  p.communication = {0, 0};
  p.static_bytes = {50, 40, 90};
  p.activation_bytes = {25, 20, 60};
  p.input_bytes = {1, 5, 5};
  search::layer_bytes const of = search::layer_bytes_of(p);
  REQUIRE(of.problem.empty());
  CHECK(of.layers.size() == 8);
  CHECK(of.embedding.fixed == 30);
  CHECK(of.head.fixed == 70);
  CHECK(of.head.activation == 50);
  stage_bytes const two = of.of({3, 5});
  CHECK(two.fixed == std::vector<std::int64_t>{60, 120});
  CHECK(two.input == std::vector<std::int64_t>{1, 5});
  p.layers.clear();
  CHECK(search::layer_bytes_of(p).problem == "'layers', the number of layers of each stage, is missing");
  p.layers = {4, 0, 4};
  CHECK(search::layer_bytes_of(p).problem == "no stage between the first and the last held a layer");
  p.static_bytes.clear();
  CHECK(search::layer_bytes_of(p).problem.find("'static_bytes' is missing") == 0);
}

namespace {

/// A search that refuses cuts whose first stage has a layer.
struct bare_first_stage {
  int* refused;
  bool allows(std::vector<int> const& cut) const { return cut[0] == 0; }
  search::found operator()(search::problem const& of_cut, std::vector<int> const& cut, search::effort const& trying) const {
    search::found out = search::find(of_cut, trying);
    if (!allows(cut)) {
      ++*refused;
      out.best = detail::refused({}, "searched", {.broken = law::in_flight});
    }
    return out;
  }
};

}  // namespace

TEST_CASE("where even layers keep no limit, those that may keep it are searched, and only those") {
  layer_costs costs;
  costs.layers.assign(8, {1, 1, 1});
  costs.head = {1, 1, 1};
  int refused = 0;
  auto const found = search::find_layers(costs, {.where = placed_on(placement::linear, {.ranks = 4, .micro_batches = 6})},
                                         {.brief = {.trials = 20}, .thorough = {.trials = 50}}, bare_first_stage{&refused});
  CHECK(!found.best.problem);
  CHECK(found.layers[0] == 0);
  CHECK(refused == 1);  // the even ones
}
