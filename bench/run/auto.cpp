// A pipeline of layers that sleep, with an embedding before them and a head behind them, under a fixed schedule or under one that is
// made from its first steps. bench/run/auto.py compares; here one run is one line of JSON.
//
//   bench-auto --schedule NAME|FILE.csv [--auto] [--layers 2,2,2,2,2,2,2,2] [--profile FILE.json]
//   bench-auto --list    the catalogue's schedules that train
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/ones.h>
#include <torch/optim/sgd.h>

#include <CLI/CLI.hpp>

#include <chevron/base/new_file.hpp>
#include <chevron/csv/csv_read.hpp>
#include <chevron/jobs/run_main.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/run.hpp>
#include <chevron/schedule.hpp>
#include <chevron/tools/profile/trace_window.hpp>
#include <chevron/tools/replan/auto_schedule.hpp>
#include <chevron/tools/search/layer_costs.hpp>
#include <chevron/tools/show/profile_file.hpp>

#include "job.hpp"
#include "sleeping.hpp"

namespace {

struct options {
  std::string schedule = "ZBVZeroBubble";
  bool automatic = false;
  int ranks = 4, micro_batches = 8, steps = 36, blocks = 16;
  std::vector<int> layers;
  double milliseconds = 1;
  double head = 3, embedding = .3;
  std::string profile;
};

/// The times that layers sleep, in milliseconds: a layer's I takes a fifth longer than its F, its W as long as its F.
chevron::search::layer_costs slept(options const& o) {
  chevron::search::layer_costs out;
  double const one = o.milliseconds;
  auto const times_of = [&](double size) { return chevron::search::piece_costs{size * one, 1.2 * size * one, size * one}; };
  out.layers.assign(static_cast<std::size_t>(o.blocks), times_of(1));
  out.embedding = {o.embedding * one, 0, o.embedding * one};
  out.head = times_of(o.head);
  out.first_input = 0;
  return out;
}

chevron::plan plan_of(options const& o) {
  if (o.schedule.ends_with(".csv")) {
    std::ifstream in(o.schedule);
    std::string const text{std::istreambuf_iterator<char>(in), {}};
    return chevron::read_csv(text).plan;
  }
  return chevron::catalogue::make_plan(o.schedule, {.ranks = o.ranks, .micro_batches = o.micro_batches});
}

int run(options o) {
  auto const program = chevron::lower(chevron::prove(plan_of(o)));
  int const stages = program.view().plan.stages;
  if (o.layers.empty()) o.layers = chevron::search::even_layers(o.blocks, stages);
  if (static_cast<int>(o.layers.size()) != stages || std::accumulate(o.layers.begin(), o.layers.end(), 0) != o.blocks)
    throw chevron::usage_error("--layers does not fit " + std::to_string(stages) + " stages and --blocks " + std::to_string(o.blocks) +
                               ". Remedy: a number for each stage, --blocks together");
  chevron::owned_costs const costs = slept(o).of(o.layers);
  chevron::run_threads({.pipeline_ranks = program.view().plan.size.ranks}, [&](chevron::transport& comm) {
    auto const build = [&](int number) {
      auto const s = static_cast<std::size_t>(number);
      // The first stage's W is its whole backward.
      bench::times::means const each{costs.forward[s] * 1e-3, costs.backward_input[s] * 1e-3, costs.backward_weight[s] * 1e-3};
      return bench::sleeping_stage({each, 0., number});
    };
    chevron::trainer train({.program = program,
                            .transport = comm,
                            .stages = build,
                            .loss = [](at::Tensor y, at::Tensor) { return y.mean(); },
                            .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(.1))});
    std::optional<chevron::auto_schedule> planner;
    if (o.automatic) {
      double const chunks = program.view().plan.size.ranks * program.view().plan.size.chunks;
      planner.emplace(train, chevron::auto_options{.memory = {chunks}});
    }
    at::Tensor const batch = at::ones({o.micro_batches, 4});
    chevron::trace_window records;
    std::string events;
    bool first = true;
    for (int step = 0; step < o.steps; ++step) {
      auto const report = train.step(batch, batch);
      if (!std::exchange(first, false)) records.keep(train.last_trace(), report.seconds);
      auto const news = planner ? planner->after_step(report) : std::nullopt;
      if (!news) continue;
      constexpr char const* names[] = {"kept", "changed", "confirmed", "went back"};
      events += (events.empty() ? "" : ", ") + std::string(names[static_cast<int>(news->what)]);
      if (news->what == chevron::schedule_event::changed || news->what == chevron::schedule_event::went_back) {
        records = {};
        first = true;
      }
    }
    auto const texts = comm.all_gather_text(records.text());
    if (comm.topology().global_rank != 0) return;
    chevron::plan_view const plan = train.program().plan;
    chevron::profile measured = chevron::profile_of(plan, chevron::steps_of(texts));
    measured.layers = o.layers;
    auto const from_measured = chevron::costs_of(measured, chevron::split_stages(plan));
    std::string const layers = chevron::search::layers_text(o.layers);
    std::printf("{\"schedule\": \"%s\", \"layers\": \"%s\", \"ideal\": %.3f, \"predicted\": %.3f, \"measured\": %.3f, "
                "\"in_flight\": %d, \"events\": \"%s\"}\n",
                o.schedule.c_str(), layers.c_str(), chevron::makespan(plan, costs.view()),
                chevron::makespan(plan, from_measured.view()), measured.pipeline, chevron::peak_in_flight(plan), events.c_str());
    if (!o.profile.empty()) chevron::detail::write_file(o.profile, chevron::write_profile(measured));
  });
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** values) {
    options wanted;
    bool list = false;
    CLI::App app("A pipeline of layers that sleep, under one schedule");
    app.add_option("--schedule", wanted.schedule, "a schedule of the catalogue, or a FILE.csv")->capture_default_str();
    app.add_flag("--auto", wanted.automatic, "go on under a schedule made from the times of the first steps");
    app.add_option("--ranks", wanted.ranks, "with a schedule of the catalogue")->capture_default_str();
    app.add_option("--microbatches", wanted.micro_batches)->capture_default_str();
    app.add_option("--blocks", wanted.blocks, "layers in all")->capture_default_str();
    app.add_option("--layers", wanted.layers, "of each stage, with commas between (default: as even as can be)")->delimiter(',');
    app.add_option("--milliseconds", wanted.milliseconds, "a layer's F")->capture_default_str();
    app.add_option("--head", wanted.head, "of the last stage, in layers")->capture_default_str();
    app.add_option("--embedding", wanted.embedding, "of the first stage, in layers")->capture_default_str();
    app.add_option("--steps", wanted.steps, "the last 20 are measured")->capture_default_str();
    app.add_option("--profile", wanted.profile, "write the measured costs");
    app.add_flag("--list", list, "print the catalogue's schedules that train");
    int code = 0;
    if (!bench::parsed(app, count, values, code)) return code;
    if (!list) return run(wanted);
    chevron::catalogue::for_each([](auto const& one) {
      if (chevron::catalogue::trains(one.name)) std::printf("%s\n", one.name);
    });
    return 0;
  });
}
