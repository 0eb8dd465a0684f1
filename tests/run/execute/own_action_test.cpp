#include "support/small_model.hpp"

#include <chrono>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <tuple>

#include <chevron/csv/csv_read.hpp>
#include <chevron/describe/expand.hpp>
#include <chevron/describe/own_action.hpp>

#include <doctest/doctest.h>

using namespace small_model;
using namespace chevron::letters;

namespace {

inline constexpr auto X = chevron::own_action<'X'>({.after = {W}, .every = true});
inline constexpr auto Y = chevron::own_action<'Y'>({});
inline constexpr auto with_own =
    chevron::schedule(chevron::placement::linear,
                      chevron::warmup(F*(ranks - 1 - rank), Y) | chevron::steady(F, I, W, X, Y) | chevron::cooldown(I, W, X, Y));

chevron::plan own_plan(int count) { return expand(with_own, {.ranks = 2, .micro_batches = count}); }

/// A trainer's setup with a handler.
chevron::trainer trainer_with(transport& comm, chevron::plan const& plan, chevron::own_handler handler,
                              bool post_validation = false) {
  return chevron::trainer(small_model::setup(plan, comm, [](int s) { return build_stage(s); },
                                             {.post_validation = post_validation, .own_actions = std::move(handler)}));
}

}  // namespace

TEST_CASE("own actions run once each, on the rank of their stage and in its place, and change no bit of what others compute") {
  auto const data = make_batch(8, 5);
  for (bool const post_validation : {false, true}) {
    std::mutex mutex;
    std::set<std::tuple<char, int, int, long>> seen;
    std::vector<double> losses[2];
    bool in_place = true;
    for (bool const own : {false, true}) {
      chevron::plan const plan = own ? own_plan(4) : plan_of("ZB-H1", 2, 4);
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        auto const handler = [&](chevron::own_work const& work) {
          std::lock_guard const hold(mutex);
          in_place = in_place && work.stage_number == comm.topology().pipeline_rank() &&
                     seen.emplace(work.letter, work.stage_number, work.micro_batch, work.step).second;
          // X comes after the W of its microbatch: there are gradients.
          if (work.letter == 'X') in_place = in_place && work.of.parameters().front().value.grad().defined();
          in_place = in_place && !at::GradMode::is_enabled();
        };
        chevron::trainer train = trainer_with(comm, plan, handler, post_validation);
        for (int step = 0; step < 3; ++step) {
          double const loss = train.step({data.input}, {data.target}).loss;
          if (comm.topology().global_rank == 0) losses[own].push_back(loss);
        }
        train.synchronize();
      });
    }
    CHECK(in_place);
    CHECK(seen.size() == 3 * 2 * 2 * 4);
    CHECK(losses[0] == losses[1]);
  }
}

TEST_CASE("an own action that throws is the step's error, with rank and action; one without a handler is refused") {
  auto const data = make_batch(4, 5);
  auto const run = [&](chevron::own_handler const& handler) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train = trainer_with(comm, own_plan(2), handler);
      train.step({data.input}, {data.target});
    });
  };
  auto const fails = [](chevron::own_work const& work) {
    if (work.letter == 'X' && work.stage_number == 1) throw std::runtime_error("no average");
  };
  CHECK_THROWS_WITH_AS(run(fails), doctest::Contains("rank 1, step 0, 1X0: own_actions threw: no average"), chevron::stage_error);
  CHECK_THROWS_WITH_AS(run({}), doctest::Contains("and trainer_options::own_actions is empty. Remedy: a function"),
                       chevron::usage_error);
}

TEST_CASE("own actions draw from streams of their own: equal under every schedule, number of ranks and timing") {
  // The same two stages on one rank and on two, with X and Y in other places and other orders of microbatches.
  char const* const schedules[] = {"0F0,0F1,0X0,0X1,0Y0,0Y1,0B0,0B1\n1F0,1X0,1F1,1X1,1B0,1Y0,1B1,1Y1\n",
                                   "0X1,0X0,0Y1,0F0,0F1,0I0,0W0,0I1,0W1,0Y0\n1F0,1I0,1X1,1X0,1F1,1I1,1W0,1W1,1Y1,1Y0\n",
                                   "0F0,1F0,1X1,0X1,1B0,1Y0,0B0,0F1,0X0,0Y1,0Y0,1F1,1X0,1B1,1Y1,0B1\n"};
  using place = std::tuple<char, int, int, long, int, int>;  // letter, stage, microbatch, step, pass, replica
  std::map<place, double> first;
  std::set<double> distinct;
  std::vector<double> losses;
  for (int run = 0; run < 4; ++run) {
    auto const plan = chevron::read_csv(schedules[run % 3]).plan;
    REQUIRE(!chevron::check(plan));
    std::mutex mutex;
    std::map<place, double> drawn;
    double loss = 0;
    chevron::run_threads({.pipeline_ranks = plan.size.ranks, .replicas = 2}, [&](transport& comm) {
      int const replica = comm.topology().replica();
      int pass = 0;
      auto const handler = [&](chevron::own_work const& work) {
        if (run == 3) std::this_thread::sleep_for(std::chrono::milliseconds((work.micro_batch + work.stage_number) % 2));
        double const number = at::rand({}, at::kDouble).item<double>() + at::rand({}, at::kDouble).item<double>();
        std::lock_guard const hold(mutex);
        drawn[{work.letter, work.stage_number, work.micro_batch, work.step, pass, replica}] = number;
      };
      chevron::trainer train(
          small_model::setup(plan, comm, [](int s) { return build_dropping_stage(s); }, {.seed = 7, .own_actions = handler}));
      for (int step = 0; step < 2; ++step) {
        auto const data = make_batch(8, 10 * step + replica);
        pass = 0;
        train.accumulate({data.input}, {data.target}, 32);
        pass = 1;
        auto const report = train.step({data.target}, {data.input}, 32);
        if (comm.topology().global_rank == 0) loss += report.loss;
      }
    });
    CHECK(drawn.size() == 2 * 2 * 2 * 2 * 2 * 2);
    if (run == 0) {
      first = drawn;
      for (auto const& [at, number] : drawn) distinct.insert(number);
    }
    CHECK((drawn == first));
    losses.push_back(loss);
  }
  CHECK(distinct.size() == first.size());
  // Drawing in an own action leaves dropout's numbers alone.
  for (double const loss : losses) CHECK(loss == losses[0]);
}

TEST_CASE(
    "functions of the batch draw equal numbers on all ranks of a pipeline, and an optimizer those of its step: runs repeat") {
  /// Rounds at random.
  struct noisy : torch::optim::SGD {
    using torch::optim::SGD::SGD;
    at::Tensor step(LossClosure closure = nullptr) override {
      at::NoGradGuard const off;
      for (auto& p : param_groups()[0].params()) p.mutable_grad().add_(at::randn_like(p), 1e-3);
      return torch::optim::SGD::step(closure);
    }
  };
  auto const make = [](std::vector<chevron::named_parameter> const& parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    tensors all;
    for (auto const& p : parameters) all.push_back(p.value);
    return std::make_unique<noisy>(all, 0.1);
  };
  std::vector<double> losses[4];
  for (int run = 0; run < 4; ++run) {
    std::mutex mutex;
    std::set<double> weights[2];
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      int const rank = comm.topology().global_rank;
      auto const weigh = [&, rank](chevron::batch const&) {
        double const weight = at::rand({}, at::kDouble).item<double>();
        std::lock_guard const hold(mutex);
        weights[rank].insert(weight);
        return weight;
      };
      chevron::trainer train(small_model::setup(plan_of("1F1B", 2, 4), comm, build_stage,
                                                {
                                                    .clip_grad_norm = run % 2 == 1 ? 0.3 : 1e9,
                                                    .loss_weight = weigh,
                                                },
                                                make));
      for (int step = 0; step < 4; ++step) {
        auto const data = make_batch(8, step);
        train.step({data.input}, {data.target});
        double const loss = train.synchronize().loss;
        if (rank == 0) losses[run].push_back(loss);
      }
    });
    CHECK(weights[0].size() == 16);
    CHECK(weights[0] == weights[1]);
  }
  CHECK(losses[0] == losses[2]);
  CHECK(losses[1] == losses[3]);
  CHECK(losses[0] != losses[1]);
}
