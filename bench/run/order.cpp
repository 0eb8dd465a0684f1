// One way to divide a decoder over a cluster, measured without the cluster: every rank is a thread, every layer sleeps for the
// time that its profile has, divided by the shards, and every transfer takes the time of its link. The trainer, its schedules,
// sums, gathers and the order of all waits are those of a real job; only computations and wires are replaced.
// bench/suite/order.py compares the measured steps of many ways with the steps that chevron-plan cluster predicts.
//
//   bench-order --profile profile.json --schedule 1F1B --ranks 4 --shards 2 --microbatches 8 --layers 2,2,2,2
//               --link-inside 16e6 --link-between 4e6 --nodes 2 --gpus 4
//
// The profile is one that chevron-plan model wrote, for as many samples as the way's microbatches have. Between blocks each shard
// holds its piece of the sequence: each half of a layer gathers the stream and sums it into pieces again, the embedding sums, the
// head gathers, as the layers of chevron-finetune do.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/ones.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <chevron/jobs/run_main.hpp>
#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include "common/sharded_layers.hpp"

#include "../../tests/support/slow_links.hpp"
#include "job.hpp"
#include "sleeping.hpp"

namespace {

struct options {
  std::string profile;
  std::string schedule = "1F1B";
  int ranks = 1, chunks = 0, shards = 1, replicas = 1, micro_batches = 1;
  std::vector<int> layers;  ///< of each stage
  bool recompute = false, sharded = false;
  int nodes = 1, gpus = 0;
  double inside = 0, between = 0;                  ///< bytes a second
  double latency_inside = 0, latency_between = 0;  ///< milliseconds
  int steps = 3;
};

/// The pieces of a decoder (embedding, layers, head), from a file of chevron-plan model.
struct decoder {
  struct piece {
    bench::times::means seconds;  ///< of F, I and W, on one shard
    std::int64_t parameters;      ///< of one shard
  };
  std::vector<piece> pieces;
  std::int64_t samples = 0, tokens = 0, width = 0;
  double memory_rate = 0;      ///< bytes a second
  double optimizer_bytes = 0;  ///< that the optimizer moves for each parameter

  decoder(std::string const& file, int shards) {
    std::ifstream in(file);
    auto const all = nlohmann::json::parse(in, nullptr, false);
    if (!all.is_object() || !all.contains("model")) {
      throw chevron::usage_error("--profile '" + file + "' has no 'model'. Remedy: a file that chevron-plan model wrote");
    }
    auto const& model = all.at("model");
    samples = model.at("samples");
    tokens = model.at("tokens");
    width = model.at("width");
    memory_rate = model.at("memory_rate");
    if (model.at("item_bytes") != 4)
      throw chevron::usage_error("--profile '" + file + "' is not of float32. Remedy: chevron-plan model --dtype fp32");
    auto const at = [&](char const* list, std::size_t i) { return all.at(list).at(i).get<double>(); };
    for (std::size_t i = 0; i < all.at("forward").size(); ++i) {
      auto const seconds = [&](char const* list) { return at(list, i) * 1e-3 / shards; };
      auto const parameters = static_cast<std::int64_t>(at("gradient_bytes", i)) / 4 / shards;
      pieces.push_back({{seconds("forward"), seconds("backward_input"), seconds("backward_weight")}, parameters});
      // Gradients are read, parameters and state read and written.
      if (i == 1) optimizer_bytes = 4 + 2 * 4 + 2 * at("state_bytes", i) / (at("gradient_bytes", i) / 4);
    }
  }
};

/// Sleeps as long as the device's memory needs for parameters, gradients and state; on shares of parameters with a sharded
/// optimizer.
struct sleeping_optimizer : torch::optim::SGD {
  sleeping_optimizer(std::vector<at::Tensor> parameters, double seconds_of_parameter)
      : SGD(std::move(parameters), torch::optim::SGDOptions(0.1)), each(seconds_of_parameter) {}
  double each;
  at::Tensor step(LossClosure closure = nullptr) override {
    double count = 0;
    for (auto const& group : param_groups()) {
      for (at::Tensor const& one : group.params()) count += static_cast<double>(one.numel());
    }
    std::int64_t const end = bench::after(count * each);
    at::Tensor out = SGD::step(std::move(closure));
    bench::sleep_until(end);
    return out;
  }
};

/// Stage `number`: its pieces, one after another, with the collectives of tensor and sequence parallel.
chevron::stage stage_of(options const& wanted, decoder const& model, chevron::transport& comm, int number) {
  using chevron::train::shard_layout;
  auto const stages = static_cast<int>(wanted.layers.size());
  int first = 1;
  for (int s = 0; s < number; ++s) first += wanted.layers[static_cast<std::size_t>(s)];
  int const last = first + wanted.layers[static_cast<std::size_t>(number)];
  bool const embeds = number == 0, ends = number + 1 == stages;
  std::int64_t parameters = 0;
  for (int i = embeds ? 0 : first; i < last + (ends ? 1 : 0); ++i)
    parameters += model.pieces[static_cast<std::size_t>(i)].parameters;
  at::Tensor weight = at::ones({std::max<std::int64_t>(parameters, 1)});
  weight.requires_grad_(true);

  shard_layout const layout{chevron::shard_group(comm), model.tokens};
  auto const times_of = [&](std::size_t piece, double share) {
    auto mean = model.pieces[piece].seconds;
    for (double& one : mean.of) one *= share;
    return std::make_shared<bench::times>(mean, 0, number);
  };
  struct block {
    std::shared_ptr<bench::times> stage;
    bool enters, leaves;
  };
  std::vector<block> blocks;
  if (embeds) blocks.push_back({times_of(0, 1), false, true});
  for (int i = first; i < last; ++i) {
    for (int half = 0; half < 2; ++half) blocks.push_back({times_of(static_cast<std::size_t>(i), 0.5), true, true});
  }
  if (ends) blocks.push_back({times_of(model.pieces.size() - 1, 1), true, false});
  std::int64_t const width = model.width;
  auto const forward = [=](at::Tensor x) {
    if (embeds) x = x.unsqueeze(-1).expand({-1, -1, width});
    for (block const& one : blocks) {
      if (one.enters) x = layout.enter(x);
      x = bench::sleep_in(x, weight, one.stage.get());
      if (one.leaves && layout.group.shards() > 1) x = layout.leave(x / layout.group.shards());
    }
    return x;
  };
  chevron::stage out(forward, {{"weight", weight}});
  if (wanted.shards > 1) out.cut("weight", 0);
  return std::move(out.recompute(wanted.recompute));
}

/// The links of one rank, by the machines on which the ranks lie.
struct rank_links {
  slow_links::links messages;
  slow_links::rings ring;
};

rank_links links_of(options const& wanted, chevron::topology const& here) {
  auto const node_of = [&](int rank) { return rank / wanted.gpus; };
  auto const link = [&](bool crosses) {
    double const latency = (crosses ? wanted.latency_between : wanted.latency_inside) * 1e6;
    return slow_links::link{std::chrono::nanoseconds(static_cast<std::int64_t>(latency)),
                            crosses ? wanted.between : wanted.inside};
  };
  rank_links out;
  for (int a = 0; a < here.pipeline_ranks; ++a) {
    for (int b = a + 1; b < here.pipeline_ranks; ++b)
      out.messages[{a, b}] = link(node_of(here.global_of(a)) != node_of(here.global_of(b)));
  }
  auto const ring = [&](chevron::rank_group among) {
    bool crosses = false;
    for (int i = 0; i < here.members(among); ++i)
      crosses = crosses || node_of(here.member(among, i)) != node_of(here.member(among, 0));
    return link(crosses);
  };
  out.ring = {ring(chevron::rank_group::shards), ring(chevron::rank_group::replicas)};
  return out;
}

/// Asks for real-time priority, with which a thread runs as soon as its sleep ends, whatever else the machine computes: sleeping
/// ranks take few processor seconds. \returns whether the system grants it, as to root
bool wakes_at_once() {
  sched_param const lowest{.sched_priority = sched_get_priority_min(SCHED_FIFO)};
  return sched_setscheduler(0, SCHED_FIFO, &lowest) == 0;
}

/// Seconds of each step but the first, in which ranks exchange shapes: from the first rank's begin to the last rank's end.
std::vector<double> measured(options const& wanted, decoder const& model, chevron::proved_program const& program,
                             chevron::transport& comm) {
  double const optimizer = model.optimizer_bytes / model.memory_rate;
  chevron::trainer train(
      {.program = program,
       .transport = comm,
       .stages = [&](int number) { return stage_of(wanted, model, comm, number); },
       .loss = [](at::Tensor y, at::Tensor) { return y.mean(); },
       .optimizer = chevron::element_wise(chevron::optimizer_factory([optimizer](std::vector<at::Tensor> parameters) {
         return std::unique_ptr<torch::optim::Optimizer>(new sleeping_optimizer(std::move(parameters), optimizer));
       })),
       .options = {.shard = wanted.sharded ? chevron::sharding::optimizer : chevron::sharding::nothing,
                   .check_data = chevron::data_check::never,
                   .when_same_batch = chevron::same_batch::allow,
                   .check_copies = 0}});
  at::Tensor const batch = at::ones({wanted.micro_batches * model.samples, model.tokens});
  auto const world = static_cast<std::size_t>(comm.topology().world());
  std::vector<double> out, all(2 * world);
  for (int step = 0; step < wanted.steps; ++step) {
    double const nothing[2] = {0, 0};
    comm.all_gather(nothing, all);
    double const begin = static_cast<double>(chevron::now_ns()) * 1e-9;
    train.step({batch}, {batch});
    train.synchronize();
    double const mine[2] = {-begin, static_cast<double>(chevron::now_ns()) * 1e-9};
    comm.all_gather(mine, all);
    double earliest = all[0], latest = all[1];
    for (std::size_t r = 0; r < world; ++r) {
      earliest = std::max(earliest, all[2 * r]);
      latest = std::max(latest, all[2 * r + 1]);
    }
    if (step > 0) out.push_back(latest + earliest);
  }
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** values) {
    options wanted;
    CLI::App app("One way to divide a decoder over a cluster, in layers that sleep on threads: prints the seconds of its steps");
    app.add_option("--profile", wanted.profile, "of chevron-plan model, for the samples of a microbatch")->required();
    app.add_option("--schedule", wanted.schedule)->capture_default_str();
    app.add_option("--ranks", wanted.ranks)->capture_default_str();
    app.add_option("--chunks", wanted.chunks, "stages on each rank; 0: the schedule's own number")->capture_default_str();
    app.add_option("--shards", wanted.shards)->capture_default_str();
    app.add_option("--replicas", wanted.replicas)->capture_default_str();
    app.add_option("--microbatches", wanted.micro_batches, "of a replica")->capture_default_str();
    app.add_option("--layers", wanted.layers, "of each stage, with commas between")->delimiter(',')->required();
    app.add_flag("--recompute", wanted.recompute, "each backward computes its stage's forward again");
    app.add_flag("--shard-optimizer", wanted.sharded, "over the replicas");
    app.add_option("--nodes", wanted.nodes, "machines")->capture_default_str();
    app.add_option("--gpus", wanted.gpus, "ranks of a machine; 0: all");
    app.add_option("--link-inside", wanted.inside, "bytes a second between ranks of a machine; 0: any")->capture_default_str();
    app.add_option("--link-between", wanted.between, "the same between machines")->capture_default_str();
    app.add_option("--latency-inside", wanted.latency_inside, "milliseconds")->capture_default_str();
    app.add_option("--latency-between", wanted.latency_between, "milliseconds")->capture_default_str();
    app.add_option("--steps", wanted.steps, "the first is not counted")->check(CLI::Range(2, 1000))->capture_default_str();
    int code = 0;
    if (!bench::parsed(app, count, values, code)) return code;
    int const world = wanted.ranks * wanted.shards * wanted.replicas;
    if (wanted.gpus == 0) wanted.gpus = world;
    if (wanted.nodes * wanted.gpus < world) {
      throw chevron::usage_error("--nodes " + std::to_string(wanted.nodes) + " of --gpus " + std::to_string(wanted.gpus) +
                                 " have no room for " + std::to_string(world) + " ranks. Remedy: more machines");
    }
    decoder const model(wanted.profile, wanted.shards);
    chevron::proved_program const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan(
        wanted.schedule, {.ranks = wanted.ranks, .micro_batches = wanted.micro_batches, .chunks = wanted.chunks})));
    int total = 2;
    for (int const layers : wanted.layers) total += layers;
    auto const stages = static_cast<std::size_t>(program.view().plan.stages);
    if (wanted.layers.size() != stages || static_cast<std::size_t>(total) != model.pieces.size()) {
      throw chevron::usage_error("--layers has " + std::to_string(total - 2) + " layers on " +
                                 std::to_string(wanted.layers.size()) + " stages; the profile has " +
                                 std::to_string(model.pieces.size() - 2) + ", and the schedule " + std::to_string(stages) +
                                 " stages. Remedy: a number for each stage");
    }
    std::vector<double> seconds;
    bool const real_time = wakes_at_once();
    chevron::run_threads({.pipeline_ranks = wanted.ranks, .replicas = wanted.replicas, .shards = wanted.shards},
                         [&](chevron::transport& inner) {
                           rank_links const links = links_of(wanted, inner.topology());
                           slow_links::transport comm(inner, links.messages, {}, links.ring);
                           std::vector<double> const mine = measured(wanted, model, program, comm);
                           if (inner.topology().global_rank == 0) seconds = mine;
                         });
    std::printf("%s\n", nlohmann::json{{"seconds", seconds}, {"real_time", real_time}}.dump().c_str());
    return 0;
  });
}
