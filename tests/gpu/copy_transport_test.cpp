// Ranks whose messages are copies and flags in memory: processes, which share the first GPU and run all of a step's streams at
// the same time.
#include "gpus.hpp"
#include "training.hpp"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <torch/optim/adamw.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/multiprocess.hpp>
#include <chevron/transports/gpu/copy_transport.hpp>
#include <chevron/transports/gpu/cuda_devices.hpp>
#include <chevron/transports/gpu/cuda_graph.hpp>

#include "support/subprocess.hpp"

using training::outcome;

namespace {

using namespace std::chrono_literals;

constexpr int samples = 24, steps = 6, pipeline_ranks = 2;
/// A message is several pieces of this size, and goes round in the receiver's room.
constexpr chevron::copy_limits small{.edge_piece = 512, .edge_pieces = 3, .sum_piece = 4096, .first = 0xffffff00};

/// Jobs of processes that train one after the other.
struct order {
  int replicas = 1;
  bool graphs = false;
  std::string fault = "none";  // "throw" or "nap", of rank 1 before step 3
  std::vector<std::string> schedules;

  std::string text() const {
    std::string out = std::to_string(replicas) + ' ' + std::to_string(graphs) + ' ' + fault;
    for (std::string const& each : schedules) out += ' ' + each;
    return out;
  }
  static order read(char const* text) {
    order out;
    std::istringstream from(text);
    from >> out.replicas >> out.graphs >> out.fault;
    for (std::string each; from >> each;) out.schedules.push_back(each);
    return out;
  }
};

/// \param at called before each step
void train_on(
    chevron::transport& comm, at::Device device, std::string const& schedule, outcome& out, bool graphs = false,
    std::function<void(int)> const& at = [](int) {}) {
  auto const program = chevron::lower(
      chevron::prove(chevron::catalogue::make_plan(schedule, {.ranks = comm.topology().pipeline_ranks, .micro_batches = 6})));
  int const stages = program.view().plan.stages;
  chevron::trainer_options options{.clip_grad_norm = 1, .device = device};
  options.on_report = [&](chevron::step_report const& report) { out.add(comm, report); };
  if (graphs) options.graphs = chevron::cuda_graphs();
  chevron::trainer train({.program = program,
                          .transport = comm,
                          .stages = [&](int s) { return training::build_stage(s, stages, device); },
                          .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
                          .optimizer = chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3)),
                          .options = options});
  at::Tensor const all = at::arange(2 * samples * training::width, at::kFloat).view({2 * samples, training::width}).sin();
  for (int step = 0; step < steps; ++step) {
    at(step);
    train.step({all.narrow(0, step, samples)}, {all.narrow(0, samples - step, samples).cos()});
    out.add(train, comm);
  }
  train.synchronize();
}

/// Rank 0's losses and norms of all steps, to the last bit.
std::string line_of(std::string const& schedule, outcome const& out) {
  std::string line = "trained " + schedule + ":";
  for (auto const* const numbers : {&out.losses, &out.norms}) {
    for (double const each : *numbers) {
      char digits[40];
      std::snprintf(digits, sizeof digits, " %a", each);
      line += digits;
    }
  }
  return line;
}

int run_job(order const& asked) {
  return chevron::run_main(0, nullptr, [&](int, char**) {
    chevron::job const rank = chevron::launch({.nproc = pipeline_ranks * asked.replicas});
    chevron::copy_transport comm(rank.topology(pipeline_ranks, asked.replicas), rank, {.share_gpus = true, .channels = small});
    comm.deadline(60s);
    for (std::string const& schedule : asked.schedules) {
      outcome out;
      train_on(comm, comm.device(), schedule, out, asked.graphs, [&](int step) {
        if (asked.fault != "none" && step == 2) comm.deadline(3s);  // the first steps of processes on one GPU take seconds
        if (rank.rank != 1 || step != 3) return;
        if (asked.fault == "throw") throw std::runtime_error("no such file");
        if (asked.fault == "nap") std::this_thread::sleep_for(5s);
      });
      if (rank.rank != 0) continue;
      std::fprintf(stderr, "%s\n", line_of(schedule, out).c_str());
      if (asked.graphs) std::fprintf(stderr, "why no graphs: (%s)\n", out.why_not[0].back().c_str());
    }
    comm.close();
    return 0;
  });
}

subprocess::program_end end_of(order const& asked) {
  return subprocess::started(
             "jobs of processes that share a GPU",
             {"CHEVRON_COPIES_JOB=" + asked.text(), "CUDA_VISIBLE_DEVICES=0", "GPU_DOUBLE_COUNT=1", "OMP_NUM_THREADS=1"})
      .wait(120s);
}

/// The same job of ranks that are threads, whose messages the host hands over.
std::string line_by_threads(std::string const& schedule, int replicas = 1) {
  outcome out;
  chevron::run_threads({.pipeline_ranks = pipeline_ranks, .replicas = replicas},
                       [&](chevron::transport& comm) { train_on(comm, training::gpu(0), schedule, out); });
  return line_of(schedule, out);
}

void check_as_by_threads(order const& asked) {
  auto const end = end_of(asked);
  INFO(end.output);
  CHECK(end.code == 0);
  for (std::string const& schedule : asked.schedules) CHECK(end.lines_with(line_by_threads(schedule, asked.replicas)) == 1);
  if (asked.graphs) CHECK(end.lines_with("why no graphs: ()") == static_cast<int>(asked.schedules.size()));
}

}  // namespace

TEST_CASE("jobs of processes that share a GPU" * doctest::skip()) {
  char const* const asked = std::getenv("CHEVRON_COPIES_JOB");
  if (asked == nullptr) return;
  int const code = run_job(order::read(asked));
  std::fflush(nullptr);
  ::_exit(code);
}

TEST_CASE("every schedule trains over copies as over threads, to the last bit") {
  if (!gpus::at_least(1)) return;
  order asked;
  chevron::catalogue::for_each([&](auto const& one) { asked.schedules.emplace_back(one.name); });
  check_as_by_threads(asked);
}

TEST_CASE("replicas add their gradients by copies in the order of ranks") {
  if (!gpus::at_least(1)) return;
  check_as_by_threads({.replicas = 2, .schedules = {"1F1B"}});
}

TEST_CASE("graphs between messages by copies") {
  if (!gpus::at_least(1)) return;
  check_as_by_threads({.graphs = true, .schedules = {"1F1B", "ZBVZeroBubble", "DualPipeV"}});
}

TEST_CASE("a rank that throws, or does not answer, ends the streams of all, which wait for flags") {
  if (!gpus::at_least(1)) return;
  for (std::string const fault : {"throw", "nap"}) {
    CAPTURE(fault);
    auto const begun = std::chrono::steady_clock::now();
    auto const end = end_of({.fault = fault, .schedules = {"1F1B"}});
    INFO(end.output);
    CHECK(std::chrono::steady_clock::now() - begun < 60s);
    CHECK(end.code != 0);
    CHECK(end.lines_with(fault == "throw" ? "no such file" : "rank 1 did not answer") > 0);
  }
}
