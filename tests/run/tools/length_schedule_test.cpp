// A schedule for each step's lengths: results equal those of the fixed schedule and of a plain loop.
#include "support/small_model.hpp"
#include "support/trained.hpp"

#include <cmath>
#include <optional>
#include <utility>

#include <chevron/tools/replan/length_schedule.hpp>

#include <doctest/doctest.h>

using namespace small_model;
using chevron::length_options;
using chevron::length_report;
using chevron::profile;

namespace {

struct job {
  int ranks = 2, replicas = 1, micro_batches = 6, steps = 9;
  char const* schedule = "ZBVZeroBubble";
  chevron::trainer_options options = {};
};

/// Samples of each microbatch in a step: one long one, somewhere, another place in every step.
std::vector<double> lengths_of(job const& what, int step, int replica) {
  std::vector<double> out;
  for (int m = 0; m < what.micro_batches; ++m) out.push_back((m * 5 + step + replica) % what.micro_batches == 0 ? 12 : 1 + (m + step) % 3);
  return out;
}
std::vector<chevron::batch> data_of(job const& what, int step, int replica) {
  std::vector<chevron::batch> out;
  for (double const samples : lengths_of(what, step, replica)) {
    auto const one = make_batch(static_cast<std::int64_t>(samples), 100 * step + 10 * replica + static_cast<int>(out.size()));
    out.push_back({{one.input}, {one.target}});
  }
  return out;
}

struct outcome : trained {
  std::vector<length_report> news;  // of rank 0
  std::vector<std::string> schedules;
};

outcome train(job const& what, std::optional<length_options> const& planned, complaints& wrong) {
  outcome out;
  std::mutex mutex;
  auto const program = chevron::lower(chevron::prove(plan_of(what.schedule, what.ranks, what.micro_batches)));
  chevron::run_threads({.pipeline_ranks = what.ranks, .replicas = what.replicas}, [&](transport& comm) {
    bool const first = comm.topology().global_rank == 0;
    int const replica = comm.topology().replica();
    chevron::trainer_options options = what.options;
    options.on_report = [&](chevron::step_report const& report) {
      if (first) out.keep(report);
    };
    chevron::trainer trainer(small_model::setup(program, comm, build_stage, options, adamw));
    std::optional<chevron::length_schedule> planner;
    if (planned) planner.emplace(trainer, *planned);
    for (int step = 0; step < what.steps; ++step) {
      if (planner) {
        auto const news = planner->before_step(lengths_of(what, step, replica));
        wrong.require(news.has_value() == (step >= 1 + planned->steps), "news before step " + std::to_string(step));
        if (first && news) out.news.push_back(*news);
      }
      if (first) out.schedules.push_back(chevron::show::csv(trainer.program().plan));
      double samples = 0;  // of all replicas
      for (int r = 0; r < what.replicas; ++r) {
        for (double const one : lengths_of(what, step, r)) samples += one;
      }
      trainer.step(data_of(what, step, replica), samples);
    }
    trainer.synchronize();
    std::lock_guard const hold(mutex);
    out.keep_parameters(trainer.stages(), replica);
  });
  return out;
}

/// The same in a plain loop: one microbatch after the other through all stages, gradients added up as autograd does.
outcome plainly(job const& what, int stages) {
  outcome out;
  reference whole(stages);
  auto const optimizer = adamw(whole.parameters());
  for (int step = 0; step < what.steps; ++step) {
    double all = 0, loss = 0;
    auto const data = data_of(what, step, 0);
    for (auto const& one : data) all += static_cast<double>(one.inputs[0].size(0));
    for (auto& p : whole.parameters()) p.mutable_grad() = at::zeros_like(p);
    for (auto const& one : data) {
      at::Tensor const value = mean_square(whole.forward(one.inputs[0])[0], one.targets[0]);
      double const weight = static_cast<double>(one.inputs[0].size(0)) / all;
      loss += value.item<double>() * weight;
      torch::autograd::backward({value}, {at::full({}, weight)});
    }
    out.losses.push_back(loss);
    optimizer->step();
  }
  out.keep_parameters(whole.stages, 0);
  return out;
}

/// Costs that were not measured: of a sample.
profile invented(profile p) {
  std::size_t const stages = p.forward.size();
  p.forward.assign(stages, 4);
  p.backward_input.assign(stages, 5);
  p.backward_weight.assign(stages, 3);
  p.communication.assign(stages - 1, .5);
  if (p.schedule == "1F1B") {
    p.backward.assign(stages, 8);
    p.backward_input = p.backward_weight = std::vector<double>(stages, profile::not_measured);
  }
  return p;
}

}  // namespace

TEST_CASE("planned for each step's lengths: losses and parameters are those of the fixed schedule and of a plain loop") {
  at::set_num_threads(1);
  complaints wrong;
  job plain;
  job replicated{.replicas = 2, .options = {.clip_grad_norm = .05, .bucket_bytes = 100}};
  job validated{.steps = 12, .options = {.post_validation = true, .stable_steps = 1}};
  job whole{.ranks = 3, .micro_batches = 9, .schedule = "1F1B"};
  for (job const& what : {plain, replicated, validated, whole}) {
    CAPTURE(what.schedule);
    CAPTURE(what.replicas);
    CAPTURE(what.options.post_validation);
    length_options const options{.steps = 2, .memory = {8}, .costs = invented};
    outcome const fixed = train(what, std::nullopt, wrong);
    outcome const planned = train(what, options, wrong);
    check_same(fixed, planned);
    CHECK(fixed.norms == planned.norms);
    if (what.replicas == 1 && !what.options.post_validation)
      check_same(plainly(what, plan_of(what.schedule, what.ranks, what.micro_batches).stages), planned);
    int changes = 0;
    for (std::size_t i = 0; i < planned.news.size(); ++i) {
      length_report const& one = planned.news[i];
      CHECK(one.bound <= one.found * (1 + 1e-12));
      CHECK((one.found <= .99 * one.running) == one.changed);
      changes += one.changed ? 1 : 0;
      std::size_t const step = 3 + i;
      CHECK((planned.schedules[step] != planned.schedules[step - 1]) == one.changed);
    }
    CHECK(static_cast<int>(planned.news.size()) == what.steps - 3);
    CHECK(changes >= 1);
  }
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("with costs that were really measured the bits are the same, and what is predicted is of those lengths") {
  complaints wrong;
  job const what{.micro_batches = 4, .steps = 8};
  double whole = 0;  // one rank's time for a microbatch of median length
  length_options const options{.steps = 3, .attention = .25, .costs = [&](profile p) {
                                 for (auto const* each : {&p.forward, &p.backward_input, &p.backward_weight}) {
                                   for (double const one : *each) whole += one / what.ranks;
                                 }
                                 // On a busy machine messages take many times as long as the computations of these small stages.
                                 p.communication.assign(p.communication.size(), 0);
                                 return p;
                               }};
  outcome const planned = train(what, options, wrong);
  check_same(train(what, std::nullopt, wrong), planned);
  REQUIRE(planned.news.size() == 4);
  // Microbatches of 12 samples and of 1 to 3, the median 3: the long one makes as much work as 7 of that length, the others together as
  // 1.2 to 1.9. With another median it would be a tenth of that, or ten times as much.
  for (length_report const& one : planned.news) {
    CHECK(one.bound > 8 * whole);
    CHECK(one.bound < 60 * whole);
    CHECK(one.attention == .25);
  }
  length_options fitting = options;
  fitting.attention = {};
  outcome const fitted = train(what, fitting, wrong);
  check_same(planned, fitted);
  REQUIRE(fitted.news.size() == 4);
  // Measured once, in hundredths, and told to all ranks as text.
  for (length_report const& one : fitted.news) {
    CHECK(one.attention == std::round(one.attention * 100) / 100);
    CHECK(one.attention == fitted.news.front().attention);
  }
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("lengths without sense, and ranks that differ, are the same error on every rank") {
  job const what;
  auto const program = chevron::lower(chevron::prove(plan_of(what.schedule, what.ranks, what.micro_batches)));
  auto const refused = [&](length_options const& options, auto const& lengths_on) {
    std::vector<std::string> said(2);
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer trainer(small_model::setup(program, comm, build_stage, {}, adamw));
      int const rank = comm.topology().global_rank;
      try {
        chevron::length_schedule planner(trainer, options);
        planner.before_step(lengths_on(rank));
      } catch (chevron::usage_error const& e) {
        said[static_cast<std::size_t>(rank)] = e.what();
      }
    });
    CHECK(said[0] == said[1]);
    return said[0];
  };
  std::vector<double> const good(6, 3);
  CHECK(refused({}, [&](int rank) { return rank == 0 ? good : std::vector<double>{3, 3, 3, 3, 3, 4}; })
            .find("ranks 0 and 1 were given different lengths, [ 3 3 3 3 3 3 ] and [ 3 3 3 3 3 4 ]") != std::string::npos);
  CHECK(refused({}, [&](int) { return std::vector<double>{3, 3, 3}; }).find("before_step on rank 0: 3 lengths for 6 microbatches") !=
        std::string::npos);
  CHECK(refused({}, [&](int) { return std::vector<double>{3, 3, 0, 3, 3, 3}; }).find("the length of microbatch 2 is 0. Remedy") !=
        std::string::npos);
  CHECK(refused({.steps = 21}, [&](int) { return good; }).find("length_options::steps 21 is not from 1 to 20") != std::string::npos);
  CHECK(refused({.attention = 2}, [&](int) { return good; }).find("length_options::attention 2 is not from 0 to 1") !=
        std::string::npos);
}

TEST_CASE("a share of attention that only one rank was given is refused on every rank") {
  job const what;
  auto const program = chevron::lower(chevron::prove(plan_of(what.schedule, what.ranks, what.micro_batches)));
  std::vector<std::string> said(2);
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    chevron::trainer trainer(small_model::setup(program, comm, build_stage, {}, adamw));
    int const rank = comm.topology().global_rank;
    length_options options;
    if (rank == 1) options.attention = .2;
    try {
      chevron::length_schedule planner(trainer, options);
    } catch (chevron::preflight_error const& e) {
      said[static_cast<std::size_t>(rank)] = e.what();
    }
  });
  for (auto const& each : said) {
    CAPTURE(each);
    CHECK(each.find("length_options::attention") != std::string::npos);
    CHECK(each.find("fitted") != std::string::npos);
  }
}
