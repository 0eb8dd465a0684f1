// Refused batches, evaluations and checkpoints between sliced steps. The steps around are those of a plain loop
// over slices, to the last bit.
// timeout: 400
#include "support/scratch_folder.hpp"
#include "support/sliced_model.hpp"

#include <chevron/checkpoint/checkpoint.hpp>

#include <doctest/doctest.h>

using namespace sliced_model;
using chevron::transport;
using small_model::adamw, small_model::mean_square, small_model::sgd;
namespace fs = std::filesystem;

namespace {

constexpr int micro_batches = 2, slices = 3;

chevron::stage build_both(int number) { return chevron::in_sequence({build_attention(number), build_recurrent(number)}); }

/// A batch or a total that a trainer refuses, and the words by which it does.
struct refusal {
  chevron::batch given;
  std::string words;
};
std::vector<refusal> refusals() {
  auto const of = [](std::int64_t samples, std::int64_t tokens) { return make_sequences(samples, tokens, 50); };
  auto const some = of(4, 7), shorter = of(4, 6), short_ones = of(4, 2), few = of(1, 7), five = of(5, 7);
  std::vector<refusal> out;
  out.push_back({{{some.input}, {shorter.target}}, "target 0 of microbatch 0 has 6 tokens (dimension 1) but input 0 has 7"});
  out.push_back({{{short_ones.input}, {short_ones.target}}, "have 2 tokens (dimension 1), too few for 3 slices"});
  out.push_back({{{few.input}, {few.target}}, "a batch of 1 samples cannot be cut into 2 microbatches"});
  out.push_back({{{some.input}, {five.target}}, "target 0 has 5 samples (dimension 0) but input 0 has 4"});
  out.push_back({{{some.input.select(1, 0).select(1, 0)}, {}}, "no input or target of microbatch 0 has a dimension of tokens"});
  out.push_back({{}, "a step needs at least one input or target tensor"});
  out.push_back({{{some.input}, {some.target}, {{"mask", at::ones({4, 5})}}}, "side input `mask` of microbatch 0 has 5 tokens"});
  return out;
}

/// Tries all of them. \param total as the good steps around are given
void try_refusals(chevron::trainer& train, bool accumulates, chevron::step_total const& total, complaints& wrong) {
  for (auto const& one : refusals()) {
    try {
      accumulates ? train.accumulate(one.given, total) : static_cast<void>(train.step(one.given, total));
      wrong.require(false, "nothing was thrown where this was expected: " + one.words);
    } catch (chevron::usage_error const& e) {
      wrong.require(std::string(e.what()).find(one.words) != std::string::npos,
                    std::string(e.what()) + " instead of " + one.words);
    }
  }
}

/// The plain loop's mean loss without a graph: recurrent layers have other kernels then.
double mean_without_graph(reference& whole, std::vector<sequences> const& parts, int count) {
  at::NoGradGuard const no_graph;
  std::vector<reference::unit> units;
  double counts = 0, sum = 0;
  for (sequences const& part : parts) {
    std::int64_t begin = 0;
    for (std::int64_t const end : equal_ends(part.input.size(1), count)) {
      units.push_back(whole.forward(part, begin, end, begin == 0 ? nullptr : &units.back().left, {}, {}, mean_square));
      begin = end;
    }
    counts += double(part.input.size(0));
  }
  for (auto const& one : units) sum += one.loss.item<double>() * (one.counts / counts);
  return sum;
}

void take_step(reference& whole) { sgd(whole.parameters())->step(); }

void compare(chevron::trainer& train, reference const& whole, double loss, std::string const& where, complaints& wrong) {
  wrong.require(loss == whole.loss, where + "loss " + std::to_string(loss) + " instead of " + std::to_string(whole.loss));
  compare_gradients(train, whole, where, wrong);
}

}  // namespace

TEST_CASE("sliced: batches that are refused leave no carry and no gradient behind") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1"}) {
    auto const plan = plan_of(name, {.ranks = 2, .micro_batches = micro_batches, .slices = slices});
    auto const program = chevron::lower(chevron::prove(plan));
    auto const first = make_sequences(4, 7, 1), second = make_sequences(3, 8, 2), third = make_sequences(5, 7, 3);
    reference one(plan.stages, build_both), two(plan.stages, build_both);
    one.run(plan, {parts_of(first, micro_batches)});
    two.run(plan, {parts_of(first, micro_batches)});
    take_step(two);
    two.run(plan, {parts_of(second, micro_batches)}, {.step = 1, .total = 8});
    two.run(plan, {parts_of(third, micro_batches)}, {.step = 1, .total = 8, .first = plan.size.units(), .adds = true});
    complaints wrong;
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(
          {.program = program, .transport = comm, .stages = build_both, .loss = mean_square, .optimizer = sgd, .options = {}});
      try_refusals(train, false, {}, wrong);
      auto const report = train.step(first.input, first.target);
      compare(train, one, report.loss, words_of(plan) + "first step, ", wrong);
      try_refusals(train, true, 8, wrong);
      train.accumulate(second.input, second.target, 8);
      try_refusals(train, true, 8, wrong);
      try_refusals(train, false, 8, wrong);
      try {
        train.step(third.input, third.target, 9);
        wrong.require(false, "another total was taken");
      } catch (chevron::usage_error const&) {
      }
      auto const next = train.step(third.input, third.target, 8);
      compare(train, two, next.loss, words_of(plan) + "second step, ", wrong);
    });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("sliced: cuts that are refused once, and steps that do not wait for each other around a refused batch") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1"}) {
    auto const plan = plan_of(name, {.ranks = 2, .micro_batches = micro_batches, .slices = slices});
    auto const program = chevron::lower(chevron::prove(plan));
    reference whole(plan.stages, build_both);
    std::vector<double> expected;
    for (int step = 0; step < 4; ++step) {
      whole.run(plan, {parts_of(make_sequences(3, 8, step), micro_batches)}, {.step = step});
      expected.push_back(whole.loss);
      take_step(whole);
    }
    for (bool const ahead : {false, true}) {
      complaints wrong;
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        std::vector<double> losses;
        bool spoiled = false;
        chevron::trainer_options options{.slice_cuts = [&](chevron::batch const&, std::int64_t tokens, int count) {
          auto ends = equal_ends(tokens, count);
          ends.pop_back();
          if (spoiled) ends.back() = tokens;
          return ends;
        }};
        options.post_validation = ahead;
        options.stable_steps = 0;
        options.on_report = [&](chevron::step_report const& report) { losses.push_back(report.loss); };
        chevron::trainer train(small_model::setup(program, comm, build_both, options));
        for (int step = 0; step < 4; ++step) {
          auto const data = make_sequences(3, 8, step);
          spoiled = true;
          try {
            train.step(data.input, data.target);
            wrong.require(false, "boundaries at the end were taken");
          } catch (chevron::usage_error const& e) {
            wrong.require(std::string(e.what()).find("slice_cuts gives [3, 8] for microbatch 0") != std::string::npos, e.what());
          }
          spoiled = false;
          train.step(data.input, data.target);
        }
        train.synchronize();
        wrong.require(losses == expected, words_of(plan) + "losses");
      });
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    }
  }
}

TEST_CASE("sliced: a missing target") {
  at::set_num_threads(1);
  auto const plan = plan_of("Seq1F1B", {.ranks = 2, .micro_batches = micro_batches, .slices = slices});
  auto const data = make_sequences(4, 7, 1);
  std::string words;
  try {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(plan, comm, build_both, {}));
      train.step(chevron::batch{{data.input}, {}});
    });
  } catch (chevron::usage_error const& e) {
    words = e.what();
  }
  INFO(words);
  CHECK(words.find("rank 1, step 0, 1F0") == 0);
  CHECK(words.find("the loss function takes 2 tensors, and 1 was passed: 1 output of the last stage, no targets. Remedy: the "
                   "batch's targets") != std::string::npos);
}

TEST_CASE("sliced: evaluations between batches that are accumulated, and between steps") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1"}) {
    auto const plan = plan_of(name, {.ranks = 2, .micro_batches = micro_batches, .slices = slices});
    auto const program = chevron::lower(chevron::prove(plan));
    auto const first = make_sequences(4, 7, 1), second = make_sequences(3, 8, 2), held_out = make_sequences(3, 9, 3);
    reference whole(plan.stages, build_both);
    auto const evaluated = [&](int count, int of_slices) {
      auto const other = plan_of("GPipe", {.ranks = 2, .micro_batches = count, .slices = of_slices});
      reference copy(other.stages, build_both);
      auto const from = whole.parameters(), to = copy.parameters();
      for (std::size_t i = 0; i < to.size(); ++i) to[i].detach().copy_(from[i]);
      return mean_without_graph(copy, parts_of(held_out, count), of_slices);
    };
    struct evaluation {
      int micro_batches, slices;
      double before = 0, after = 0;
    };
    std::vector<evaluation> kinds{{2, 3}, {1, 3}, {3, 2}, {2, 1}};
    for (auto& one : kinds) one.before = evaluated(one.micro_batches, one.slices);
    whole.run(plan, {parts_of(first, micro_batches)}, {.total = 7});
    whole.run(plan, {parts_of(second, micro_batches)}, {.total = 7, .first = plan.size.units(), .adds = true});
    take_step(whole);
    for (auto& one : kinds) one.after = evaluated(one.micro_batches, one.slices);
    reference next(plan.stages, build_both);
    {
      auto const from = whole.parameters(), to = next.parameters();
      for (std::size_t i = 0; i < to.size(); ++i) to[i].detach().copy_(from[i]);
    }
    next.run(plan, {parts_of(second, micro_batches)}, {.step = 1});
    for (bool const ahead : {false, true}) {
      complaints wrong;
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        chevron::trainer_options options{};
        options.post_validation = ahead;
        options.stable_steps = 0;
        chevron::trainer train(small_model::setup(program, comm, build_both, options));
        std::vector<std::unique_ptr<chevron::evaluator>> all;
        for (auto const& one : kinds) {
          auto const forwards =
              chevron::forward_part(plan_of("GPipe", {.ranks = 2, .micro_batches = one.micro_batches, .slices = one.slices}));
          all.push_back(std::make_unique<chevron::evaluator>(chevron::lower(chevron::prove(forwards)), train));
        }
        chevron::evaluator own(train);
        auto const evaluate = [&](bool after, std::string const& where) {
          for (std::size_t i = 0; i < kinds.size(); ++i) {
            double const expected = after ? kinds[i].after : kinds[i].before;
            std::string const which = where + "evaluation " + std::to_string(i);
            wrong.require(all[i]->loss(held_out.input, held_out.target) == expected, which);
          }
          wrong.require(own.loss(held_out.input, held_out.target) == (after ? kinds[0].after : kinds[0].before), where + "own");
          own.outputs(held_out.input);
        };
        evaluate(false, "before, ");
        train.accumulate(first.input, first.target, 7);
        evaluate(false, "between, ");
        auto const report = train.step(second.input, second.target, 7);
        train.synchronize();
        if (!ahead) compare(train, whole, report.loss, words_of(plan) + "accumulated, ", wrong);
        evaluate(true, "after, ");
        auto report_of_next = train.step(second.input, second.target);
        if (ahead) report_of_next = train.synchronize();
        wrong.require(report_of_next.loss == next.loss, words_of(plan) + "the step behind evaluations");
        if (!ahead) compare(train, next, report_of_next.loss, words_of(plan) + "behind, ", wrong);
      });
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    }
  }
}

namespace {

chevron::stage build_dropping_recurrent(int number) {
  at::manual_seed(800 + number);
  return chevron::in_sequence(
      {build_recurrent(number), torch::nn::Sequential(torch::nn::Linear(width, width), torch::nn::Dropout(0.2))});
}

sequences data_of(long step) { return make_sequences(4, 7 + step % 3, static_cast<int>(step)); }

/// A training of three steps, goes on from a folder and saves to another.
std::vector<double> trained(chevron::plan const& plan, fs::path const& from, fs::path const& to, bool ahead,
                            tensors* ends = nullptr) {
  std::vector<double> losses;
  std::vector<tensors> by_rank(static_cast<std::size_t>(plan.size.ranks));
  chevron::run_threads({.pipeline_ranks = plan.size.ranks}, [&](transport& comm) {
    chevron::trainer_options options{};
    options.post_validation = ahead;
    options.stable_steps = 0;
    int const rank = comm.topology().pipeline_rank();
    options.on_report = [&](chevron::step_report const& report) {
      if (rank == 0) losses.push_back(report.loss);
    };
    chevron::trainer train(small_model::setup(plan, comm, build_dropping_recurrent, options, adamw));
    if (!from.empty()) chevron::load_checkpoint(train, from);
    for (long const end = train.next_step() + 3; train.next_step() < end;) {
      auto const data = data_of(train.next_step());
      train.step(data.input, data.target);
    }
    train.synchronize();
    if (!to.empty()) chevron::save_checkpoint(train, to);
    for (auto& s : train.stages()) {
      for (auto& p : s.parameters()) by_rank[static_cast<std::size_t>(rank)].push_back(p.value.detach().clone());
    }
  });
  for (auto const& of_rank : by_rank) {
    if (ends != nullptr) ends->insert(ends->end(), of_rank.begin(), of_rank.end());
  }
  return losses;
}

}  // namespace

TEST_CASE("sliced: training that goes on from a checkpoint, in as many slices and in others") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1"}) {
    auto const of = [&](int k) { return plan_of(name, {.ranks = 2, .micro_batches = micro_batches, .slices = k}); };
    scratch_folder const folder;
    for (bool const ahead : {false, true}) {
      fs::path const saved = fs::path(folder.path) / (ahead ? "ahead" : "plain");
      auto const begins = trained(of(3), {}, saved, ahead);
      for (int const k : {3, 2, 1}) {
        reference whole(2, build_dropping_recurrent);
        auto const optimizer = adamw(whole.parameters());
        std::vector<double> expected;
        for (long step = 0; step < 6; ++step) {
          whole.run(of(step < 3 ? 3 : k), {parts_of(data_of(step), micro_batches)}, {.step = step});
          expected.push_back(whole.loss);
          optimizer->step();
        }
        tensors ends;
        auto losses = begins;
        auto const more = trained(of(k), saved, {}, ahead, &ends);
        losses.insert(losses.end(), more.begin(), more.end());
        CAPTURE(name);
        CAPTURE(k);
        CHECK(losses == expected);
        auto const plain = whole.parameters();
        REQUIRE(ends.size() == plain.size());
        int different = 0;
        for (std::size_t i = 0; i < ends.size(); ++i) different += at::equal(ends[i], plain[i]) ? 0 : 1;
        CHECK(different == 0);
      }
    }
  }
}

// 1.8 and 1.2 of 3 samples, say, do not add up to 3 in every rounding: the total is that of whole samples, told or not.
TEST_CASE("sliced: a step and an evaluation without a total are those with the number of samples, to the last bit") {
  at::set_num_threads(1);
  auto const plan = plan_of("Seq1F1B", {.ranks = 2, .micro_batches = micro_batches, .slices = slices});
  auto const program = chevron::lower(chevron::prove(plan));
  int inexact = 0;
  complaints wrong;
  for (int samples = 2; samples <= 7; ++samples) {
    for (int tokens = 5; tokens <= 11; ++tokens) {
      double sum = 0;
      for (int m = 0; m < micro_batches; ++m) {
        std::int64_t begin = 0;
        for (std::int64_t const end : equal_ends(tokens, slices)) {
          sum += double(chevron::samples_of(samples, micro_batches, m).count) * (double(end - begin) / tokens);
          begin = end;
        }
      }
      if (sum == samples) continue;
      ++inexact;
      auto const data = make_sequences(samples, tokens, 1);
      std::string const where = std::to_string(samples) + " samples of " + std::to_string(tokens) + " tokens, ";
      reference whole(plan.stages, build_both);
      double const evaluated = mean_without_graph(whole, parts_of(data, micro_batches), slices);
      whole.run(plan, {parts_of(data, micro_batches)}, {.total = double(samples)});
      for (double const told : {0.0, double(samples)}) {
        chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
          chevron::trainer train(small_model::setup(program, comm, build_both, {}));
          wrong.require(chevron::evaluator(train).loss(data.input, data.target) == evaluated, where + "evaluation");
          auto const report = train.step(data.input, data.target, told);
          compare(train, whole, report.loss, where + "total " + std::to_string(told) + ", ", wrong);
        });
      }
    }
  }
  CHECK(inexact >= 5);
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}
