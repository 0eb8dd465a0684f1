// Fidelity: stages that sleep instead of compute, so that any number of ranks fits any machine. The measured step time against
// the prediction from the plan and the costs that were measured in the same run: the difference is time of the executor and of
// the transport. With a synchronous optimizer a step is predicted to take the plan's makespan, with a post-validated one the time
// that each of many steps back to back adds. The ideal is the same from the slept times: the measured costs beyond these
// are LibTorch's.
//
//   bench-sleep       all schedules, threads and Gloo, both optimizers: one line each, exit 1 if any is above --limit
//   bench-sleep --schedule NAME --backend threads|gloo
//   bench-sleep --backend gloo --replicas 2 --parameters 4000000    and how much of the replicas' sums is hidden
//   bench-sleep --slow-link 1 --latency 20 --microbatches 32    over a link as slow as a forward: 1F1B, ZB-H1, both with slack
//   bench-sleep --schedule Seq1F1B --slices 4 --attention 0.5 --message-bytes 16384    slices that take equal time
//   bench-sleep --schedule Interleaved1F1B --replicas 2 --gather 10    gathers of a sharded optimizer's parameters, 10 ms a stage
//   bench-sleep --jitter 30    stages whose times vary
//
// A slow link holds messages back for so many milliseconds, and for their bytes by its bandwidth, one after the other; the
// prediction has the same. Its difference from the measured step is the error of the simulation of links.
//
// Times that vary are log-normal, with the fixed times as means. Both kinds of run draw the same times for the same work, in
// turns.
//
// With a synchronous optimizer sums are hidden as far as they do not make the step longer: the time of all sums alone, compared
// with the time from the step's last gradient to the end of the last sum. The sum of that last gradient cannot be hidden.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>

#include <chevron/jobs/run_main.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/prove/steps.hpp>
#include <chevron/run.hpp>
#include <chevron/schedule.hpp>
#include <chevron/tools/profile/trace_window.hpp>

#include "../../tests/support/slow_links.hpp"
#include "job.hpp"
#include "sleeping.hpp"

namespace {

struct options {
  std::string schedule;
  std::string backend;
  std::string optimizer;
  int ranks = 4;
  int micro_batches = 8;
  int slices = 1;
  double attention = 0;  ///< share of the time that goes with the square of the length, of slices
  int replicas = 1;
  long parameters = 1;  ///< of a stage
  int steps = 7;
  double milliseconds = 20;
  double limit = 0;
  double jitter = 0;         ///< per cent
  int slow_link = -1;        ///< between this rank and the next; -1: none
  double latency = 0;        ///< there, in milliseconds
  double bandwidth = 0;      ///< there, in bytes a second; 0: any
  long message_bytes = 16;   ///< of a microbatch's activations
  double gather = 0;         ///< of a stage's parameters over the replicas, in milliseconds; 0: the optimizer is not sharded
  int together = 1;
};

/// The measurements of all ranks: costs of stages; for each step the first action's start and the last action's end, on any rank.
struct measured {
  chevron::profiled_costs costs;
  std::vector<double> starts, ends;
  double sum_alone = 0;  ///< seconds that the replicas' sums take when nothing else happens: median, of the slowest rank
  double sum_shown = 0;  ///< seconds from a step's last gradient to its last sum: median
};

/// A rank's times of a step.
struct noted {
  double start, end;  ///< of its first and its last action
  double summed;      ///< when the replicas' sums were there
};

measured run(options const& wanted, bool post_validation, chevron::proved_program const& program, chevron::transport& comm) {
  chevron::plan_view const plan = program.view().plan;
  double const seconds = wanted.milliseconds * 1e-3 / plan.size.chunks;
  auto const build = [&](int number) {
    bench::times::means const means{seconds, seconds, seconds};
    if (plan.size.slices > 1) {
      at::Tensor weight = at::ones({wanted.parameters});
      weight.requires_grad_(true);
      // The share of its sequence's time that a slice takes, in millionths.
      double const tokens = static_cast<double>(wanted.message_bytes / 4);
      auto const stage = std::make_shared<bench::times>(bench::times::by_length(means, 1e6, 0));
      auto const sleep = [weight, stage, tokens, attention = wanted.attention](at::Tensor x, at::Tensor start) {
        double const from = start.item<double>() / tokens, to = from + static_cast<double>(x.size(1)) / tokens;
        double const share = chevron::computation_factor(to, attention) - chevron::computation_factor(from, attention);
        return bench::sleep_in(x, weight, stage.get(), std::llround(share * 1e6));
      };
      return chevron::stage(sleep, {{"weight", weight}}).side_inputs({chevron::slice_start});
    }
    return bench::sleeping_stage({means, wanted.jitter / 100, number}, wanted.parameters);
  };
  chevron::trainer train({.program = program,
                          .transport = comm,
                          .stages = build,
                          .loss = [](at::Tensor y, at::Tensor) { return y.mean(); },
                          .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1)),
                          .options = {.shard = wanted.gather > 0 ? chevron::sharding::optimizer : chevron::sharding::nothing,
                                      .overlap_gather = wanted.gather > 0,
                                      .slice_cuts = chevron::slices_by_cost(wanted.attention),
                                      .post_validation = post_validation,
                                      .stable_steps = 0,
                                      .when_same_batch = chevron::same_batch::allow}});
  at::Tensor const batch = at::ones({wanted.micro_batches, wanted.message_bytes / 4});

  std::vector<at::Tensor> sums;
  for (int chunk = 0; chunk < plan.size.chunks; ++chunk) sums.push_back(at::zeros({wanted.parameters}));
  chevron::trace_window records;
  std::vector<noted> mine;
  for (int step = 0; step < wanted.steps; ++step) {
    double const taken = train.step({batch}, {batch}).seconds;
    if (step == 0) continue;  // shapes are learned and memory is set aside in the first step
    chevron::rank_trace const& record = train.last_trace();
    records.keep(record, taken);
    double const start = static_cast<double>(record.begin()) * 1e-9;
    // The optimizer's entry begins with the wait for the sums.
    auto const update = std::find_if(record.entries().begin(), record.entries().end(),
                                     [](chevron::trace_event const& r) { return r.op.kind == chevron::kind::optimizer_step; });
    double const waits_from = static_cast<double>(update->reached) * 1e-9;
    mine.push_back({start, start + record.span_seconds(), waits_from + train.last_sum_wait()});
  }
  train.synchronize();
  std::vector<double> alone;
  for (int i = 0; i < 5 && wanted.replicas > 1; ++i) {
    double const nothing = 0;
    std::vector<double> together(static_cast<std::size_t>(comm.topology().world()));
    comm.all_gather({&nothing, 1}, together);
    auto const from = chevron::now_ns();
    for (int chunk = 0; chunk < plan.size.chunks; ++chunk) comm.start_all_reduce(chunk, sums[static_cast<std::size_t>(chunk)]);
    for (int chunk = 0; chunk < plan.size.chunks; ++chunk) comm.wait_bucket(chunk);
    alone.push_back(static_cast<double>(chevron::now_ns() - from) * 1e-9);
  }

  std::vector<double> numbers{chevron::median(alone)};
  for (noted const& n : mine) numbers.insert(numbers.end(), {n.start, n.end, n.summed});
  int const world = comm.topology().world();
  std::vector<double> all(numbers.size() * static_cast<std::size_t>(world));
  comm.all_gather(numbers, all);

  measured out;
  chevron::all_steps const steps = chevron::steps_of(comm.all_gather_text(records.text()));
  out.costs = chevron::costs_of(chevron::profile_of(plan, steps), chevron::split_stages(plan));
  auto const of = [&](int rank) { return all.data() + static_cast<std::size_t>(rank) * numbers.size(); };
  for (int r = 0; r < world; ++r) out.sum_alone = std::max(out.sum_alone, *of(r));
  std::vector<double> shown;
  for (std::size_t step = 0; step < mine.size(); ++step) {
    noted whole{.start = of(0)[1 + 3 * step], .end = 0, .summed = 0};
    for (int r = 0; r < world; ++r) {
      double const* const theirs = of(r) + 1 + 3 * step;
      whole = {std::min(whole.start, theirs[0]), std::max(whole.end, theirs[1]), std::max(whole.summed, theirs[2])};
    }
    out.starts.push_back(whole.start);
    out.ends.push_back(whole.end);
    shown.push_back(whole.summed - whole.end);
  }
  out.sum_shown = chevron::median(shown);
  return out;
}

/// Prints the line of one run and says whether it is within the limit.
bool report(options const& wanted, bool post_validation, chevron::plan_view const& plan, measured const& got) {
  // Messages take no time in either, except over the link that is made slow, whose transfer time is under test.
  std::vector<double> transfer(static_cast<std::size_t>(got.costs.stages())), latency(transfer);
  for (int s = 0; s + 1 < plan.stages; ++s) {
    int const here = plan.rank_of[s], there = plan.rank_of[s + 1];
    if (std::min(here, there) != wanted.slow_link || std::max(here, there) != wanted.slow_link + 1) continue;
    auto const boundary = static_cast<std::size_t>(s);
    latency[boundary] = wanted.latency;
    if (wanted.bandwidth > 0) transfer[boundary] = 1e3 * static_cast<double>(wanted.message_bytes) / wanted.bandwidth;
  }
  auto const step_time = [&](chevron::cost_view costs) {
    costs.communication = transfer.data();
    costs.latency = latency.data();
    costs.communication_stride = costs.latency_stride = 1;
    costs.communication_occupies = chevron::occupies::wire;
    if (wanted.gather > 0) costs.unshard = &wanted.gather;
    return 1e-3 * (post_validation ? chevron::steady_step_time(plan, costs).most : chevron::makespan(plan, costs));
  };
  double const predicted = step_time({got.costs.forward.data, got.costs.backward_input.data, got.costs.backward_weight.data, 1});
  std::vector<double> const slept(static_cast<std::size_t>(got.costs.stages()),
                                  wanted.milliseconds / plan.size.chunks / plan.size.slices);
  std::vector<double> input = slept;
  input[0] = 0;  // the first stage's input needs no gradient
  double const ideal = step_time({slept.data(), input.data(), slept.data(), 1});
  // Without a barrier, a step takes from the end of the one before to its own.
  std::vector<double> steps;
  for (std::size_t i = post_validation ? 1 : 0; i < got.ends.size(); ++i) {
    steps.push_back(got.ends[i] - (post_validation ? got.ends[i - 1] : got.starts[i]));
  }
  double const taken = chevron::median(steps);
  double const ratio = taken / predicted;
  std::printf("%-22s %-8s %-15s %8.1f %10.1f %9.1f %10.3f %9.3f\n", wanted.schedule.c_str(), wanted.backend.c_str(),
              post_validation ? "post-validated" : "synchronous", ideal * 1e3, predicted * 1e3, taken * 1e3, ratio,
              taken / ideal);
  if (wanted.replicas > 1 && !post_validation) {
    std::printf("%22s sums of %.1f MB a rank take %.1f ms alone, and %.1f ms after the last gradient: %.0f %% hidden\n", "",
                static_cast<double>(wanted.parameters * plan.size.chunks) * 4e-6, got.sum_alone * 1e3, got.sum_shown * 1e3,
                100 * (1 - got.sum_shown / got.sum_alone));
  }
  std::fflush(stdout);
  return wanted.limit <= 0 || ratio <= wanted.limit;
}

int one(options const& wanted) {
  chevron::proved_program const program = bench::program_of(wanted.schedule, wanted.ranks, wanted.micro_batches, wanted.slices);
  slow_links::links links;
  if (wanted.slow_link >= 0) {
    std::chrono::nanoseconds const latency(static_cast<std::int64_t>(wanted.latency * 1e6));
    links[{wanted.slow_link, wanted.slow_link + 1}] = {latency, wanted.bandwidth};
  }
  // Without a slow link ranks use their transport as it is.
  auto const on_ranks = [&](auto const& rank) {
    bench::on_ranks(wanted.backend, wanted.ranks, wanted.replicas, [&](chevron::transport& comm) {
      if (links.empty() && !(wanted.gather > 0)) return rank(comm);
      slow_links::transport slowed(comm, links, std::chrono::nanoseconds(static_cast<std::int64_t>(wanted.gather * 1e6)));
      rank(static_cast<chevron::transport&>(slowed));
    });
  };
  bool good = true;
  on_ranks([&](chevron::transport& comm) {
    for (bool const post_validation : {false, true}) {
      if (!wanted.optimizer.empty() && post_validation != (wanted.optimizer == "post-validated")) continue;
      measured const got = run(wanted, post_validation, program, comm);
      if (comm.topology().global_rank == 0) good = report(wanted, post_validation, program.view().plan, got) && good;
    }
  });
  return good ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** values) {
    options wanted;
    CLI::App app("Sleeping stages: measured step time against the prediction from measured costs");
    app.add_option("--schedule", wanted.schedule, "one schedule (default: each of the catalogue)");
    app.add_option("--backend", wanted.backend, "threads or gloo (default: both)")->check(CLI::IsMember({"threads", "gloo"}));
    app.add_option("--optimizer", wanted.optimizer, "synchronous or post-validated (default: both)")
        ->check(CLI::IsMember({"synchronous", "post-validated"}));
    app.add_option("--ranks", wanted.ranks)->capture_default_str();
    app.add_option("--microbatches", wanted.micro_batches)->capture_default_str();
    auto* const slices =
        app.add_option("--slices", wanted.slices, "of each microbatch, with a schedule of slices")->capture_default_str();
    app.add_option("--attention", wanted.attention, "of slices: share of the time that goes with the square of the length")
        ->needs(slices);
    app.add_option("--replicas", wanted.replicas)->capture_default_str();
    app.add_option("--parameters", wanted.parameters, "of each stage, float32")->capture_default_str();
    app.add_option("--steps", wanted.steps, "the first is not counted, post-validated the second neither")
        ->check(CLI::Range(3, 100000))
        ->capture_default_str();
    app.add_option("--milliseconds", wanted.milliseconds, "of F, I and W each, per rank and microbatch")->capture_default_str();
    app.add_option("--limit", wanted.limit, "exit 1 when measured / predicted is above; 0: only report")->capture_default_str();
    app.add_option("--jitter", wanted.jitter, "how much stages' times vary, in per cent")->capture_default_str();
    app.add_option("--slow-link", wanted.slow_link, "make the link between this rank and the next slow")->type_name("RANK");
    app.add_option("--latency", wanted.latency, "of the slow link, in milliseconds")->capture_default_str();
    app.add_option("--bandwidth", wanted.bandwidth, "of the slow link, in bytes a second; 0: any")->capture_default_str();
    app.add_option("--message-bytes", wanted.message_bytes, "bytes that a stage sends for a microbatch")
        ->check(CLI::Range(4, 1 << 30))
        ->capture_default_str();
    app.add_option("--gather", wanted.gather,
                   "shard the optimizer over --replicas; each stage's parameters take so many milliseconds to gather, while the "
                   "next step begins")
        ->capture_default_str();
    app.add_option("--together", wanted.together, "so many runs at once: stages that sleep leave the cores to others")
        ->check(CLI::PositiveNumber)
        ->capture_default_str();
    int code = 0;
    if (!bench::parsed(app, count, values, code)) return code;
    if (wanted.gather > 0 && wanted.replicas < 2)
      throw chevron::usage_error("--gather is of shares that replicas have. Remedy: --replicas 2");
    if (!wanted.schedule.empty() && !wanted.backend.empty()) return one(wanted);

    // Each run in a program of its own: Gloo's ranks are forked before LibTorch has threads.
    std::printf("P=%d, M=%d, F = I = W = %g ms per rank\n%-22s %-8s %-15s %8s %10s %9s %10s %9s\n", wanted.ranks,
                wanted.micro_batches, wanted.milliseconds, "schedule", "backend", "optimizer", "ideal", "predicted", "measured",
                "/predicted", "/ideal");
    std::fflush(stdout);
    std::vector<std::string> schedules;
    if (!wanted.schedule.empty()) {
      schedules.push_back(wanted.schedule);
    } else if (wanted.slow_link >= 0) {
      std::vector<double> const each(static_cast<std::size_t>(wanted.ranks), wanted.milliseconds);
      std::vector<double> delay(each.size());
      delay.at(static_cast<std::size_t>(wanted.slow_link)) =
          wanted.latency + (wanted.bandwidth > 0 ? 1e3 * static_cast<double>(wanted.message_bytes) / wanted.bandwidth : 0);
      chevron::cost_view const costs{each.data(), each.data(), each.data(), 1, delay.data(), 1};
      for (char const* name : {"1F1B", "ZB-H1"}) {
        auto const needed = chevron::catalogue::slack_for(costs, wanted.ranks, name[0] == 'Z');
        schedules.emplace_back(name);
        schedules.emplace_back(chevron::catalogue::name_with_slack(name, needed.begin(), needed.end()));
      }
    } else {
      chevron::catalogue::for_each([&](auto const& schedule) { schedules.emplace_back(schedule.name); });
    }
    std::vector<std::string> commands;
    for (std::string const& schedule : schedules) {
      for (std::string const backend : {"threads", "gloo"}) {
        if (!wanted.backend.empty() && backend != wanted.backend) continue;
        std::string const command =
            std::string(values[0]) + " --schedule " + schedule + " --backend " + backend + " --ranks " +
            std::to_string(wanted.ranks) + " --microbatches " + std::to_string(wanted.micro_batches) +
            (wanted.slices > 1 ? " --slices " + std::to_string(wanted.slices) + " --attention " + std::to_string(wanted.attention)
                               : "") +
            " --replicas " + std::to_string(wanted.replicas) + " --parameters " + std::to_string(wanted.parameters) +
            " --steps " + std::to_string(wanted.steps) + " --milliseconds " + std::to_string(wanted.milliseconds) + " --limit " +
            std::to_string(wanted.limit) + " --jitter " + std::to_string(wanted.jitter) + " --slow-link " +
            std::to_string(wanted.slow_link) + " --latency " + std::to_string(wanted.latency) + " --bandwidth " +
            std::to_string(wanted.bandwidth) + " --message-bytes " + std::to_string(wanted.message_bytes) + " --gather " +
            std::to_string(wanted.gather) +
            (wanted.optimizer.empty() ? "" : " --optimizer " + wanted.optimizer);
        commands.push_back(command);
      }
    }
    std::atomic<std::size_t> next = 0;
    std::atomic<int> failures = 0;
    auto const run_some = [&] {
      for (std::size_t i = next++; i < commands.size(); i = next++) failures += std::system(commands[i].c_str()) != 0 ? 1 : 0;
    };
    {
      std::vector<std::jthread> others;
      for (int i = 1; i < wanted.together; ++i) others.emplace_back(run_some);
      run_some();
    }
    return failures == 0 ? 0 : 1;
  });
}
