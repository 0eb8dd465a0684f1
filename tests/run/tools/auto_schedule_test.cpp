// A schedule that changes while training goes on: nothing that is computed does.
#include "support/small_model.hpp"
#include "support/trained.hpp"

#include <optional>
#include <utility>

#include <chevron/tools/replan/auto_schedule.hpp>

#include <doctest/doctest.h>

using namespace small_model;
using chevron::auto_options;
using chevron::profile;
using chevron::replan_report;

namespace {

struct job {
  int ranks = 2, replicas = 1, micro_batches = 6, steps = 14;
  char const* schedule = "V-Min";
  chevron::trainer_options options = {};
  bool drops = false;  ///< stages draw at random
};

struct outcome : trained {
  std::vector<replan_report> news;  // of rank 0
  std::string last_schedule;
};

chevron::proved_program program_of(job const& what) {
  return chevron::lower(chevron::prove(plan_of(what.schedule, what.ranks, what.micro_batches)));
}

outcome train(job const& what, std::optional<auto_options> const& planned, complaints& wrong) {
  outcome out;
  std::mutex mutex;
  auto const program = program_of(what);
  chevron::run_threads({.pipeline_ranks = what.ranks, .replicas = what.replicas}, [&](transport& comm) {
    bool const first = comm.topology().global_rank == 0;
    chevron::trainer_options options = what.options;
    options.on_report = [&](chevron::step_report const& report) {
      if (first) out.keep(report);
    };
    chevron::trainer trainer(small_model::setup(
        program, comm, [&](int s) { return what.drops ? build_dropping_stage(s) : build_stage(s); }, options, adamw));
    chevron::evaluator before(trainer);
    auto const data = make_batch(2 * what.micro_batches, 5 + comm.topology().replica());
    std::optional<chevron::auto_schedule> planner;
    if (planned) planner.emplace(trainer, *planned);
    std::vector<int> events;
    for (int step = 0; step < what.steps; ++step) {
      auto const report = trainer.step(data.input, data.target);
      wrong.require(report.step == step, "step " + std::to_string(step) + " is called " + std::to_string(report.step));
      if (!planner) continue;
      auto news = planner->after_step(report);
      if (!news) continue;
      events.push_back(static_cast<int>(news->what));
      wrong.require(news->costs.forward.empty() != first, "only rank 0 knows the costs");
      if (first) out.news.push_back(std::move(*news));
    }
    trainer.synchronize();
    chevron::evaluator after(trainer);
    double const held_out = before.loss(data.input, data.target);
    wrong.require(held_out == after.loss(data.input, data.target), "an evaluator made before the change");
    std::lock_guard const hold(mutex);
    if (first) out.last_schedule = trainer.program().plan.name;
    out.keep_parameters(trainer.stages(), comm.topology().replica());
  });
  return out;
}

void check_same(outcome const& a, outcome const& b) {
  small_model::check_same(a, b);
  CHECK(a.norms == b.norms);
}

/// Invented costs: the last stage is long. A step takes 100, and under the searched schedule `searched`.
profile invented(profile p, double searched, double longer = 0) {
  std::size_t const stages = p.forward.size();
  p.forward.assign(stages, 4);
  p.backward_input.assign(stages, 5);
  p.backward_weight.assign(stages, 3);
  p.forward[1] += longer;
  p.backward_input.back() = 9;
  p.communication.assign(stages - 1, .5);
  if (p.schedule == "1F1B" || stages == 3) {  // whole backwards, and messages that 1F1B waits for
    p.backward = {8, 8, 12};
    p.backward_input = p.backward_weight = {profile::not_measured, profile::not_measured, profile::not_measured};
    p.communication = {3, 3};
  }
  p.pipeline = p.step = p.schedule == "searched" ? searched : 100;
  return p;
}

auto_options quickly(std::function<profile(profile)> costs) {
  return {.steps = 2, .watch_every = 3, .memory = {12}, .effort = {.trials = 200}, .costs = std::move(costs)};
}

/// `changed 2, confirmed 5`: the result of each look, and its step.
std::string events_of(outcome const& from) {
  constexpr char const* names[] = {"kept", "changed", "confirmed", "went back"};
  std::string out;
  for (auto const& one : from.news)
    out += (out.empty() ? "" : ", ") + std::string(names[static_cast<int>(one.what)]) + " " + std::to_string(one.step);
  return out;
}

}  // namespace

TEST_CASE("the schedule changes in the middle of a run, and every loss and parameter is what it would have been") {
  at::set_num_threads(1);
  complaints wrong;
  job plain;
  job replicated{.replicas = 2, .options = {.clip_grad_norm = .05, .learning_rate = curve::rate, .bucket_bytes = 100}};
  job validated{.steps = 24, .options = {.post_validation = true, .stable_steps = 1}};
  job dropping{.options = {.seed = 3}, .drops = true};
  job three{.ranks = 3, .schedule = "1F1B"};
  for (job const& what : {plain, replicated, validated, dropping, three}) {
    CAPTURE(what.schedule);
    CAPTURE(what.options.post_validation);
    outcome const fixed = train(what, std::nullopt, wrong);
    outcome const planned = train(what, quickly([](profile p) { return invented(std::move(p), 80); }), wrong);
    check_same(fixed, planned);
    CHECK(events_of(planned) == "changed 2, confirmed 5");
    CHECK(planned.last_schedule == "searched");
    CHECK(static_cast<int>(fixed.losses.size()) == what.steps);
    replan_report const& change = planned.news.front();
    CHECK(change.measured == 100);
    CHECK(change.found < .98 * change.running);
    CHECK(change.bound <= change.found);
    CHECK(planned.news[1].found == change.found);
    CHECK(planned.news[1].before == 100);
    CHECK(planned.news[1].measured == 80);
  }
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("a schedule that measures no better than the one before is given up") {
  complaints wrong;
  job const what;
  outcome const fixed = train(what, std::nullopt, wrong);
  outcome const planned = train(what, quickly([](profile p) { return invented(std::move(p), 100); }), wrong);
  check_same(fixed, planned);
  CHECK(events_of(planned) == "changed 2, went back 5");
  CHECK(planned.last_schedule == "V-Min");
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("too small a gain changes nothing; costs that drift are planned for anew, others are not") {
  complaints wrong;
  job what;
  what.steps = 30;
  outcome const fixed = train(what, std::nullopt, wrong);
  // Looks after steps 2, 5, 8, … Up to 8 the costs stay within a tenth of the longest stage's 16, then they are others.
  int looks = 0;
  auto_options options = quickly([&](profile p) {
    ++looks;
    return invented(std::move(p), 80, looks == 3 ? 1.5 : looks > 3 ? 9 : 0);
  });
  options.least_gain = .9;
  outcome planned = train(what, options, wrong);
  check_same(fixed, planned);
  CHECK(events_of(planned) == "kept 2, kept 11");
  CHECK(planned.last_schedule == "V-Min");
  CHECK(planned.news[0].drift == 0);
  CHECK(planned.news[1].drift == doctest::Approx(9. / 16));
  // After costs that drifted and left nothing to gain, the next looks come every six steps.
  CHECK(looks == 7);

  // With a usual least gain, a plan for the drifted costs is found and used.
  looks = 0;
  options.least_gain = .02;
  planned = train(what, options, wrong);
  check_same(fixed, planned);
  CHECK(events_of(planned).starts_with("changed 2, confirmed 5, "));
  REQUIRE(planned.news.size() >= 3);
  CHECK(planned.news[2].drift > .1);
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("ranks that were given different programs say so, and train on under the old one") {
  job const what{.steps = 4};
  complaints wrong;
  outcome const fixed = train(what, std::nullopt, wrong);
  auto const program = program_of(what);
  std::vector<std::string> said(2);
  std::vector<double> losses;
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    chevron::trainer trainer(
        {.program = program, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = adamw});
    auto const rank = static_cast<std::size_t>(comm.topology().global_rank);
    auto const data = make_batch(2 * what.micro_batches, 5);
    for (int step = 0; step < what.steps; ++step) {
      if (step == 2) {
        auto const other = chevron::lower(chevron::prove(plan_of(rank == 0 ? "V-Half" : "ZBVZeroBubble", 2, what.micro_batches)));
        try {
          trainer.change_schedule(other);
        } catch (chevron::preflight_error const& e) {
          said[rank] = e.what();
        }
        // Of the same name and size, and yet another order.
        auto plan = plan_of("V-Half", 2, what.micro_batches);
        if (rank == 1) std::swap(plan.actions.data[plan.begin.data[1] - 1], plan.actions.data[plan.begin.data[1] - 2]);
        auto const swapped = chevron::lower(chevron::prove(std::move(plan)));
        bool refused = false;
        try {
          trainer.change_schedule(swapped);
        } catch (chevron::preflight_error const& e) {
          refused = std::string(e.what()).find("rank 1 has `program: ") != std::string::npos;
        }
        wrong.require(refused, "programs that differ in two actions");
      }
      double const loss = trainer.step(data.input, data.target).loss;
      if (rank == 0) losses.push_back(loss);
    }
  });
  for (auto const& each : said) CHECK(each.find("rank 1 has `schedule: ZBVZeroBubble` where rank 0 has `schedule: V-Half`") != std::string::npos);
  CHECK(losses == fixed.losses);
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("what cannot be is refused with the reason") {
  job const what;
  auto const refused = [&](auto const& act, char const* schedule = "V-Min") {
    std::string said;
    auto const program = chevron::lower(chevron::prove(plan_of(schedule, 2, 6)));
    try {
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        chevron::trainer trainer(
            {.program = program, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = adamw});
        act(trainer);
      });
    } catch (chevron::error const& e) {
      said = e.what();
    }
    return said;
  };
  auto const change_to = [&](char const* name, int micro_batches = 6) {
    return refused([&](chevron::trainer& t) { t.change_schedule(chevron::lower(chevron::prove(plan_of(name, 2, micro_batches)))); });
  };
  auto const says = [](std::string const& text, char const* words) {
    CAPTURE(text);
    CHECK(text.find(words) != std::string::npos);
  };
  says(change_to("LoopedBFS"), "stage 2 is on rank 1, and the new program has it on rank 0. Remedy: a program for the same placement");
  says(change_to("1F1B"), "the new program has 2 stages, the old one 4");
  says(change_to("V-Min", 5), "the new program has 5 microbatches, the old one 6");
  says(refused([](chevron::trainer& t) {
         t.change_schedule(chevron::lower(chevron::prove(chevron::forward_part(t.program()))));
       }),
       "the new program only runs forward");
  says(refused([](chevron::trainer& t) {
         auto const data = make_batch(6, 1);
         t.accumulate({data.input}, {data.target}, 12);
         t.change_schedule(chevron::lower(chevron::prove(plan_of("V-Half", 2, 6))));
       }),
       "gradients wait for their step. Remedy: change it after step()");
  says(refused([](chevron::trainer& t) { chevron::auto_schedule(t, {}); }, "LoopedBFS"),
       "schedule LoopedBFS does not add gradients up in the order of microbatches");
  says(refused([](chevron::trainer& t) { chevron::auto_schedule(t, {.steps = 21}); }), "auto_options::steps 21 is not from 1 to 20");
  says(refused([](chevron::trainer& t) { chevron::auto_schedule(t, {.watch_every = 9}); }), "auto_options::watch_every 9 is not as large");
  says(refused([](chevron::trainer& t) {
         chevron::auto_schedule(t, {.least_gain = .01 * (1 + t.comm().topology().global_rank)});
       }),
       "rank 1 has `auto_options::least_gain: 0.02` where rank 0 has `auto_options::least_gain: 0.01`");
  says(refused([](chevron::trainer& t) {
         chevron::auto_schedule planner(t, {.steps = 1, .costs = [](profile) -> profile { throw std::runtime_error("no costs today"); }});
         auto const data = make_batch(12, 1);
         for (int step = 0; step < 3; ++step) planner.after_step(t.step(data.input, data.target));
       }),
       "planning the schedule failed on rank 0: no costs today");
}
