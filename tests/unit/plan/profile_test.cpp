#include <doctest/doctest.h>
#include <algorithm>

#include <chevron/plan/slices.hpp>
#include <chevron/run/core/measured_bytes.hpp>
#include <chevron/schedule.hpp>
#include <chevron/tools/profile/trace_window.hpp>
#include <chevron/tools/search/layer_costs.hpp>
#include <chevron/tools/show/profile_file.hpp>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <tuple>
#include <vector>

using namespace chevron;

namespace {

/// Costs that differ from stage to stage and from boundary to boundary, in milliseconds; stage 0 has no input gradient.
struct uneven_costs {
  std::vector<double> forward, input, weight, communication;
  explicit uneven_costs(int stages) {
    for (int s = 0; s < stages; ++s) {
      forward.push_back(1 + 0.25 * s);
      input.push_back(s == 0 ? 0 : 1.5 + 0.125 * s);
      weight.push_back(s == 0 ? 2.5 : 0.75 + 0.25 * (s % 3));
      communication.push_back(0.0625 * (1 + s % 2));
    }
  }
  cost_view view() const { return {forward.data(), input.data(), weight.data(), 1, communication.data(), 1}; }
};

/// Checks the times of a stage's computations. \param split whether its backward is split
void check_computations(profile const& measured, uneven_costs const& truth, std::size_t stage, bool split) {
  CHECK(measured.forward[stage] == doctest::Approx(truth.forward[stage]));
  if (split) CHECK(measured.backward_input[stage] == doctest::Approx(truth.input[stage]));
  if (split) CHECK(measured.backward_weight[stage] == doctest::Approx(truth.weight[stage]));
  if (!split) CHECK(measured.backward[stage] == doctest::Approx(truth.input[stage] + truth.weight[stage]));
}

std::int64_t ns(double milliseconds) { return std::llround(milliseconds * 1e6); }

/// The traces of ranks that run a plan as simulated, for two steps, in several replicas, each of which begins its step a bit
/// later than the previous one.
all_steps recorded_as_simulated(plan_view const& plan, cost_view const& costs, int replicas, double clock_error = 0) {
  timeline const when = simulate(plan, costs);
  all_steps out;
  for (int g = 0; g < replicas * plan.size.ranks; ++g) {
    int const r = g % plan.size.ranks;
    double const wrong = r == 1 ? clock_error : 0;
    out.emplace_back();
    for (int step = 1; step <= 2; ++step) {
      double const zero = 1000.0 * step + 3.0 * (g / plan.size.ranks) + wrong;
      step_trace one;
      one.step = step;
      one.seconds = 0.5;
      double free = 0;
      for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
        action const a = plan.actions[i];
        double start = when.start.data[i], end = when.end.data[i];
        // The simulation has a pair's halves at once; a rank runs one, then the other.
        bool const second = i > plan.begin[r] && plan.actions[i - 1].fused != 0;
        if (a.fused != 0) end = start + costs.of(a.kind, static_cast<int>(a.stage));
        if (second) start = end - costs.of(a.kind, static_cast<int>(a.stage));
        one.entries.push_back({a, ns(zero + free), ns(zero + start), ns(zero + end)});
        free = end;
      }
      out.back().push_back(one);
    }
  }
  return out;
}

profile sample(int stages = 2) {
  profile p;
  p.schedule = "ZB-H1";
  p.size = {.ranks = stages, .micro_batches = 4, .chunks = 1};
  p.stages = stages;
  p.steps = 3;
  p.pipeline = 20;
  p.step = 21.5;
  for (int s = 0; s < stages; ++s) {
    p.forward.push_back(1 + s);
    p.backward.push_back(profile::not_measured);
    p.backward_input.push_back(0.5 * s);
    p.backward_weight.push_back(2);
    if (s > 0) p.communication.push_back(0.25 * s);
  }
  return p;
}

std::string replaced(std::string text, std::string const& what, std::string const& by) {
  auto const at = text.find(what);
  REQUIRE(at != std::string::npos);
  return text.replace(at, what.size(), by);
}

}  // namespace

TEST_CASE("costs that were simulated are measured again, and predict what was simulated") {
  int looked_at = 0;
  catalogue::for_each([&](auto const& one) {
    if (!catalogue::trains(one.name)) return;
    for (int ranks : {1, 2, 4}) {
      for (int micro_batches : {4, 8, 11}) {
        plan const made = catalogue::make_plan(one.name, {ranks, micro_batches, 0});
        if (made.problem || check(made)) continue;
        plan_view const view = made;
        CAPTURE(one.name);
        CAPTURE(ranks);
        CAPTURE(micro_batches);
        uneven_costs const truth(view.stages);
        for (int replicas : {1, 2}) {
          profile const measured = profile_of(view, recorded_as_simulated(view, truth.view(), replicas));
          CHECK(measured.replicas == replicas);
          CHECK(measured.steps == 2);
          CHECK(measured.step == doctest::Approx(500));
          double const length = makespan(view, truth.view());
          CHECK(measured.pipeline == doctest::Approx(length));
          std::vector<bool> const split = split_stages(view);
          for (int s = 0; s < view.stages; ++s) {
            auto const i = static_cast<std::size_t>(s);
            check_computations(measured, truth, i, split[i]);
            if (s + 1 == view.stages) continue;
            bool const crosses = view.rank_of[s] != view.rank_of[s + 1];
            // A message is measured if anybody ever waited for it.
            if (measured.communication[i] >= 0) CHECK(measured.communication[i] == doctest::Approx(truth.communication[i]));
            CHECK((crosses || measured.communication[i] == profile::not_measured));
          }
          profiled_costs const again = costs_of(measured, split);
          REQUIRE(again.problem.empty());
          // Messages for which no rank waited do not lengthen the step, unless their estimate is far too long.
          bool const all_known = [&] {
            for (int s = 0; s + 1 < view.stages; ++s) {
              if (view.rank_of[s] != view.rank_of[s + 1] && measured.communication[static_cast<std::size_t>(s)] < 0) return false;
            }
            return true;
          }();
          if (all_known) CHECK(makespan(view, again.view()) == doctest::Approx(length));
          CHECK(makespan(view, again.view()) == doctest::Approx(length).epsilon(0.03));
          CHECK(taken_under(measured, view));
          ++looked_at;
        }
      }
    }
  });
  CHECK(looked_at > 100);
}

TEST_CASE("times of slices are measured as those of whole microbatches, and each slice's share of them is what was simulated") {
  int looked_at = 0;
  for (char const* name : {"Seq1F1B", "SeqZB-H1", "SeqInterleaved1F1B"}) {
    for (int slices : {2, 3, 4}) {
      for (double attention : {0.0, 0.2, 0.4}) {
        plan const made = catalogue::make_plan(name, {.ranks = 3, .micro_batches = 6, .chunks = 0, .slices = slices});
        REQUIRE(!made.problem);
        plan_view const view = made;
        CAPTURE(name);
        CAPTURE(slices);
        CAPTURE(attention);
        uneven_costs const truth(view.stages);
        length_factors const factors = factors_of_slices(slice_ends(slices, 0), attention);
        cost_view costs = truth.view();
        costs.lengths = factors.view();
        all_steps const all = recorded_as_simulated(view, costs, 1);
        profile const measured = profile_of(view, all, profiled_times::microbatches);
        std::vector<bool> const split = split_stages(view);
        for (int s = 0; s < view.stages; ++s) {
          auto const i = static_cast<std::size_t>(s);
          check_computations(measured, truth, i, split[i]);
          if (s + 1 < view.stages && measured.communication[i] >= 0)
            CHECK(measured.communication[i] == doctest::Approx(truth.communication[i]));
        }
        // In the costs that a running program plans with, an action's time is that of a slice.
        profile const of_units = profile_of(view, all);
        CHECK(of_units.forward.back() < truth.forward.back());
        CHECK(of_units.pipeline == measured.pipeline);
        profiled_costs again = costs_of(measured, split);
        REQUIRE(again.problem.empty());
        again.lengths = factors;
        CHECK(makespan(view, again.view()) == doctest::Approx(makespan(view, costs)).epsilon(0.03));
        ++looked_at;
      }
    }
  }
  CHECK(looked_at == 27);
}

TEST_CASE("what fused pairs gain is measured where their halves run beside each other") {
  // Alone F takes 2 ms and B 4 ms; beside each other 4.5 ms together.
  plan const made = catalogue::make_plan("1F1B", {1, 3, 0});
  auto const ran = [](kind what, unsigned fused, int micro_batch, double start, double end) {
    action a = make_action(what, 0, micro_batch);
    a.fused = fused & 1u;
    return trace_event{a, ns(start), ns(start), ns(end)};
  };
  constexpr kind f = kind::forward, b = kind::backward;
  step_trace const step{.step = 1,
                        .seconds = 0.0155,
                        .peak_in_flight = 1,
                        .entries = {ran(f, 0, 0, 0, 2), ran(f, 1, 1, 2, 6), ran(b, 0, 0, 2.5, 6.5), ran(f, 1, 2, 6.5, 9.5),
                                    ran(b, 0, 1, 6.5, 11), ran(b, 0, 2, 11, 15)}};
  profile const measured = profile_of(made, {{step}});
  CHECK(measured.forward[0] == doctest::Approx(2));
  CHECK(measured.backward[0] == doctest::Approx(4));
  CHECK(measured.hidden == doctest::Approx(0.75));
  CHECK(costs_of(measured, {false}).view().hidden == doctest::Approx(0.75));
  CHECK(measured.pipeline == doctest::Approx(15));
}

TEST_CASE("what a rank kept is the same on whoever reads it") {
  trace_window kept;
  for (long step = 1; step <= 25; ++step) {
    rank_trace of;
    of.reserve(2);
    of.begin_step(step);
    action half = make_action(kind::forward, 3, static_cast<int>(step));
    half.fused = 1;
    of.add(half);
    of.computed(0, 1000 * step, 1000 * step + 7);
    of.chunks_change(1);
    of.add(make_action(kind::backward_weight, 5, 1));
    of.took({.active = 1 << step, .reserved = 1L << 40, .planned = 17, .total = 80L << 30});
    kept.keep(of, 0.25 * static_cast<double>(step));
  }
  all_steps const read = steps_of({kept.text(), kept.text()});
  REQUIRE(read.size() == 2);
  REQUIRE(read[1].size() == trace_window::kept);
  for (std::size_t k = 0; k < trace_window::kept; ++k) {
    step_trace const& one = read[1][k];
    auto const step = static_cast<long>(k) + 6;
    CHECK(one.step == step);
    CHECK(one.seconds == 0.25 * static_cast<double>(step));
    CHECK(one.peak_in_flight == 1);
    CHECK(one.memory.active == 1 << step);
    CHECK(one.memory.reserved == 1L << 40);
    CHECK(one.memory.planned == 17);
    CHECK(one.memory.total == 80L << 30);
    REQUIRE(one.entries.size() == 2);
    CHECK(to_text(one.entries[0].op).str() == to_text(make_action(kind::forward, 3, static_cast<int>(step))).str());
    CHECK(one.entries[0].op.fused == 1);
    CHECK(one.entries[0].start == 1000 * step);
    CHECK(one.entries[0].end == 1000 * step + 7);
    CHECK(one.entries[1].op.kind == kind::backward_weight);
    CHECK(one.entries[1].op.stage == 5);
  }
}

TEST_CASE("ranks whose clocks differ give no message's time, and all else") {
  plan const made = catalogue::make_plan("1F1B", {4, 8, 0});
  uneven_costs const truth(4);
  profile const measured = profile_of(made, recorded_as_simulated(made, truth.view(), 1, 5.0));
  CHECK(measured.forward[1] == doctest::Approx(truth.forward[1]));
  for (double const time : measured.communication) CHECK(time == profile::not_measured);
  CHECK_FALSE(costs_of(measured, split_stages(made)).communication_known);
}

TEST_CASE("a profile of finer stages serves coarser ones, and says what it cannot do") {
  profile const fine = sample(4);
  auto const coarse = costs_of(fine, {true, true});
  REQUIRE(coarse.problem.empty());
  CHECK(std::ranges::equal(coarse.forward, std::vector<double>{3, 7}));
  CHECK(std::ranges::equal(coarse.backward_input, std::vector<double>{0.5, 2.5}));
  CHECK(std::ranges::equal(coarse.backward_weight, std::vector<double>{4, 4}));
  CHECK(std::ranges::equal(coarse.communication, std::vector<double>{0.5}));
  // I and W of a profile are as good as a B.
  CHECK(costs_of(fine, {false, false, false, false}).problem.empty());
  CHECK(costs_of(fine, std::vector<bool>(3)).problem.find("take a profile with 3 stages") != std::string::npos);
  CHECK(costs_of(fine, std::vector<bool>(8)).problem.find("take a profile with 8 stages") != std::string::npos);

  profile whole = sample(2);
  whole.backward = {4, 5};
  whole.backward_input = whole.backward_weight = {profile::not_measured, profile::not_measured};
  auto const full = costs_of(whole, {false, false});
  REQUIRE(full.problem.empty());
  CHECK(full.view().of(kind::backward, 1) == 5);
  auto const refused = costs_of(whole, {false, true}).problem;
  CHECK(refused.find("'backward_input' of stage 1 is null") != std::string::npos);
  CHECK(refused.find("ZB-H1") != std::string::npos);

  // A boundary within a rank: like the others.
  profile gap = sample(4);
  gap.communication[1] = profile::not_measured;
  CHECK(costs_of(gap, std::vector<bool>(4)).communication[1] == 0.75);
}

TEST_CASE("a profile with one layer in each stage serves any smaller number of stages, cut as chevron-train divides layers") {
  constexpr int layers = 40, stages = 16;
  profile measured;
  measured.stages = layers;
  for (int k = 0; k < layers; ++k) {
    measured.forward.push_back(1 + k);
    measured.backward.push_back(2 + k);
    measured.backward_input.push_back(k);
    measured.backward_weight.push_back(2);
    measured.static_bytes.push_back(100 + k);
    measured.activation_bytes.push_back(10 + k);
    measured.input_bytes.push_back(k);
  }
  for (int k = 0; k + 1 < layers; ++k) measured.communication.push_back(k);
  std::string const refusal = "take a profile with 16 stages, or with one layer in each stage";
  CHECK(costs_of(measured, std::vector<bool>(stages)).problem.find(refusal) != std::string::npos);
  CHECK(bytes_of(measured, stages).problem == "it has 40 stages, which do not add up to 16");

  measured.layers.assign(layers, 1);
  profiled_costs const cut = costs_of(measured, std::vector<bool>(stages, true));
  stage_bytes const bytes = bytes_of(measured, stages);
  REQUIRE(cut.problem.empty());
  REQUIRE(bytes.problem.empty());
  std::vector<int> const held = search::even_layers(layers, stages);
  CHECK(std::vector<int>(held.begin(), held.begin() + 4) == std::vector<int>{3, 2, 3, 2});
  int first = 0;
  for (int s = 0; s < stages; ++s) {
    CAPTURE(s);
    double forward = 0, input = 0;
    std::int64_t fixed = 0, kept = 0;
    int const behind = first + held[static_cast<std::size_t>(s)];
    for (int k = first; k < behind; ++k) forward += 1 + k, input += k, fixed += 100 + k, kept += 10 + k;
    CHECK(cut.forward[s] == forward);
    CHECK(cut.backward_input[s] == input);
    CHECK(bytes.fixed[static_cast<std::size_t>(s)] == fixed);
    CHECK(bytes.activation[static_cast<std::size_t>(s)] == kept);
    CHECK(bytes.input[static_cast<std::size_t>(s)] == first);
    if (s + 1 < stages) CHECK(cut.communication[s] == behind - 1);
    first = behind;
  }
  CHECK(first == layers);
  CHECK(!costs_of(measured, std::vector<bool>(layers + 1)).problem.empty());
  measured.layers[3] = 2;
  CHECK(!costs_of(measured, std::vector<bool>(stages)).problem.empty());
}

TEST_CASE("the optimizer's state over other numbers of replicas: each holds its share, rounded up") {
  profile one = sample(4);
  one.static_bytes = {1000, 400, 400, 900};
  one.activation_bytes = one.input_bytes = {1, 1, 1, 1};
  CHECK(bytes_of(one, 4).fixed == one.static_bytes);
  CHECK(bytes_of(one, 4, 1).fixed == one.static_bytes);
  CHECK(bytes_of(one, 4, 2).problem.starts_with("'state_bytes' is missing, so that a share of the optimizer's state is unknown"));
  one.state_bytes = {501, 200, 200, 0};
  CHECK(bytes_of(one, 4, 2).fixed == std::vector<std::int64_t>{750, 300, 300, 900});
  CHECK(bytes_of(one, 2, 4).fixed == std::vector<std::int64_t>{1400 - 701 + 176, 1300 - 200 + 50});
  // Measured over three replicas.
  one.shard = 3;
  CHECK(bytes_of(one, 4).fixed == one.static_bytes);
  CHECK(bytes_of(one, 4, 3).fixed == one.static_bytes);
  CHECK(bytes_of(one, 4, 1).fixed == std::vector<std::int64_t>{1000 + 2 * 501, 800, 800, 900});
  CHECK(bytes_of(one, 4, 6).fixed == std::vector<std::int64_t>{750, 300, 300, 900});

  one.gradient_bytes = {100, 50, 50, 7};
  CHECK(bytes_of(one, 2).gradient == std::vector<std::int64_t>{150, 57});
  std::string const text = write_profile(one);
  auto const back = read_profile(text);
  CHECK(back.problem == "");
  CHECK(write_profile(back.value) == text);
  CHECK(back.value.shard == 3);
  for (auto const& [what, by, words] :
       {std::tuple{"\"shard\": 3", "\"shard\": 0", "'shard' is 0, not a whole number from 1 to 4096"},
        std::tuple{"[501,200", "[1001,200", "'state_bytes' of stage 0 is 1001, more than its 'static_bytes'"},
        std::tuple{"[501,200,200,0]", "[501,200,200]", "'state_bytes' is no list with one entry for each of 4 stages"},
        std::tuple{"[501,200", "[-1,200", "'state_bytes', entry 0, is -1, no whole number of bytes"},
        std::tuple{"[100,50", "[500,50", "'gradient_bytes' of stage 0 is 500, more than its 'static_bytes' without"},
        std::tuple{"\"static_bytes\": [1000,400,400,900]", "\"static_bytes\": null", "'state_bytes' is there without"}}) {
    auto const read = read_profile(replaced(text, what, by));
    CHECK_MESSAGE(read.problem.find(words) != std::string::npos, read.problem, " instead of ", words);
  }
}

TEST_CASE("a profile is read as it was written, and nothing else is") {
  std::string const text = write_profile(sample());
  auto const back = read_profile(text);
  CHECK(back.problem == "");
  CHECK(write_profile(back.value) == text);
  CHECK(back.value.backward[1] == profile::not_measured);
  // Every number comes back as it was, to the last bit.
  std::mt19937_64 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    profile exact = sample(4);
    for (auto* list : {&exact.forward, &exact.backward_input, &exact.backward_weight, &exact.communication}) {
      for (double& time : *list)
        time = std::ldexp(static_cast<double>(random() >> 11), -static_cast<int>(random() % 80) - 20) * 1e-3;
    }
    exact.pipeline = 100.0 / static_cast<double>(3 + trial);
    exact.step = 1e-9 / static_cast<double>(3 + trial);
    exact.hidden = 1.0 / static_cast<double>(3 + trial);
    auto const again = read_profile(write_profile(exact));
    REQUIRE(again.problem == "");
    CHECK(again.value.forward == exact.forward);
    CHECK(again.value.backward_input == exact.backward_input);
    CHECK(again.value.backward_weight == exact.backward_weight);
    CHECK(again.value.communication == exact.communication);
    CHECK(std::tuple(again.value.pipeline, again.value.step, again.value.hidden) ==
          std::tuple(exact.pipeline, exact.step, exact.hidden));
  }

  struct fault {
    char const* what;
    char const* by;
    char const* words;
  };
  for (fault const& f :
       {fault{"\"forward\"", "\"fwd\"", "'forward' is missing"},
        fault{"\"steps\": 3", "\"steps\": 3, \"steps\": 3", "'steps' is there twice"},
        fault{"\"steps\": 3", "\"steps\": 3.5", "'steps' is 3.5, not a whole number from 1"},
        fault{"\"steps\": 3", "\"steps\": 0", "'steps' is 0"}, fault{"\"ranks\": 2", "\"ranks\": \"2\"", "'ranks' is \"2\""},
        fault{"\"ms\"", "\"s\"", "'unit' is \"s\""},
        fault{"\"chevron_profile\": 1", "\"chevron_profile\": 2", "'chevron_profile' is 2"},
        fault{"\"schedule\": \"ZB-H1\"", "\"schedule\": 7", "'schedule' is 7"},
        fault{"1.0,2.0", "1.0,-2", "'forward', entry 1, is -2"}, fault{"1.0,2.0", "1.0,\"x\"", "'forward', entry 1, is \"x\""},
        fault{"1.0,2.0", "1.0", "'forward' is no list with one entry for each of 2 stages"},
        fault{"\"communication\": [0.25]", "\"communication\": 0.25", "for each of 1 boundaries"},
        fault{"\"steps\": 3", "\"steps\": 3, \"extra\": 1", "'extra' is no key of a profile"},
        fault{"\"hidden\": null", "\"hidden\": 1.5", "'hidden' is 1.5, neither null nor a share"},
        fault{"}", "", "it is no JSON"}}) {
    auto const read = read_profile(replaced(text, f.what, f.by));
    CHECK_MESSAGE(read.problem.find(f.words) != std::string::npos, read.problem, " instead of ", f.words);
  }
  // A profile written by hand has costs alone, and counts as taken under no plan.
  std::string const costs =
      "{\"chevron_profile\": 1, \"unit\": \"ms\", \"stages\": 2, \"forward\": [1, 2], \"backward\": [null, null],"
      "\"backward_input\": [0, 2], \"backward_weight\": [2, 1], \"communication\": [null]";
  std::string const nulls =
      ", \"schedule\": null, \"ranks\": null, \"chunks\": null, \"micro_batches\": null, \"replicas\": null, \"steps\": null, "
      "\"pipeline\": null, \"step\": null, \"hidden\": null, \"layers\": null, \"static_bytes\": null";
  for (std::string const& rest : {std::string(), nulls}) {
    auto const read = read_profile(costs + rest + "}");
    CHECK(read.problem == "");
    CHECK(read.value.forward == std::vector<double>{1, 2});
    CHECK_FALSE(taken_under(read.value, expand(catalogue::zb_h1, {.ranks = 2, .micro_batches = 4})));
  }
  CHECK(read_profile(costs + ", \"pipeline\": -1}").problem.find("'pipeline' is -1") != std::string::npos);
  CHECK(read_profile("[1, 2]").problem == "it is no JSON object");
  CHECK(read_profile(std::string(largest_profile + 1, ' ')).problem ==
        "it has 1048577 bytes, and no profile has more than 1048576");
  CHECK(read_profile(std::string(largest_profile, '[')).problem == "it is no JSON");
  CHECK(read_profile(replaced(text, "\"ms\"", '"' + std::string(100000, 'x') + '"')).problem.size() < 200);
  CHECK(read_profile("{}").problem.find("'chevron_profile' is missing") != std::string::npos);
}

TEST_CASE("bytes of slices are read as they were written, and wrong ones refused by their words") {
  profile p = sample();
  p.static_bytes = {100, 100};
  p.activation_bytes = {30, 50};
  p.kept_bytes = {20, 25};
  p.input_bytes = {4, 6};
  p.slices = {{.activation = {10, 20}, .input = {1, 2}, .kept = {9, 10}},
              {.activation = {20, 30}, .input = {3, 4}, .kept = {11, 15}}};
  std::string const text = write_profile(p);
  auto const back = read_profile(text);
  CHECK(back.problem == "");
  CHECK(write_profile(back.value) == text);
  REQUIRE(back.value.slices.size() == 2);
  CHECK(back.value.slices[1].kept == std::vector<std::int64_t>{11, 15});
  std::string const first = "{\"activation_bytes\":[10,20],\"kept_bytes\":[9,10],\"input_bytes\":[1,2]}";
  struct fault {
    std::string by;
    char const* words;
  };
  for (fault const& f :
       {fault{"7", "'slices[0]' is 7, no object with lists of bytes"},
        fault{"{\"activation_bytes\":[10,20]}", "'slices[0].input_bytes' is missing"},
        fault{"{\"activation_bytes\":[10],\"input_bytes\":[1,2]}", "'slices[0].activation_bytes' is no list with one entry"},
        fault{"{\"activation_bytes\":[10,20],\"input_bytes\":[1,-2]}", "'slices[0].input_bytes', entry 1, is -2"},
        fault{"{\"activation_bytes\":[10,20],\"input_bytes\":[1,21]}",
              "'slices[0].input_bytes' of stage 1 is more than its 'activation_bytes'"},
        fault{"{\"activation_bytes\":[10,20],\"input_bytes\":[1,2],\"x\":1}", "'slices[0]' has another key than"}}) {
    auto const read = read_profile(replaced(text, first, f.by));
    CHECK_MESSAGE(read.problem.find(f.words) != std::string::npos, read.problem, " instead of ", f.words);
  }
  CHECK(read_profile(replaced(text, first + ",", "")).problem.find("no list with an object for each of 2 slices or more") !=
        std::string::npos);
  // Profiles without kept bytes have slices without them.
  for (slice_bytes& one : p.slices) one.kept.clear();
  CHECK(read_profile(write_profile(p)).value.slices[0].kept.empty());
}

TEST_CASE("bytes of slices from several ranks: each stage's, the largest over replicas; none if a stage lacks them") {
  measured_bytes first{.stage = 0, .fixed = 5, .activation = 30, .input = 3, .slices = {{10, -1, 1}, {20, -1, 2}}};
  measured_bytes other = first, last = first;
  other.slices[1].activation = 25;
  last.stage = 1;
  last.slices = {{7, 3, 1}, {9, 4, 1}};
  profile p;
  p.stages = 2;
  add_bytes(p, {text_of({first}), text_of({last}), text_of({other}), text_of({last})});
  REQUIRE(p.slices.size() == 2);
  CHECK(p.slices[0].activation == std::vector<std::int64_t>{10, 7});
  CHECK(p.slices[1].activation == std::vector<std::int64_t>{25, 9});
  CHECK(p.slices[1].input == std::vector<std::int64_t>{2, 1});
  CHECK(p.slices[0].kept.empty());  // stage 0 was not split
  CHECK(p.activation_bytes == std::vector<std::int64_t>{30, 30});
  last.slices.clear();
  add_bytes(p, {text_of({first}), text_of({last})});
  CHECK(p.slices.empty());
}
