// Steps with microbatches of unequal length, on stages that sleep in proportion to the length: the time that `length_schedule` saves,
// the time that an order of the data saves, and the errors of the predictions. The table of docs/guides/auto.md:
//
//   bench-length_steps                                  ZB-H1 and ZBVZeroBubble, four ranks, sixteen microbatches, threads
//   bench-length_steps --spread 0.3 --attention 0       other lengths
//   bench-length_steps --backend gloo --schedule 1F1B
//
// The same batches go through each of four runs: as they come or with the longest in the middle, under the catalogue's schedule or under
// a plan for each step. `predicted` is, for a run that plans, the planner's time of the step, from ten measured steps and the share of
// attention found in them; for other runs, the simulated time with the slept times. `whole` includes planning and the new program.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/ones.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>

#include <chevron/jobs/run_main.hpp>
#include <chevron/plan/gradient_order.hpp>
#include <chevron/plan/lengths.hpp>
#include <chevron/run.hpp>
#include <chevron/schedule.hpp>
#include <chevron/tools/replan/length_schedule.hpp>

#include "job.hpp"
#include "sampled_lengths.hpp"
#include "sleeping.hpp"

namespace {

struct options {
  std::string schedule, backend = "threads";
  int ranks = 4, micro_batches = 16, steps = 30;
  double milliseconds = 3, spread = .7, attention = .2;
};

/// The longest in the middle, the shortest at both ends.
std::vector<double> longest_in_the_middle(std::vector<double> lengths) {
  std::sort(lengths.begin(), lengths.end());
  std::vector<double> out(lengths.size());
  std::size_t front = 0, back = lengths.size();
  for (std::size_t i = 0; i < lengths.size(); ++i) out[i % 2 == 0 ? front++ : --back] = lengths[i];
  return out;
}

/// Means over steps, in seconds.
struct outcome {
  double predicted = 0, measured = 0, whole = 0;
  double attention = 0;  ///< as it was found
  double changed = 0;    ///< share of the steps that began with a new program
};

outcome run(options const& wanted, bool ordered, bool planned, chevron::transport& comm) {
  chevron::plan const plan = chevron::in_ascending_order(
      chevron::catalogue::make_plan(wanted.schedule, {.ranks = wanted.ranks, .micro_batches = wanted.micro_batches}));
  double const seconds = wanted.milliseconds * 1e-3 / plan.size.chunks;
  chevron::trainer train(
      {.program = chevron::lower(chevron::prove(plan)),
       .transport = comm,
       .stages =
           [&](int) {
             return bench::sleeping_stage(bench::times::by_length({{seconds, seconds, seconds}}, 1000, wanted.attention));
           },
       .loss = [](at::Tensor y, at::Tensor) { return y.mean(); },
       .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1))});
  std::optional<chevron::length_schedule> planner;
  if (planned) planner.emplace(train);

  // The times that stages sleep, for the prediction of the fixed plan.
  std::vector<double> const slept(static_cast<std::size_t>(plan.stages), seconds);
  std::vector<double> input = slept, transfer(slept.size(), 0.);
  input[0] = 0;  // the first stage's input needs no gradient
  outcome out;
  std::vector<double> mine;  // of each step that counts, when its first action began and its last one ended
  int const before = 12;     // of which a planner measures ten
  std::int64_t from = 0;
  for (int step = 0; step < before + wanted.steps; ++step) {
    if (step == before) from = chevron::now_ns();
    std::vector<double> lengths =
        bench::sampled_lengths(wanted.micro_batches, wanted.spread, static_cast<std::uint64_t>(step) + 1);
    if (ordered) lengths = longest_in_the_middle(std::move(lengths));
    auto const news = planner ? planner->before_step(lengths) : std::nullopt;
    std::vector<chevron::batch> parts;
    for (double const length : lengths) {
      at::Tensor const one = at::ones({1, static_cast<std::int64_t>(length)});
      parts.push_back({{one}, {one}});
    }
    train.step(parts);
    if (step < before) continue;
    if (news) {
      out.predicted += 1e-3 * (news->changed ? news->found : news->running);
      out.changed += news->changed ? 1 : 0;
      out.attention = news->attention;
    } else {
      chevron::length_factors const factors = chevron::factors_of(lengths, 1000, wanted.attention);
      chevron::cost_view costs{slept.data(), input.data(), slept.data(), 1, transfer.data(), 1};
      costs.lengths = factors.view();
      out.predicted += chevron::makespan(plan, costs);
    }
    double const start = static_cast<double>(train.last_trace().begin()) * 1e-9;
    mine.insert(mine.end(), {start, start + train.last_trace().span_seconds()});
  }
  out.whole = static_cast<double>(chevron::now_ns() - from) * 1e-9;
  std::vector<double> all(mine.size() * static_cast<std::size_t>(comm.topology().world()));
  comm.all_gather(mine, all);
  for (std::size_t i = 0; i < mine.size(); i += 2) {
    double start = mine[i], end = mine[i + 1];
    for (std::size_t r = 0; r < all.size(); r += mine.size()) {
      start = std::min(start, all[r + i]);
      end = std::max(end, all[r + i + 1]);
    }
    out.measured += end - start;
  }
  for (double* const each : {&out.predicted, &out.measured, &out.whole, &out.changed}) *each /= wanted.steps;
  return out;
}

void one(options const& wanted) {
  bench::on_ranks(wanted.backend, wanted.ranks, 1, [&](chevron::transport& comm) {
    double fixed = 0;
    for (bool const ordered : {false, true}) {
      for (bool const planned : {false, true}) {
        outcome const got = run(wanted, ordered, planned, comm);
        if (comm.topology().global_rank != 0) continue;
        if (fixed == 0) fixed = got.whole;
        std::printf("%-14s %-8s %-22s %-8s %9.1f %9.1f %7.3f %8.1f %+8.1f %%", wanted.schedule.c_str(), wanted.backend.c_str(),
                    ordered ? "longest in the middle" : "as they come", planned ? "planned" : "fixed", got.predicted * 1e3,
                    got.measured * 1e3, got.measured / got.predicted, got.whole * 1e3, 100 * (got.whole / fixed - 1));
        if (planned) std::printf("   attention %.2f, %.0f %% of the steps changed", got.attention, 100 * got.changed);
        std::printf("\n");
        std::fflush(stdout);
      }
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** values) {
    options wanted;
    CLI::App app("Steps with microbatches of unequal length: the catalogue's schedule and a plan for each step");
    app.add_option("--schedule", wanted.schedule, "one schedule (default: ZB-H1 and ZBVZeroBubble)");
    app.add_option("--backend", wanted.backend)->check(CLI::IsMember({"threads", "gloo"}))->capture_default_str();
    app.add_option("--ranks", wanted.ranks)->capture_default_str();
    app.add_option("--microbatches", wanted.micro_batches)->capture_default_str();
    app.add_option("--steps", wanted.steps, "that count, after twelve that are measured")->check(CLI::PositiveNumber)->capture_default_str();
    app.add_option("--milliseconds", wanted.milliseconds, "of F, I and W each, per rank and microbatch of 1000 tokens")->capture_default_str();
    app.add_option("--spread", wanted.spread, "standard deviation of the logarithm of a length")->capture_default_str();
    app.add_option("--attention", wanted.attention, "share of the times that goes with the square of a length")->capture_default_str();
    int code = 0;
    if (!bench::parsed(app, count, values, code)) return code;
    if (!wanted.schedule.empty()) {
      one(wanted);
      return 0;
    }
    std::printf("P=%d, M=%d, F = I = W = %g ms per rank and 1000 tokens; ms a step\n%-14s %-8s %-22s %-8s %9s %9s %7s %8s %10s\n", wanted.ranks,
                wanted.micro_batches, wanted.milliseconds, "schedule", "backend", "microbatches", "plan", "predicted", "measured", "ratio",
                "whole", "gain");
    std::fflush(stdout);
    // Each in a program of its own: Gloo's ranks are forked before LibTorch has threads.
    int failures = 0;
    for (std::string const schedule : {"ZB-H1", "ZBVZeroBubble"}) {
      std::string const command = std::string(values[0]) + " --schedule " + schedule + " --backend " + wanted.backend + " --ranks " +
                                  std::to_string(wanted.ranks) + " --microbatches " + std::to_string(wanted.micro_batches) + " --steps " +
                                  std::to_string(wanted.steps) + " --milliseconds " + std::to_string(wanted.milliseconds) + " --spread " +
                                  std::to_string(wanted.spread) + " --attention " + std::to_string(wanted.attention);
      failures += std::system(command.c_str()) != 0 ? 1 : 0;
    }
    return failures == 0 ? 0 : 1;
  });
}
