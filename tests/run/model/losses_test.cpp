// What a loss may be, and losses that stages add.

#include "support/gloo_ranks.hpp"
#include "support/small_model.hpp"

#include <memory>
#include <optional>

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/loss.h>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// Of two steps.
double first_loss(chevron::loss_function const& loss, at::Tensor const& target, builder const& build = build_stage) {
  double out = 0;
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    chevron::trainer train({.program = chevron::lower(chevron::prove(plan_of("ZB-H1", 2, 2))),
                            .transport = comm,
                            .stages = build,
                            .loss = loss,
                            .optimizer = sgd});
    double const got = train.step(make_batch(4, 1).input, target).loss;
    train.step(make_batch(4, 2).input, target);
    if (comm.topology().global_rank == 0) out = got;
  });
  return out;
}

/// A loss with a temperature that it learns.
struct tempered_impl : torch::nn::Module {
  tempered_impl() { temperature = register_parameter("temperature", at::full({}, 2.)); }
  at::Tensor forward(at::Tensor out, at::Tensor target) { return at::mse_loss(out * temperature, target); }
  at::Tensor temperature;
};

/// A layer behind a gate whose use is to be even.
struct gated_impl : torch::nn::Module {
  gated_impl() {
    layer = register_module("layer", torch::nn::Linear(width, width));
    gate = register_module("gate", torch::nn::Linear(width, 3));
  }
  std::pair<at::Tensor, at::Tensor> forward(at::Tensor x) {
    at::Tensor const share = gate(x).softmax(-1);
    return {layer(x).tanh() * share.select(-1, 0).unsqueeze(-1), 0.5 * share.mean(0).square().sum()};
  }
  torch::nn::Linear layer{nullptr}, gate{nullptr};
};

std::shared_ptr<gated_impl> make_gated(int number) {
  at::manual_seed(300 + number);
  return std::make_shared<gated_impl>();
}
chevron::stage build_gated(int number) {
  auto const module = make_gated(number);
  return {module, [module](at::Tensor x) {
            auto const [out, balance] = module->forward(x);
            return chevron::auxiliary_loss(out, balance);
          }};
}

using microbatches = std::vector<chevron::batch>;
microbatches uneven(int seed) {
  microbatches out;
  for (int m = 0; m < 4; ++m) {
    auto const b = make_batch(1 + (m + seed) % 3, 10 * seed + m);
    out.push_back({{b.input}, {b.target}});
  }
  return out;
}
double rows(microbatches const& pass) {
  double sum = 0;
  for (auto const& b : pass) sum += static_cast<double>(b.inputs[0].size(0));
  return sum;
}

constexpr int steps = 3, replicas = 2, passes = 2;
int seed_of(int step, int replica, int pass) { return 1 + pass + passes * (replica + replicas * step); }

/// The parameters after some steps in which each stage's balance is a term of the microbatch's loss.
std::vector<tensors> plain(chevron::plan const& plan) {
  std::vector<std::shared_ptr<gated_impl>> modules;
  std::vector<at::Tensor> all;
  for (int s = 0; s < plan.stages; ++s) {
    modules.push_back(make_gated(s));
    for (auto const& p : modules.back()->parameters()) all.push_back(p);
  }
  auto const optimizer = sgd(all);
  for (int step = 0; step < steps; ++step) {
    double total = 0;
    for (int r = 0; r < replicas; ++r) {
      for (int pass = 0; pass < passes; ++pass) total += rows(uneven(seed_of(step, r, pass)));
    }
    std::vector<std::vector<tensors>> sums(replicas);  // by replica and stage
    for (int r = 0; r < replicas; ++r) {
      for (auto const& m : modules) {
        sums[static_cast<std::size_t>(r)].emplace_back();
        for (auto const& p : m->parameters()) sums[static_cast<std::size_t>(r)].back().push_back(at::zeros_like(p));
      }
      for (int pass = 0; pass < passes; ++pass) {
        auto const parts = uneven(seed_of(step, r, pass));
        std::vector<std::vector<tensors>> each;
        for (auto const& b : parts) {
          for (auto const& m : modules) m->zero_grad();
          at::Tensor x = b.inputs[0], balances;
          for (auto const& m : modules) {
            auto const [out, balance] = m->forward(x);
            x = out;
            balances = balances.defined() ? balances + balance : balance;
          }
          at::Tensor const loss = mean_square(x, b.targets[0]) + balances;
          torch::autograd::backward({loss}, {at::full({}, static_cast<double>(b.inputs[0].size(0)) / total)});
          each.emplace_back();
          for (auto const& m : modules) {
            each.back().emplace_back();
            for (auto const& p : m->parameters()) each.back().back().push_back(p.grad().clone());
          }
        }
        for (std::size_t s = 0; s < modules.size(); ++s) {
          for (int const m : order_of(plan, static_cast<int>(s))) {
            for (std::size_t q = 0; q < each[0][s].size(); ++q)
              sums[static_cast<std::size_t>(r)][s][q] += each[static_cast<std::size_t>(m)][s][q];
          }
        }
      }
    }
    for (std::size_t s = 0; s < modules.size(); ++s) {
      auto const mine = modules[s]->parameters();
      for (std::size_t q = 0; q < mine.size(); ++q) mine[q].mutable_grad() = sums[0][s][q] + sums[1][s][q];
    }
    optimizer->step();
  }
  std::vector<tensors> out;
  for (auto const& m : modules) out.push_back(m->parameters());
  return out;
}

}  // namespace

TEST_CASE("a loss module is a loss, by its holder, its pointer or an AnyModule") {
  auto const target = make_batch(4, 1).target;
  double const expected = first_loss([](at::Tensor a, at::Tensor b) { return at::mse_loss(a, b); }, target);
  CHECK(expected > 0);
  CHECK(first_loss(torch::nn::MSELoss(), target) == expected);
  CHECK(first_loss(std::make_shared<torch::nn::MSELossImpl>(), target) == expected);
  CHECK(first_loss(torch::nn::AnyModule(torch::nn::MSELoss()), target) == expected);
  at::Tensor const classes = at::arange(4) % width, weights = at::arange(1, width + 1).to(at::kFloat);
  double const weighted =
      first_loss([&](at::Tensor out, at::Tensor wanted) { return at::cross_entropy_loss(out, wanted, weights); }, classes);
  CHECK(first_loss(torch::nn::CrossEntropyLoss(torch::nn::CrossEntropyLossOptions().weight(weights)), classes) == weighted);
}

TEST_CASE("an AnyModule is a stage") {
  auto const target = make_batch(4, 1).target;
  auto const layer = [](int s) {
    at::manual_seed(s);
    return torch::nn::Linear(width, width);
  };
  double const expected = first_loss(mean_square, target, [&](int s) { return chevron::stage(layer(s)); });
  CHECK(first_loss(mean_square, target, [&](int s) { return chevron::stage(torch::nn::AnyModule(layer(s))); }) == expected);
  CHECK(chevron::stage(torch::nn::AnyModule(layer(0))).parameters().size() == 2);
}

TEST_CASE("a loss module with parameters of its own is refused; one that the last stage registers learns") {
  auto const target = make_batch(4, 1).target;
  CHECK_THROWS_WITH_AS(first_loss(std::make_shared<tempered_impl>(), target),
                       doctest::Contains("stage 1 threw: it uses a parameter of sizes [] that it does not list"), chevron::error);
  auto const loss = std::make_shared<tempered_impl>();
  auto const build = [&](int s) -> chevron::stage {
    at::manual_seed(s);
    torch::nn::Linear layer(width, width);
    if (s == 0) return layer;
    auto const both = std::make_shared<torch::nn::Module>();
    both->register_module("layer", layer.ptr());
    both->register_module("loss", loss);
    return {both, [layer](at::Tensor x) mutable { return layer(x); }};
  };
  CHECK(first_loss(loss, target, build) > 0);
  CHECK(loss->temperature.item<double>() != 2);
}

TEST_CASE("an auxiliary loss of a stage has the gradient of a term of the loss, to the last bit") {
  at::set_num_threads(1);
  for (char const* name : {"1F1B", "ZB-H1", "ZBVZeroBubble"}) {
    auto const plan = plan_of(name, 2, 4);
    auto const program = chevron::lower(chevron::prove(plan));
    auto const expected = plain(plan);
    for (bool const recompute : {false, true}) {
      for (bool const scaled : {false, true}) {
        complaints wrong;
        auto const rank = [&](transport& comm) {
          chevron::trainer_options options{.post_validation = recompute, .stable_steps = 0};
          if (scaled) options.scaling = chevron::loss_scaling{.initial = 64};
          chevron::trainer train({.program = program,
                                  .transport = comm,
                                  .stages = [&](int s) { return build_gated(s).recompute(recompute); },
                                  .loss = mean_square,
                                  .optimizer = sgd,
                                  .options = options});
          int const r = comm.topology().replica();
          for (int step = 0; step < steps; ++step) {
            double total = 0;
            for (int other = 0; other < replicas; ++other) {
              for (int pass = 0; pass < passes; ++pass) total += rows(uneven(seed_of(step, other, pass)));
            }
            train.accumulate(uneven(seed_of(step, r, 0)), total);
            train.step(uneven(seed_of(step, r, 1)), total);
          }
          train.synchronize();
          for (std::size_t s = 0; s < train.stages().size(); ++s) {
            auto const& mine = train.stages()[s].parameters();
            for (std::size_t q = 0; q < mine.size(); ++q)
              wrong.require(at::equal(mine[q].value, expected[s][q]),
                            std::string(name) + " stage " + std::to_string(s) + " " + mine[q].name);
          }
        };
        if (scaled) {
          gloo_ranks::check_all_well(gloo_ranks::on_ranks(2, replicas, gloo_ranks::all_share, rank));
        } else {
          chevron::run_threads({.pipeline_ranks = 2, .replicas = replicas}, rank);
        }
        for (auto const& w : wrong.all) FAIL_CHECK(w);
      }
    }
  }
}

TEST_CASE("a step that is done over weighs an auxiliary loss as it did, with the factor of then") {
  at::set_num_threads(1);
  auto const program = chevron::lower(chevron::prove(plan_of("ZB-H1", 2, 4)));
  std::vector<double> losses[2];
  for (bool const early : {false, true}) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train({.program = program,
                              .transport = comm,
                              .stages = build_gated,
                              .loss = mean_square,
                              .optimizer = sgd,
                              .options = {.clip_grad_norm = 0.1,
                                          .scaling = chevron::loss_scaling{.initial = 64, .growth_interval = 2},
                                          .post_validation = early,
                                          .stable_steps = 0}});
      for (int step = 0; step < 6; ++step) {
        train.step(uneven(step + 1));
        double const loss = train.synchronize().loss;
        if (comm.topology().global_rank == 0) losses[early].push_back(loss);
      }
    });
  }
  CHECK(losses[0].size() == 6);
  CHECK(losses[0] == losses[1]);
}

TEST_CASE("an auxiliary loss outside of a step is a term of the loss; what cannot be weighed, or is no number, says why") {
  at::Tensor const x = at::ones({2, 2}), w = at::full({}, 3.).requires_grad_();
  at::Tensor const y = chevron::auxiliary_loss(x, w.square());
  CHECK(at::equal(y, x));
  y.sum().backward();
  CHECK(w.grad().item<double>() == 6);
  {
    at::NoGradGuard const off;
    CHECK(chevron::auxiliary_loss(x, w.square()).is_same(x));
  }
  CHECK_THROWS_WITH_AS(chevron::auxiliary_loss(x, x),
                       "an auxiliary loss is one number, the mean over the microbatch, not a tensor of 4 elements",
                       chevron::usage_error);

  auto const b = make_batch(4, 1);
  CHECK_THROWS_WITH_AS(
      chevron::run_threads({.pipeline_ranks = 3},
                           [&](transport& comm) {
                             chevron::trainer train({.program = chevron::lower(chevron::prove(plan_of("1F1B", 3, 2))),
                                                     .transport = comm,
                                                     .stages = build_gated,
                                                     .loss = mean_square,
                                                     .optimizer = sgd});
                             comm.topology().pipeline_rank() == 1 ? train.step() : train.step(b.input, b.target);
                           }),
      doctest::Contains("stage 1 threw: an auxiliary loss weighs what its microbatch counts in the step, and this rank "
                        "was not given what tells"),
      chevron::error);
}
