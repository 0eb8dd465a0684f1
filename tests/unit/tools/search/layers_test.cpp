// Layers shared out to stages together with the order, against every way there is; and the order in which gradients are added.
// computes: whole searches
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <chevron/plan/gradient_order.hpp>
#include <chevron/schedule.hpp>
#include <chevron/search.hpp>
#include <chevron/tools/show/profile_file.hpp>

using namespace chevron;
using search::layer_costs;
using search::piece_costs;

namespace {

/// Layers with random costs, with a head that may cost as much as several of them.
layer_costs some_layers(int count, std::mt19937& random) {
  auto const up_to = [&](double top) { return .1 + top * static_cast<double>(random()) / 4294967296.0; };
  layer_costs out;
  bool const alike = random() % 2 == 0;
  piece_costs const one{up_to(2), up_to(2), up_to(2)};
  for (int i = 0; i < count; ++i) out.layers.push_back(alike ? one : piece_costs{up_to(2), up_to(2), up_to(2)});
  out.embedding = {up_to(.5), 0, up_to(.5)};
  out.head = {up_to(6), up_to(6), up_to(6)};
  if (random() % 2 == 0) out.first_input = .01;
  out.communication = random() % 2 == 0 ? 0 : up_to(.3);
  return out;
}

/// Every way to give stages so many layers, the ends none if need be.
std::vector<std::vector<int>> all_ways(int layers, int stages) {
  std::vector<std::vector<int>> out;
  std::vector<int> digits(static_cast<std::size_t>(stages), 0);
  for (;;) {
    int sum = 0;
    bool good = true;
    for (std::size_t s = 0; s < digits.size(); ++s) {
      sum += digits[s];
      good = good && (digits[s] > 0 || s == 0 || s + 1 == digits.size());
    }
    if (good && sum == layers) out.push_back(digits);
    std::size_t at = 0;
    while (at < digits.size() && digits[at] == layers) digits[at++] = 0;
    if (at == digits.size()) return out;
    ++digits[at];
  }
}

/// The most layers between F and W on any rank.
int layers_held(plan const& p, std::vector<int> const& cut) {
  int most = 0;
  for (int r = 0; r < p.size.ranks; ++r) {
    int held = 0;
    for (int i = p.begin.data[r]; i < p.begin.data[r + 1]; ++i) {
      action const a = p.actions.data[i];
      if (a.kind == kind::forward) held += cut[a.stage];
      if (a.kind == kind::backward || a.kind == kind::backward_weight) held -= cut[a.stage];
      most = std::max(most, held);
    }
  }
  return most;
}

/// A profile of stages that hold so many layers.
profile measured_on(layer_costs const& costs, std::vector<int> const& cut) {
  owned_costs const stages = costs.of(cut);
  profile out;
  out.stages = static_cast<int>(cut.size());
  out.size = {.ranks = out.stages, .micro_batches = 4, .chunks = 1};
  out.steps = 10;
  out.forward.assign(stages.forward.begin(), stages.forward.end());
  out.backward.assign(cut.size(), profile::not_measured);
  out.backward_input.assign(stages.backward_input.begin(), stages.backward_input.end());
  out.backward_weight.assign(stages.backward_weight.begin(), stages.backward_weight.end());
  out.communication.assign(cut.size() - 1, costs.communication);
  out.layers = cut;
  return out;
}

}  // namespace

TEST_CASE("the layers found are as good as the best of all ways to share them out") {
  std::mt19937 random(7);
  int moved = 0;
  for (int round = 0; round < 12; ++round) {
    bool const vee = round % 3 == 0;
    int const ranks = vee ? 2 : 3 + round % 2;
    int const stages = vee ? 4 : ranks;
    int const layers = 4 + static_cast<int>(random() % 4);
    shape const size{.ranks = ranks, .micro_batches = 3 + static_cast<int>(random() % 3)};
    activation_limit const memory{static_cast<double>(random() % 2 == 0 ? 0 : stages)};
    layer_costs const costs = some_layers(layers, random);
    search::problem const asked{.where = vee ? placed_on(placement::vee, size) : placed_on(placement::linear, size),
                                .memory = memory};
    double best = 0, even = 0;
    for (auto const& cut : all_ways(layers, stages)) {
      owned_costs const of_stages = costs.of(cut);
      search::found const one = search::find(asked.at(of_stages.view()), {.trials = 100});
      if (cut == search::even_layers(layers, stages)) even = one.length;
      if (best == 0 || one.length < best) best = one.length;
    }
    auto const got = search::find_layers(
        costs, asked, {.brief = {.trials = 100}, .thorough = {.trials = 100}, .most_looked_at = 10000, .most_searched = 10000});
    CAPTURE(round);
    CHECK(got.length == doctest::Approx(best).epsilon(1e-9));
    CHECK(got.even == even);
    CHECK(got.nothing_better);
    CHECK(got.held == layers_held(got.best, got.layers));
    CHECK(makespan(got.best, costs.of(got.layers).view()) == got.length);
    CHECK_FALSE(check(got.best));
    moved += got.length < even ? 1 : 0;
  }
  CHECK(moved > 4);  // else there was nothing to find
}

TEST_CASE("a search for layers that is ended gives the best cut so far, and in rounds the best of all") {
  std::mt19937 random(9);
  layer_costs const costs = some_layers(9, random);
  struct count {
    long left;
    long asked = 0;
  };
  search::problem const wanted{.where = placed_on(placement::linear, {.ranks = 4, .micro_batches = 24}), .memory = {4}};
  auto const after = [&](count& how_many, bool rounds) {
    search::watcher const watch{[](search::progress const&, void* with) {
                                  ++static_cast<count*>(with)->asked;
                                  return --static_cast<count*>(with)->left < 0;
                                },
                                &how_many};
    auto const cuts = [&](search::effort const& trying) {
      return search::find_layers(costs, wanted, {.brief = {.trials = 20, .watch = trying.watch}, .thorough = trying});
    };
    return rounds ? search::in_rounds(cuts, {.trials = 50, .watch = watch}) : cuts({.trials = 300, .watch = watch});
  };
  count patient{1L << 40};
  auto const whole = after(patient, false);
  CHECK_FALSE(whole.stopped);
  REQUIRE(patient.asked > 12);  // else there is nothing to end
  CHECK(whole.layers != search::even_layers(9, 4));
  for (bool const rounds : {false, true}) {
    double before = 1e300;
    for (long asked : {0L, 1L, 3L, patient.asked / 4, patient.asked / 2, patient.asked - 1}) {
      CAPTURE(asked);
      count one{asked};
      auto const got = after(one, rounds);
      CHECK((got.stopped || got.settled()));
      CHECK_FALSE(check(got.best));
      CHECK(makespan(got.best, costs.of(got.layers).view()) == got.length);
      CHECK(got.length <= got.even);
      CHECK(got.held == layers_held(got.best, got.layers));
      CHECK(got.length <= before * (1 + 1e-12));
      CHECK(one.asked <= asked + 60);  // each cut that is begun asks once more
      before = got.length;
    }
  }
}

TEST_CASE("a cut that the search refuses is not taken, and takes no thorough search from those that it does not refuse") {
  layer_costs costs;
  costs.layers.assign(8, {1, 1, 1});
  costs.head = {1, 1, 1};
  std::vector<std::vector<int>> thorough;
  auto const find = [&](search::problem const& of_cut, std::vector<int> const& cut, search::effort const& trying) {
    if (trying.trials == 300) thorough.push_back(cut);
    search::found out = search::find(of_cut.within({4}), trying);
    if (cut[0] > 2) out.best = detail::refused({}, "searched", {.broken = law::in_flight});
    if (out.best.problem) out.length = 0;
    return out;
  };
  auto const found = search::find_layers(costs, {.where = placed_on(placement::linear, {.ranks = 4, .micro_batches = 6})},
                                         {.brief = {.trials = 50}, .thorough = {.trials = 300}}, find);
  DOCTEST_CHECK(found.layers[0] <= 2);
  DOCTEST_CHECK(!found.best.problem);
  DOCTEST_CHECK(found.length <= found.even);
  DOCTEST_CHECK(thorough.size() > 1);
  DOCTEST_CHECK(std::is_partitioned(thorough.begin(), thorough.end(), [](auto const& cut) { return cut[0] <= 2; }));
}

TEST_CASE("where there are too many ways, a head moves layers off its stage nevertheless") {
  layer_costs costs;
  costs.layers.assign(48, {1, 1, 1});
  costs.head = {5, 5, 5};
  int thorough = 0, brief = 0;
  auto const find = [&](search::problem const& of_cut, std::vector<int> const&, search::effort const& trying) {
    ++(trying.trials == 100 ? thorough : brief);
    return search::find(of_cut, trying);
  };
  auto const got =
      search::find_layers(costs, {.where = placed_on(placement::linear, {.ranks = 8, .micro_batches = 16}), .memory = {8}},
                          {.brief = {.trials = 20}, .thorough = {.trials = 100}, .most_looked_at = 9, .most_searched = 3}, find);
  CHECK(brief <= 9);
  CHECK(thorough <= 4);
  CHECK(got.searched == thorough);
  CHECK_FALSE(got.nothing_better);
  // 53 units of work: no rank can have less than 7.
  int most = got.layers.back() + 5;
  for (int const n : got.layers) most = std::max(most, n);
  CHECK(most == 7);
  CHECK(got.length < .8 * got.even);
}

TEST_CASE("what layers cost is worked out of a profile, and says what other cuts cost") {
  layer_costs truth;
  truth.layers.assign(9, {2, 3, 1.5});
  truth.embedding = {.25, 0, .5};
  truth.head = {4, 3.5, 2.5};
  truth.communication = .125;
  for (double const first_input : {-1.0, .015625}) {
    truth.first_input = first_input;
    for (auto const& cut : {std::vector{2, 3, 3, 1}, std::vector{3, 5, 1}, std::vector{0, 4, 5, 0}}) {
      layer_costs const got = search::layer_costs_of(measured_on(truth, cut), true);
      REQUIRE(got.problem.empty());
      // Without layers on the first stage, measurements cannot distinguish an embedding's missing input gradient from a free one.
      for (auto const& other : {std::vector{1, 1, 7}, std::vector{3, 2, 2, 2}, std::vector{9}}) {
        owned_costs const a = truth.of(other), b = got.of(other);
        for (std::size_t s = cut[0] == 0 ? 1 : 0; s < other.size(); ++s) {
          CHECK(a.forward[s] == doctest::Approx(b.forward[s]));
          CHECK(a.backward_input[s] == doctest::Approx(b.backward_input[s]));
          CHECK(a.backward_weight[s] == doctest::Approx(b.backward_weight[s]));
        }
        CHECK(std::ranges::equal(a.communication, b.communication));
      }
    }
  }
  // A first stage that is faster than its layers would be beside others has faster layers, not an embedding below nothing.
  profile odd = measured_on(truth, {3, 3, 3});
  odd.forward[0] = 3;
  layer_costs const got = search::layer_costs_of(odd, true);
  CHECK(got.embedding.forward == 0);
  CHECK(got.layers[0].forward == doctest::Approx(1));
  CHECK(got.layers[3].forward == doctest::Approx(2));
}

TEST_CASE("a profile that does not say what layers cost is refused with the reason") {
  layer_costs costs;
  costs.layers.assign(4, {1, 1, 1});
  profile p = measured_on(costs, {2, 2});
  CHECK(search::layer_costs_of(p, true).problem.find("take a profile with 3 stages or more") != std::string::npos);
  p.layers.clear();
  CHECK(search::layer_costs_of(p, true).problem.find("the number of layers of each stage, is missing") != std::string::npos);
  p = measured_on(costs, {1, 2, 1});
  p.layers[1] = 0;
  CHECK(search::layer_costs_of(p, true).problem == "no stage between the first and the last held a layer");
  // Stages that pass on say nothing of a layer, and are left out.
  for (auto const& cut : {std::vector{1, 0, 2, 1}, std::vector{1, 2, 0, 1}, std::vector{0, 0, 4, 0, 0}}) {
    layer_costs const got = search::layer_costs_of(measured_on(costs, cut), true);
    CHECK(got.problem.empty());
    CHECK(got.layers.size() == 4);
    for (auto const& one : got.layers) CHECK(one.forward == doctest::Approx(1));
  }
  p = measured_on(costs, {1, 2, 1});
  p.backward_input[1] = profile::not_measured;
  CHECK(search::layer_costs_of(p, true).problem.find("'backward_input' of stage 1 is null") != std::string::npos);
}

TEST_CASE("a profile's file says how many layers stages had, where that is known") {
  layer_costs costs;
  costs.layers.assign(5, {1, 1, 1});
  profile p = measured_on(costs, {1, 3, 1});
  p.schedule = "ZB-H1";
  auto const again = read_profile(write_profile(p));
  REQUIRE(again.problem == "");
  CHECK(again.value.layers == p.layers);
  p.layers.clear();
  std::string const without = write_profile(p);
  CHECK(without.find("layers") == std::string::npos);
  CHECK(read_profile(without).value.layers.empty());
  p.layers = {1, 3};
  CHECK(read_profile(write_profile(p)).problem == "'layers' is [1,3], no list of whole numbers from 0 with one entry for each of 3 stages");
}

TEST_CASE("in ascending order a plan keeps all laws, its length and its memory, and adds gradients up as others do") {
  int others = 0;
  for (shape const size : {shape{.ranks = 2, .micro_batches = 5}, shape{.ranks = 4, .micro_batches = 9}}) {
    catalogue::for_each([&](auto const& one) {
      plan const made = catalogue::make_plan(one.name, size);
      if (made.problem) return;
      plan const sorted = in_ascending_order(made);
      CAPTURE(one.name);
      CHECK_FALSE(check(sorted));
      costs const uneven{.forward = 1, .backward_input = 1.25, .backward_weight = .75, .communication = .125};
      CHECK(makespan(sorted, uneven) <= makespan(made, uneven) * (1 + 1e-12));
      for (int r = 0; r < size.ranks; ++r) CHECK(peak_in_flight(sorted, r) == peak_in_flight(made, r));
      CHECK(same_gradient_order(sorted, made) == !catalogue::same_name(one.name, "LoopedBFS"));
      others += same_gradient_order(sorted, made) ? 0 : 1;
    });
  }
  CHECK(others == 2);
  plan const searched =
      search::find({.where = placed_on(placement::loop, {.ranks = 4, .micro_batches = 8}), .costs = costs{.forward = 2}}).best;
  CHECK(same_gradient_order(in_ascending_order(searched), catalogue::make_plan("InterleavedZeroBubble", {.ranks = 4, .micro_batches = 8})));
  CHECK_FALSE(same_gradient_order(searched, catalogue::make_plan("InterleavedZeroBubble", {.ranks = 4, .micro_batches = 7})));
}

TEST_CASE("a round that was ended before it found anything takes nothing away") {
  search::layers_found best;
  best.layers = {2, 1};
  best.length = 10;
  best.even = 12;
  search::layers_found ended;
  ended.best.problem.broken = law::description;
  ended.stopped = true;
  best.add(std::move(ended));
  CHECK(best.layers == std::vector<int>{2, 1});
  CHECK(best.length == 10);
  CHECK(best.even == 12);
  CHECK(best.settled());
}

TEST_CASE("drift is the largest change as a share of the longest stage") {
  layer_costs costs;
  costs.layers.assign(4, {1, 1, 2});
  profile const then = measured_on(costs, {1, 2, 1});
  profile now = then;
  CHECK(cost_drift(then, now) == 0);
  now.backward_weight[0] = 3;  // of a stage that takes 4, where the longest takes 8
  CHECK(cost_drift(then, now) == doctest::Approx(.125));
  now.communication[1] = 2;
  CHECK(cost_drift(then, now) == doctest::Approx(.25));
  now.communication[1] = profile::not_measured;
  now.forward[0] = profile::not_measured;
  CHECK(cost_drift(then, now) == 0);
}
