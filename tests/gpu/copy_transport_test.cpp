// Ranks whose messages are copies and flags in memory: on one GPU, too, where all of a step's streams then run at the same time.
#include "gpus.hpp"
#include "training.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include <torch/optim/adamw.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/multiprocess.hpp>
#include <chevron/run/cuda/copy_transport.hpp>
#include <chevron/run/cuda/cuda_devices.hpp>
#include <chevron/run/cuda/cuda_graph.hpp>

#include "support/subprocess.hpp"

using training::compare;
using training::outcome;

namespace {

using namespace std::chrono_literals;

constexpr int samples = 24, steps = 6;
/// A message is several pieces of this size, and goes round in the receiver's room.
constexpr chevron::copy_limits small{.edge_piece = 512, .edge_pieces = 3, .sum_piece = 4096, .first = 0xffffff00};

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
  out.add(train, stages);
}

/// Ranks that are threads, on as many GPUs as there are. \returns what each threw
template <class Body>
std::vector<std::string> over_copies(int ranks, int replicas, std::chrono::milliseconds deadline, Body const& body) {
  int const gpus = chevron::look_for_cuda_devices().count;
  return thread_ranks::said(
      thread_ranks::run(ranks, replicas, [&](chevron::topology const& where, auto const& store, auto const& watch) {
        at::Device const mine = training::gpu(where.global_rank % gpus);
        c10::cuda::CUDAGuard const here(mine);
        chevron::copy_transport comm(where, store, watch, 60s, mine, small);
        comm.deadline(deadline);
        body(comm, mine);
        comm.close();
      }));
}
void check_quiet(std::vector<std::string> const& said) {
  for (std::string const& each : said) CHECK(each == "");
}

}  // namespace

TEST_CASE("every schedule trains over copies as over threads") {
  if (!gpus::at_least(1)) return;
  chevron::catalogue::for_each([&](auto const& one) {
    std::string const name(one.name);
    outcome by_copies, by_threads;
    check_quiet(
        over_copies(2, 1, 60s, [&](chevron::transport& comm, at::Device mine) { train_on(comm, mine, name, by_copies); }));
    chevron::run_threads({.pipeline_ranks = 2},
                         [&](chevron::transport& comm) { train_on(comm, training::gpu(0), name, by_threads); });
    compare(by_copies, by_threads, name);
  });
}

TEST_CASE("replicas add their gradients by copies in the order of ranks") {
  if (!gpus::at_least(1)) return;
  outcome by_copies, by_threads;
  check_quiet(
      over_copies(2, 2, 60s, [&](chevron::transport& comm, at::Device mine) { train_on(comm, mine, "1F1B", by_copies); }));
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2},
                       [&](chevron::transport& comm) { train_on(comm, training::gpu(0), "1F1B", by_threads); });
  compare(by_copies, by_threads, "2 × 2");
}

TEST_CASE("graphs between messages by copies") {
  if (!gpus::at_least(1)) return;
  for (char const* const name : {"1F1B", "ZBVZeroBubble", "DualPipeV"}) {
    outcome without, with;
    for (bool const graphs : {false, true}) {
      check_quiet(over_copies(2, 1, 60s, [&](chevron::transport& comm, at::Device mine) {
        train_on(comm, mine, name, graphs ? with : without, graphs);
      }));
    }
    compare(with, without, name);
    for (auto const& of_rank : with.why_not) CHECK(of_rank.back() == "");
  }
}

TEST_CASE("a rank that throws, or does not answer, ends the streams of all, which wait for flags") {
  if (!gpus::at_least(1)) return;
  for (bool const throws : {true, false}) {
    CAPTURE(throws);
    outcome out;
    auto const begun = std::chrono::steady_clock::now();
    auto const said = over_copies(2, 1, 3s, [&](chevron::transport& comm, at::Device mine) {
      train_on(comm, mine, "1F1B", out, false, [&](int step) {
        if (comm.topology().global_rank != 1 || step != 3) return;
        if (throws) throw std::runtime_error("no such file");
        std::this_thread::sleep_for(5s);
      });
    });
    CHECK(std::chrono::steady_clock::now() - begun < 60s);
    // Of what this program throws beside the trainer rank 0 is not told.
    CHECK(said[0].find("rank 1 did not answer") != std::string::npos);
    CHECK(said[1].find(throws ? "no such file" : "rank 1 did not answer") != std::string::npos);
  }
}

TEST_CASE("a job of processes that share GPUs" * doctest::skip()) {
  if (std::getenv("CHEVRON_COPIES_JOB") == nullptr) return;
  int const code = chevron::run_main(0, nullptr, [](int, char**) {
    chevron::job const rank = chevron::launch({.nproc = 2});
    chevron::copy_transport comm(rank.topology(2), rank, {.share_gpus = true, .channels = small});
    outcome out;
    train_on(comm, comm.device(), "ZB-H1", out);
    comm.close();
    std::string losses = "losses";
    for (double const loss : out.losses) losses += " " + std::to_string(loss);
    if (rank.rank == 0) std::fprintf(stderr, "%s\n", losses.c_str());
    return 0;
  });
  std::fflush(nullptr);
  ::_exit(code);
}

TEST_CASE("processes on one GPU reach each other's memory by handles, and train as threads do") {
  if (!gpus::at_least(1)) return;
  outcome by_threads;
  chevron::run_threads({.pipeline_ranks = 2},
                       [&](chevron::transport& comm) { train_on(comm, training::gpu(0), "ZB-H1", by_threads); });
  std::string losses = "losses";
  for (double const loss : by_threads.losses) losses += " " + std::to_string(loss);
  auto const end = subprocess::started("a job of processes that share GPUs", {"CHEVRON_COPIES_JOB=1", "CUDA_VISIBLE_DEVICES=0",
                                                                              "GPU_DOUBLE_COUNT=1", "OMP_NUM_THREADS=1"})
                       .wait(120s);
  INFO(end.output);
  CHECK(end.code == 0);
  CHECK(end.lines_with(losses) == 1);
}
