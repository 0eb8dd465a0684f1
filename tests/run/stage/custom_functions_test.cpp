// A user's code in a backward: custom functions with effects, with a backward of their own inside, with random numbers; hooks.

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chevron/run/comm/threads/run_threads.hpp>
#include <chevron/run/stage/backward_scope.hpp>
#include <chevron/run/train/trainer.hpp>

#include "support/gloo_ranks.hpp"
#include "support/small_model.hpp"

#include <doctest/doctest.h>

using namespace small_model;

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// A product whose backward adds the weight's gradient to `.grad` itself, as fused kernels do, and gives autograd none.
struct accumulating_product : torch::autograd::Function<accumulating_product> {
  static at::Tensor forward(AutogradContext* context, at::Tensor x, at::Tensor w) {
    context->save_for_backward({x, w});
    return x.matmul(w);
  }
  static variable_list backward(AutogradContext* context, variable_list arriving) {
    auto const saved = context->get_saved_variables();
    at::NoGradGuard const off;
    at::Tensor const of_weight = saved[0].t().matmul(arriving[0]);
    at::Tensor& grad = saved[1].mutable_grad();
    if (grad.defined()) {
      grad.add_(of_weight);
    } else {
      grad = of_weight;
    }
    return {arriving[0].matmul(saved[1].t()), at::Tensor()};
  }
};

/// Activation checkpointing that runs the forward again in its backward, and a backward inside. The parameters of the forward are
/// not among its inputs; `dummy`, a parameter without use, makes its output need a gradient on stage 0, too.
struct reentrant_checkpoint : torch::autograd::Function<reentrant_checkpoint> {
  using body = std::function<at::Tensor(at::Tensor)>;
  static at::Tensor forward(AutogradContext* context, at::Tensor x, at::Tensor, std::int64_t run) {
    context->save_for_backward({x});
    context->saved_data["run"] = run;
    at::NoGradGuard const off;
    return (*reinterpret_cast<body*>(run))(x);
  }
  static variable_list backward(AutogradContext* context, variable_list arriving) {
    at::Tensor const x = context->get_saved_variables()[0].detach().requires_grad_();
    at::AutoGradMode const on(true);
    at::Tensor const y = (*reinterpret_cast<body*>(context->saved_data["run"].toInt()))(x);
    torch::autograd::backward({y}, {arriving[0]});
    return {x.grad(), at::Tensor(), at::Tensor()};
  }
};

/// Adds noise to the gradient, before and after a draw of another size.
struct noise : torch::autograd::Function<noise> {
  static at::Tensor forward(AutogradContext*, at::Tensor x) { return x.view_as(x); }
  static variable_list backward(AutogradContext*, variable_list arriving) {
    at::Tensor const first = arriving[0] + at::randn_like(arriving[0]) * 0.1;
    at::randn({3});
    return {first + at::randn_like(first) * 0.1};
  }
};

struct accumulating_impl : torch::nn::Module {
  at::Tensor w;
  accumulating_impl() { w = register_parameter("w", at::randn({width, width}) * 0.4); }
  at::Tensor forward(at::Tensor x) { return accumulating_product::apply(x, w).tanh(); }
};

struct checkpointed_impl : torch::nn::Module {
  torch::nn::Linear layer{width, width};
  at::Tensor dummy;
  reentrant_checkpoint::body run = [this](at::Tensor x) { return layer(x).tanh(); };
  checkpointed_impl() {
    register_module("layer", layer);
    dummy = register_parameter("dummy", at::zeros({1}));
  }
  at::Tensor forward(at::Tensor x) { return reentrant_checkpoint::apply(x, dummy, reinterpret_cast<std::int64_t>(&run)); }
};

/// Draws at every place of a backward: in functions on the way to the input, in one that only leads to a parameter, in hooks on a
/// tensor and on a parameter's gradient, and in a forward that a backward runs.
struct drawing_impl : torch::nn::Module {
  torch::nn::Linear first{width, width}, second{width, width};
  std::shared_ptr<checkpointed_impl> inner = std::make_shared<checkpointed_impl>();
  drawing_impl() {
    register_module("first", first);
    register_module("second", second);
    register_module("inner", inner);
    inner->run = [layer = inner->layer](at::Tensor x) mutable { return at::dropout(layer(x), 0.3, true); };
    first->weight.register_hook([](at::Tensor g) { return g + at::randn_like(g) * 0.1; });
    second->bias.register_hook([](at::Tensor g) { return g + at::randn_like(g) * 0.1; });
  }
  at::Tensor forward(at::Tensor x) {
    x = noise::apply(first(x).tanh());
    if (x.requires_grad()) x.register_hook([](at::Tensor g) { return g + at::randn_like(g) * 0.1; });
    x = at::linear(x, noise::apply(second->weight), second->bias);
    return inner->forward(noise::apply(x.tanh())) + at::dropout(x, 0.2, true);
  }
};

template <class Module>
chevron::stage made(int number, bool recomputed = false) {
  at::manual_seed(300 + number);
  chevron::stage one = std::make_shared<Module>();
  one.recompute(recomputed);
  return one;
}

/// Checks that one step under each schedule has the results of the un-pipelined model, bit for bit, on threads and over Gloo.
void compare_schedules(builder const& plain, builder const& pipelined) {
  at::set_num_threads(1);
  for (char const* name : {"GPipe", "1F1B", "ZB-H1", "ZBVZeroBubble"}) {
    auto const plan = plan_of(name, 2, 4);
    auto const data = make_batch(9, 4);
    reference whole(plan.stages, plain);
    whole.run(plan, {data});
    complaints wrong;
    auto const rank = [&](transport& comm) { compare_one_step(comm, plan, data, whole, wrong, pipelined); };
    chevron::run_threads({.pipeline_ranks = 2}, rank);
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(2, 1, gloo_ranks::all_share, rank));
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}
void compare_schedules(builder const& build) { compare_schedules(build, build); }

/// A plain step with noise: Langevin dynamics.
struct noisy_optimizer final : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    at::NoGradGuard const off;
    for (at::Tensor& p : param_groups().front().params()) p.add_(at::randn_like(p), 0.01);
    return SGD::step(closure);
  }
};

/// Each rank's parameters after some steps.
std::vector<tensors> after_steps(char const* name, chevron::optimizer_factory const& optimizer,
                                 chevron::trainer_options const& options) {
  auto const plan = plan_of(name, 2, 4);
  std::vector<tensors> of(4);
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm, build_stage, options, optimizer));
    for (int step = 0; step < 3; ++step) {
      auto const data = make_batch(8, 2 * step + comm.topology().replica());
      train.step({data.input}, {data.target});
    }
    tensors& mine = of[static_cast<std::size_t>(2 * comm.topology().replica() + comm.topology().pipeline_rank())];
    for (auto& s : train.stages()) {
      for (auto const& p : s.parameters()) mine.push_back(p.value.detach().clone());
    }
  });
  return of;
}

bool equal(tensors const& a, tensors const& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](at::Tensor const& x, at::Tensor const& y) { return at::equal(x, y); });
}

}  // namespace

TEST_CASE("a backward with an effect of its own has it once under every schedule") {
  compare_schedules([](int s) { return made<accumulating_impl>(s); });
}

TEST_CASE("a reentrant checkpoint has one backward under every schedule") {
  compare_schedules([](int s) { return made<checkpointed_impl>(s); });
}

TEST_CASE("what a backward draws depends on neither schedule nor recomputation nor on what was drawn before") {
  auto const build = [](int s) { return made<drawing_impl>(s); };
  SUBCASE("kept") { compare_schedules(build); }
  SUBCASE("recomputed") {
    compare_schedules(build, [](int s) { return made<drawing_impl>(s, true); });
  }
}

TEST_CASE("what before_optimizer_step or an optimizer draws is the same in each run, under each schedule, on each replica") {
  at::set_num_threads(1);
  chevron::trainer_options options;
  chevron::optimizer_factory optimizer = sgd;
  SUBCASE("before_optimizer_step") {
    options.before_optimizer_step = [](chevron::final_gradients const& g) {
      for (auto const& p : g.parameters) p.value.grad().add_(at::randn_like(p.value.grad()), 0.1);
    };
  }
  SUBCASE("an optimizer") {
    optimizer = [](std::vector<at::Tensor> all) {
      return std::make_unique<noisy_optimizer>(std::move(all), torch::optim::SGDOptions(0.1));
    };
  }
  at::manual_seed(1);
  auto const first = after_steps("1F1B", optimizer, options);
  CHECK(equal(first[0], first[2]));
  CHECK(equal(first[1], first[3]));
  CHECK_FALSE(equal(first[0], after_steps("1F1B", sgd, {})[0]));
  options.seed = 1;
  CHECK_FALSE(equal(first[0], after_steps("1F1B", optimizer, options)[0]));
  options.seed = 0;
  at::manual_seed(2);
  for (char const* name : {"1F1B", "ZB-H1"}) {
    auto const again = after_steps(name, optimizer, options);
    for (std::size_t r = 0; r < again.size(); ++r) CHECK(equal(again[r], first[r]));
  }
}

TEST_CASE("nodes have streams of their own, and a forward the one that its six numbers always chose") {
  constexpr chevron::rng_key forward{1, 2, 3, 4, 5, 6};
  static_assert(chevron::stream_of(forward) == 0xc4e4ea1865537a3f);
  std::vector<std::uint64_t> seeds{chevron::stream_of(forward)};
  for (auto const use :
       {chevron::random_use::backward, chevron::random_use::backward_weight, chevron::random_use::optimizer_step}) {
    for (std::uint64_t node = 0; node < 100; ++node) {
      chevron::rng_key key = forward;
      key.use = use;
      key.node = node;
      seeds.push_back(chevron::stream_of(key));
    }
  }
  std::sort(seeds.begin(), seeds.end());
  CHECK(std::adjacent_find(seeds.begin(), seeds.end()) == seeds.end());

  // A node that runs again continues its stream of random numbers, and leaves the numbers of other nodes unchanged.
  at::Tensor const w = at::ones({4}).requires_grad_();
  chevron::node_places places;
  at::Tensor y;
  {
    chevron::random_scope const scope(forward, {}, &places);
    y = noise::apply(noise::apply(w * 1) * 1);
  }
  std::vector<tensors> twice;
  for (int run = 0; run < 2; ++run) {
    twice.emplace_back();
    chevron::backward_scope const scope(places);
    if (run == 1) at::rand({7});
    for (int again = 0; again < 2; ++again) {
      w.mutable_grad().reset();
      y.sum().backward({}, /*retain_graph=*/true);
      twice.back().push_back(w.grad().clone());
    }
    CHECK(scope.drew());
  }
  CHECK(equal(twice[0], twice[1]));
  CHECK_FALSE(at::equal(twice[0][0], twice[0][1]));
}
