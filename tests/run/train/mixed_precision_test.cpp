// timeout: 90
#include "support/gloo_ranks.hpp"
#include "support/half_model.hpp"

#include <array>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <limits>

#include <chevron/checkpoint/checkpoint.hpp>

#include <doctest/doctest.h>

using namespace half_model;

TEST_CASE("half-precision parameters: gradients are added in single precision, bit for bit as by plain autograd") {
  at::set_num_threads(1);
  for (char const* name : schedules) {
    for (auto const dtype : {at::kBFloat16, at::kHalf}) {
      for (double const factor : {1.0, 1024.0}) {
        CAPTURE(name);
        auto const plan = plan_of(name, 2, 4);
        std::vector<batch> data;
        for (int step = 0; step < 6; ++step) {
          data.push_back(make_batch(9, 50 + step));
          data.back().input = data.back().input.to(dtype);
        }
        half_reference whole(plan.stages, dtype);
        // In half precision AdamW's epsilon is 0.
        auto const& make = dtype == at::kHalf ? sgd : adamw;
        auto const optimizer = make(whole.parameters());
        std::vector<double> losses, norms;
        for (auto const& b : data) {
          whole.run(plan, b, factor);
          losses.push_back(whole.loss);
          norms.push_back(whole.norm);
          optimizer->step();
        }
        for (bool const early : {false, true}) {
          complaints wrong;
          chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
            chevron::trainer_options options{.post_validation = early, .stable_steps = 0};
            if (factor != 1) options.scaling = chevron::loss_scaling{.initial = factor};
            chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                                    .transport = comm,
                                    .stages = [&](int s) { return build_half(s, dtype); },
                                    .loss = mean_square_in_float,
                                    .optimizer = make,
                                    .options = options});
            for (std::size_t i = 0; i < data.size(); ++i) {
              train.step({data[i].input}, {data[i].target});
              auto const report = train.synchronize();
              std::string const where = std::string(name) + ", step " + std::to_string(i) + ": ";
              wrong.require(report.loss == losses[i],
                            where + "loss " + std::to_string(report.loss) + " instead of " + std::to_string(losses[i]));
              wrong.require(report.grad_norm == norms[i], where + "norm");
              wrong.require(report.loss_factor == factor, where + "factor");
            }
            for (std::size_t s = 0; s < train.stages().size(); ++s) {
              auto const& mine = train.stages()[s].parameters();
              for (std::size_t q = 0; q < mine.size(); ++q) {
                wrong.require(at::equal(mine[q].value, whole.stages[s].parameters()[q].value),
                              std::string(name) + ": parameter " + mine[q].name);
                wrong.require(at::equal(mine[q].value.grad(), whole.stages[s].parameters()[q].value.grad()),
                              std::string(name) + ": gradient");
              }
            }
          });
          for (auto const& w : wrong.all) FAIL_CHECK(w);
        }
      }
    }
  }
}

TEST_CASE("autocast: parameters in single precision, matrix products in half, as in the un-pipelined model") {
  at::set_num_threads(1);
  for (char const* name : schedules) {
    for (bool const recompute : {false, true}) {
      auto const plan = plan_of(name, 2, 3);
      auto const data = make_batch(8, 3);
      half_reference whole(plan.stages, at::kFloat), single(plan.stages, at::kFloat);
      whole.run(plan, data, 1, at::kBFloat16);
      single.run(plan, data, 1);
      CHECK(whole.loss != single.loss);
      complaints wrong;
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        auto const build = [&](int s) { return build_half(s, at::kFloat).recompute(recompute); };
        chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                                .transport = comm,
                                .stages = build,
                                .loss = mean_square_in_float,
                                .optimizer = sgd,
                                .options = {.autocast = at::kBFloat16}});
        chevron::evaluator evaluate(chevron::lower(chevron::prove(chevron::forward_part(plan))), train);
        wrong.require(evaluate.loss({data.input}, {data.target}) == whole.loss, std::string(name) + ": evaluation");
        auto const report = train.step({data.input}, {data.target});
        wrong.require(report.loss == whole.loss && report.grad_norm == whole.norm, std::string(name) + ": loss or norm");
        for (std::size_t s = 0; s < train.stages().size(); ++s) {
          auto const& mine = train.stages()[s].parameters();
          for (std::size_t q = 0; q < mine.size(); ++q) {
            wrong.require(mine[q].value.scalar_type() == at::kFloat && at::equal(mine[q].value.grad(), whole.sums[s][q]),
                          std::string(name) + ": gradient of stage " + std::to_string(s));
          }
        }
        wrong.require(!at::autocast::is_autocast_enabled(at::kCPU), "autocast is off outside of stages");
      });
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    }
  }
}

TEST_CASE("autocast to a dtype that PyTorch's autocast does not have is refused") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 1, 2)));
  chevron::run_threads({}, [&](transport& comm) {
    for (auto const dtype : {at::kInt, at::kDouble}) {
      auto const made = [&] {
        chevron::trainer({.program = program,
                          .transport = comm,
                          .stages = [](int s) { return build_half(s, at::kFloat); },
                          .loss = mean_square_in_float,
                          .optimizer = sgd,
                          .options = {.autocast = dtype}});
      };
      std::string const says = std::string("autocast is ") + c10::toString(dtype) + ": give at::kBFloat16 or at::kHalf";
      CHECK_THROWS_WITH_AS(made(), doctest::Contains(says.c_str()), chevron::usage_error);
    }
  });
}

TEST_CASE("the factor of the loss goes down by itself until gradients fit, and up again; no parameter sees an overflow") {
  auto const program = chevron::lower(chevron::prove(plan_of("ZBVZeroBubble", 2, 3)));
  auto const data = make_batch(6, 1);
  std::vector<double> factors[2];
  std::vector<bool> skipped[2];
  for (bool const early : {false, true}) {
    chevron::run_threads({.pipeline_ranks = 2, .rendezvous = true}, [&](transport& comm) {
      chevron::trainer_options options{.post_validation = early, .stable_steps = 0};
      options.scaling = chevron::loss_scaling{.initial = 1ull << 24, .growth_interval = 5};
      chevron::trainer train({.program = program,
                              .transport = comm,
                              .stages = [](int s) { return build_half(s, at::kHalf); },
                              .loss = mean_square_in_float,
                              .optimizer = sgd,
                              .options = options});
      for (int step = 0; step < 40; ++step) {
        train.step({data.input.to(at::kHalf)}, {data.target});
        auto const report = train.synchronize();
        if (comm.topology().global_rank != 0) continue;
        factors[early].push_back(report.loss_factor);
        skipped[early].push_back(report.skipped);
        if (!std::isfinite(report.loss)) throw std::runtime_error("the loss itself is finite");
      }
      for (auto& s : train.stages()) {
        for (auto& p : s.parameters()) {
          if (!p.value.isfinite().all().item<bool>()) throw std::runtime_error("a parameter saw an overflow");
        }
      }
    });
  }
  CHECK(factors[0] == factors[1]);
  CHECK(skipped[0] == skipped[1]);
  CHECK(skipped[0][0]);
  int calm = 0, grown = 0;
  for (std::size_t i = 0; i + 1 < factors[0].size(); ++i) {
    if (skipped[0][i]) {
      CHECK(factors[0][i + 1] == factors[0][i] / 2);
      calm = 0;
    } else if (++calm == 5) {
      CHECK(factors[0][i + 1] == factors[0][i] * 2);
      calm = 0;
      ++grown;
    } else {
      CHECK(factors[0][i + 1] == factors[0][i]);
    }
  }
  CHECK(grown > 1);
}

TEST_CASE("a resumed run goes on with the factor it had") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  auto const data = make_batch(4, 1);
  std::string name = (std::filesystem::temp_directory_path() / "chevron-scale-XXXXXX").string();
  std::filesystem::path const folder = ::mkdtemp(name.data());
  std::vector<double> factors[2];
  for (bool const resumed : {false, true}) {
    for (int part = 0; part < 2; ++part) {
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        chevron::trainer train({.program = program,
                                .transport = comm,
                                .stages = [](int s) { return build_half(s, at::kHalf); },
                                .loss = mean_square_in_float,
                                .optimizer = sgd,
                                .options = {.scaling = chevron::loss_scaling{.initial = 1 << 20, .growth_interval = 4}}});
        if (resumed && part == 1) chevron::load_checkpoint(train, folder);
        for (int step = 0; step < (resumed ? 9 : part * 18); ++step) {
          auto const report = train.step({data.input.to(at::kHalf)}, {data.target});
          if (comm.topology().global_rank == 0) factors[resumed].push_back(report.loss_factor);
        }
        if (resumed && part == 0) chevron::save_checkpoint(train, folder);
      });
    }
  }
  std::filesystem::remove_all(folder);
  REQUIRE(factors[0].size() == 18);
  CHECK(factors[0] == factors[1]);
  CHECK(factors[0][8] != factors[0][17]);
}

TEST_CASE("a loss that is not finite is not the factor's fault, nor is an overflow at the least factor") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  auto const run = [&](bool bad_loss) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      auto data = make_batch(4, 1);
      if (bad_loss) data.target[0][0] = std::numeric_limits<float>::infinity();
      // A gradient that no factor helps.
      auto const loss = [&](at::Tensor a, at::Tensor b) {
        return mean_square(a, b) + (bad_loss ? 0.0 : 1.0) * (a.detach() - a).sum().sqrt();
      };
      chevron::trainer train({.program = program,
                              .transport = comm,
                              .stages = build_stage,
                              .loss = loss,
                              .optimizer = sgd,
                              .options = {.scaling = chevron::loss_scaling{.initial = 4}}});
      for (int step = 0; step < 6; ++step) train.step({data.input}, {data.target});
    });
  };
  CHECK_THROWS_WITH_AS(run(true),
                       doctest::Contains("step 0, OPTIMIZER_STEP: the loss of microbatch 0, unlike 1 other, is not finite"),
                       chevron::numerical_error);
  CHECK_THROWS_WITH_AS(run(false), doctest::Contains("step 2, OPTIMIZER_STEP: the gradient of stage 1's"),
                       chevron::numerical_error);
}

TEST_CASE("a gradient that fits single precision but not the parameter's is an overflow, unless it is clipped") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  auto const data = make_batch(4, 1);
  for (auto const dtype : {at::kHalf, at::kBFloat16, at::kFloat}) {
    for (double const clip : {0.0, 1.0}) {
      std::atomic<int> skipped = 0, finite = 0;
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        // A microbatch's gradient is 50,000, that of all four 200,000.
        auto const build = [&](int s) -> chevron::stage {
          at::manual_seed(s);
          auto weight = at::ones({width}).to(dtype).requires_grad_();
          if (s == 1) return {[weight](at::Tensor x) { return x + weight; }, {{"weight", weight}}};
          return {[weight](at::Tensor x) { return x * weight.to(at::kFloat).detach() + (weight * 4e4).to(at::kFloat); },
                  {{"weight", weight}}};
        };
        auto const loss = [](at::Tensor a, at::Tensor) { return a.sum() * 2.5; };
        chevron::trainer train({.program = program,
                                .transport = comm,
                                .stages = build,
                                .loss = loss,
                                .optimizer = sgd,
                                .options = {.clip_grad_norm = clip, .when_not_finite = chevron::not_finite::skip}});
        train.accumulate({data.input}, {data.target}, 8);
        auto const report = train.step({data.input}, {data.target}, 8);
        skipped += report.skipped ? 1 : 0;
        for (auto& s : train.stages()) {
          for (auto& p : s.parameters()) finite += p.value.isfinite().all().item<bool>() ? 1 : 0;
        }
      });
      CAPTURE(c10::toString(dtype));
      CAPTURE(clip);
      CHECK(skipped == (dtype == at::kHalf && clip == 0 ? 2 : 0));
      CHECK(finite == 2);
    }
  }
}

TEST_CASE("what is no scaling is refused before the first step, and ranks that scale otherwise are told apart") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  auto const build_with = [&](chevron::loss_scaling const& first, chevron::loss_scaling const& second) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(
          small_model::setup(program, comm, build_stage, {.scaling = comm.topology().global_rank == 0 ? first : second}));
    });
  };
  double const nan = std::numeric_limits<double>::quiet_NaN();
  for (chevron::loss_scaling const bad : {chevron::loss_scaling{.initial = 0},
                                          {.initial = nan},
                                          {.growth = 0.5},
                                          {.backoff = 1},
                                          {.growth_interval = 0},
                                          {.least = 0},
                                          {.most = 2}}) {
    CHECK_THROWS_WITH_AS(build_with(bad, bad), doctest::Contains("loss scaling's"), chevron::usage_error);
  }
  CHECK_THROWS_WITH_AS(build_with({}, {.growth_interval = 100}),
                       doctest::Contains("loss scaling: from 65536 between 1 and 16777216, times 2 after 100 steps"),
                       chevron::preflight_error);
  build_with({.initial = 4}, {.initial = 4});
}

TEST_CASE("complex parameters train on several replicas: threads, Gloo and shared memory give the same bits") {
  auto const program = chevron::lower(chevron::prove(plan_of("ZB-H1", 2, 2)));
  struct complex_layer : torch::nn::Module {
    complex_layer() { weight = register_parameter("weight", at::complex(at::randn({width, width}), at::randn({width, width}))); }
    at::Tensor forward(at::Tensor x) { return at::real(x.to(at::kComplexFloat).matmul(weight)).tanh(); }
    at::Tensor weight;
  };
  auto const train_on = [&](transport& comm) {
    auto const build = [](int s) -> chevron::stage {
      at::manual_seed(70 + s);
      return std::make_shared<complex_layer>();
    };
    chevron::trainer train(small_model::setup(program, comm, build));
    auto const data = make_batch(4, 9 + comm.topology().replica());
    double norm = 0;
    for (int step = 0; step < 3; ++step) norm = train.step({data.input}, {data.target}).grad_norm;
    return norm;
  };
  std::array<double, 4> by_threads{};
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
    by_threads[static_cast<std::size_t>(comm.topology().global_rank)] = train_on(comm);
  });
  CHECK(by_threads[0] > 0);
  for (bool const shared : {false, true}) {
    std::array<double, 4> norms{};
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(
        2, 2, [=](int) { return shared; },
        [&](chevron::gloo_transport& comm) { norms[static_cast<std::size_t>(comm.topology().global_rank)] = train_on(comm); }));
    CHECK(norms == by_threads);
  }
}

TEST_CASE("learning rates go up, and down again") {
  chevron::warm_up_cosine const cosine{.highest = 1, .warm_up = 10, .steps = 110, .lowest = 0.1};
  chevron::warm_up_linear const linear{.highest = 1, .warm_up = 10, .steps = 110, .lowest = 0.1};
  for (auto const& rate : {std::function<double(long)>(cosine), std::function<double(long)>(linear)}) {
    CHECK(rate(0) == doctest::Approx(0.1));
    CHECK(rate(4) == doctest::Approx(0.5));
    CHECK(rate(9) == doctest::Approx(1));
    CHECK(rate(59) == doctest::Approx(0.55));
    CHECK(rate(109) == doctest::Approx(0.1));
    CHECK(rate(500) == doctest::Approx(0.1));
    for (long step = 1; step < 109; ++step) CHECK((step < 10 ? rate(step) > rate(step - 1) : rate(step) < rate(step - 1)));
  }
  CHECK(cosine(34) > linear(34));
  CHECK(chevron::warm_up_linear{.highest = 2, .steps = 1}(0) == 2);
}

namespace {

/// Counts its calls, and checks that it sees a gradient.
struct counting_hook final : torch::autograd::PostAccumulateGradHook {
  std::atomic<int>* calls;
  explicit counting_hook(std::atomic<int>& of) : calls(&of) {}
  void operator()(at::Tensor const& p) override {
    if (p.grad().defined()) ++*calls;
  }
};

}  // namespace

TEST_CASE("half-precision parameters: a user's hook is called for each microbatch, and is the parameter's again afterwards") {
  at::set_num_threads(1);
  for (bool const late : {false, true}) {  // registered after the trainer was made
    CAPTURE(late);
    constexpr int ranks = 2, micro_batches = 4;
    std::array<std::atomic<int>, ranks> calls{};
    complaints wrong;
    auto const plan = plan_of("1F1B", ranks, micro_batches);
    auto data = make_batch(8, 50);
    data.input = data.input.to(at::kBFloat16);
    half_reference whole(plan.stages, at::kBFloat16);
    whole.run(plan, data, 1);
    std::vector<chevron::stage> stages;
    for (int s = 0; s < ranks; ++s) stages.push_back(build_half(s, at::kBFloat16));
    chevron::run_threads({.pipeline_ranks = ranks}, [&](transport& comm) {
      auto const rank = static_cast<std::size_t>(comm.topology().global_rank);
      at::Tensor const weight = stages[rank].parameters()[0].value;
      auto const hook = [&] {
        torch::autograd::impl::set_post_acc_grad_hooks(weight, std::make_unique<counting_hook>(calls[rank]));
      };
      if (!late) hook();
      {
        chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                                .transport = comm,
                                .stages = [&](int s) { return stages[static_cast<std::size_t>(s)]; },
                                .loss = mean_square_in_float,
                                .optimizer = sgd});
        if (late) hook();
        wrong.require(train.step({data.input}, {data.target}).grad_norm == whole.norm, "another gradient than without a hook");
      }
      wrong.require(calls[rank] == micro_batches, "rank " + std::to_string(rank) + ": " + std::to_string(calls[rank]) + " calls");
      wrong.require(dynamic_cast<counting_hook*>(torch::autograd::impl::post_acc_grad_hooks(weight).get()) != nullptr,
                    "the hook was not given back");
    });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
    CHECK(wrong.all.empty());
  }
}
