// Calls between two steps that only a loop without a trainer makes: the optimizer stepped again, parameters added to it or to a
// module, parameters written while they are gathered, accumulated gradients dropped.

#include "support/sharded_training.hpp"
#include "support/small_model.hpp"

#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>

#include <chevron/run/train/evaluator.hpp>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

using between = std::function<void(chevron::trainer&, long step)>;

/// Trains four steps on 2 pipeline ranks, and calls `after` after each. \returns rank 0's error; empty: none
std::string refusal(chevron::optimizer_factory const& make, between const& after, chevron::trainer_options const& options = {},
                    int replicas = 1, builder const& build = build_stage) {
  std::string said;
  std::mutex guard;
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  try {
    chevron::run_threads({.pipeline_ranks = 2, .replicas = replicas}, [&](transport& comm) {
      try {
        chevron::trainer train(small_model::setup(program, comm, build, options, make));
        for (long step = 0; step < 4; ++step) {
          auto const data = make_batch(8, static_cast<int>(10 * step) + comm.topology().replica());
          train.step(data.input, data.target);
          after(train, step);
        }
        train.synchronize();
      } catch (chevron::usage_error const& e) {
        std::lock_guard const hold(guard);
        if (said.empty()) said = e.what();
        throw;
      }
    });
  } catch (chevron::error const& e) {
    if (said.empty()) said = e.what();
  }
  return said;
}

std::vector<std::pair<std::string, chevron::optimizer_factory>> const optimizers = {
    {"SGD", sgd},
    {"SGD with weight decay", chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1).weight_decay(0.1))},
    {"SGD with momentum", chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9))},
    {"SGD with Nesterov's momentum",
     chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true))},
    {"Adam", chevron::optimizer<torch::optim::Adam>(torch::optim::AdamOptions(1e-2))},
    {"AdamW", adamw},
    {"RMSprop", chevron::optimizer<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3))},
    {"Adagrad", chevron::optimizer<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2))},
    {"fused AdamW", chevron::optimizer<chevron::fused_adamw>(torch::optim::AdamWOptions(1e-2))},
    {"fused SGD", chevron::optimizer<chevron::fused_sgd>(torch::optim::SGDOptions(0.1))}};

void each_parameter(chevron::trainer& train, std::function<void(at::Tensor)> const& see) {
  at::NoGradGuard const off;
  for (auto& s : train.stages()) {
    for (auto const& p : s.parameters()) see(p.value);
  }
}

}  // namespace

TEST_CASE("an optimizer that the caller steps again after a step is found, of every class") {
  for (auto const& [name, make] : optimizers) {
    CAPTURE(name);
    std::string const said = refusal(make, [](chevron::trainer& t, long step) {
      if (step == 1) t.optimizer()->step();
    });
    CHECK(said.find("was stepped by a call of optimizer()->step() after step 1") != said.npos);
    CHECK(said.find("Remedy: no such call") != said.npos);
  }
}

TEST_CASE("what a caller may do with parameters, rates and states between two steps is refused for no optimizer") {
  for (auto const& [name, make] : optimizers) {
    CAPTURE(name);
    std::vector<std::pair<std::string, between>> const allowed = {
        {"nothing", [](chevron::trainer&, long) {}},
        {"clamp_", [](chevron::trainer& t, long) { each_parameter(t, [](at::Tensor p) { p.clamp_(-0.2, 0.2); }); }},
        {"data().mul_()", [](chevron::trainer& t, long) { each_parameter(t, [](at::Tensor p) { p.data().mul_(0.9); }); }},
        {"a rate", [](chevron::trainer& t, long k) { t.optimizer()->param_groups()[0].options().set_lr(0.01 / double(k + 1)); }},
        {"zero_grad and step", [](chevron::trainer& t, long) { t.optimizer()->zero_grad(), t.optimizer()->step(); }},
        {"a state cleared", [](chevron::trainer& t, long) { t.optimizer()->state().clear(); }},
        {"states scaled",
         [](chevron::trainer& t, long) {
           for (auto& [key, state] : t.optimizer()->state()) {
             for (at::Tensor const& one : chevron::detail::tensors_of(*state)) {
               if (one.defined()) one.detach().mul_(0.5);
             }
           }
         }},
        {"a parameter taken out of its group",
         [](chevron::trainer& t, long k) {
           if (k == 1) t.optimizer()->param_groups()[0].params().pop_back();
         }},
    };
    for (auto const& [what, call] : allowed) {
      CAPTURE(what);
      if (what == "a state cleared" && name == "Adagrad") continue;  // it cannot step without
      CHECK(refusal(make, call) == "");
    }
  }
}

TEST_CASE("a parameter that is added to the optimizer later is refused, with the group and its sizes") {
  between const grows = [](chevron::trainer& t, long step) {
    at::Tensor const more = at::zeros({3, 2}).requires_grad_();
    if (step == 1) t.optimizer()->add_param_group(torch::optim::OptimizerParamGroup({more}));
  };
  CHECK(refusal(adamw, grows).find("group 1 has a tensor of sizes [3, 2] that it did not have when the trainer was made") !=
        std::string::npos);
  between const pushed = [](chevron::trainer& t, long step) {
    if (step == 1) t.optimizer()->param_groups()[0].params().push_back(at::zeros({5}).requires_grad_());
  };
  CHECK(refusal(sgd, pushed, {}, 2).find("group 0 has a tensor of sizes [5]") != std::string::npos);
  between const twice = [](chevron::trainer& t, long step) {
    auto& all = t.optimizer()->param_groups()[0].params();
    if (step == 1) all.push_back(all.front());
  };
  CHECK(refusal(sgd, twice).find("which the groups contain twice") != std::string::npos);
}

TEST_CASE("a group's rate that no step can use is refused, as one that learning_rate gives") {
  for (double const bad : {std::nan(""), -1e-2, std::numeric_limits<double>::infinity(), 1e300}) {
    CAPTURE(bad);
    std::string const of_group = refusal(adamw, [bad](chevron::trainer& t, long step) {
      if (step == 1) t.optimizer()->param_groups()[0].options().set_lr(bad);
    });
    CHECK(of_group.find("group 0 of the optimizer has the learning rate") != of_group.npos);
    std::string const given = refusal(
        adamw, [](chevron::trainer&, long) {}, {.learning_rate = [bad](long step) { return step == 2 ? bad : 1e-2; }});
    CHECK(given.find("trainer_options::learning_rate gives") != given.npos);
    CHECK(given.find("Remedy: a number from 0 for each step") != given.npos);
  }
}

TEST_CASE("a rate that is infinite in float16 is refused where the optimizer steps parameters of float16") {
  builder const of_half = [](int s) {
    at::manual_seed(s);
    torch::nn::Linear inner(width, width);
    inner->to(at::kHalf);
    return chevron::stage(inner, [inner](at::Tensor x) mutable { return inner(x.to(at::kHalf)).to(at::kFloat); });
  };
  auto const by_hand = [](chevron::trainer& t, long step) {
    if (step == 1) t.optimizer()->param_groups()[0].options().set_lr(1e5);
  };
  std::string const words = "100000 for this step: in float16, the type of parameters, it is infinite";
  CHECK(refusal(sgd, by_hand, {}, 1, of_half).find("group 0 of the optimizer has the learning rate " + words) != std::string::npos);
  std::function<double(long)> const schedule = [](long step) { return step == 2 ? 1e5 : 1e-2; };
  CHECK(refusal(sgd, [](chevron::trainer&, long) {}, {.learning_rate = schedule}, 1, of_half)
            .find("trainer_options::learning_rate gives " + words) != std::string::npos);
  for (chevron::trainer_options const& options : {chevron::trainer_options{.master_parameters = true}, chevron::trainer_options{}})
    CHECK(refusal(sgd, by_hand, options, 1, options.master_parameters ? of_half : build_stage).find("float16") == std::string::npos);
}

TEST_CASE("parameters written while they are gathered: refused, with synchronize() as the remedy") {
  for (auto const shard : {chevron::sharding::optimizer, chevron::sharding::gradients}) {
    for (bool const masters : {false, true}) {
      CAPTURE(masters);
      chevron::trainer_options options{.shard = shard, .overlap_gather = true, .master_parameters = masters};
      builder const build = [masters](int s) {
        auto made = build_stage(s);
        for (auto const& p : made.parameters()) p.value.set_data(p.value.to(masters ? at::kBFloat16 : at::kFloat));
        auto const as = [](at::ScalarType t) { return chevron::stage([t](at::Tensor x) { return x.to(t); }); };
        return masters ? chevron::in_sequence({as(at::kBFloat16), made, as(at::kFloat)}) : made;
      };
      auto const clamp = [](at::Tensor p) { p.clamp_(-0.1, 0.1); };
      std::string const said =
          refusal(adamw, [&](chevron::trainer& t, long) { each_parameter(t, clamp); }, options, 2, build);
      CHECK(said.find("was changed after step 0, while the values that other replicas stepped are still being gathered") !=
            said.npos);
      CHECK(said.find("Remedy: trainer.synchronize() before the change") != said.npos);
      CHECK(refusal(adamw, [&](chevron::trainer& t, long) { t.synchronize(), each_parameter(t, clamp); }, options, 2, build) == "");
      // A call that waits for the gather finds the change.
      CHECK(refusal(adamw, [&](chevron::trainer& t, long) { each_parameter(t, clamp), t.check_copies(); }, options, 2, build)
                .find("was changed after step 0") != said.npos);
      CHECK(refusal(
                adamw,
                [&](chevron::trainer& t, long) {
                  each_parameter(t, clamp);
                  auto const data = make_batch(8, 1);
                  chevron::evaluator(t).loss(data.input, data.target);
                },
                options, 2, build)
                .find("was changed after step 0") != said.npos);
    }
  }
}

TEST_CASE("a parameter of another layout, gathered through a copy, is not taken for changed") {
  builder const build = [](int s) {
    at::manual_seed(s);
    at::Tensor const with_gaps = at::randn({width, 2 * width}).slice(1, 0, 2 * width, 2).requires_grad_();
    return chevron::stage([with_gaps](at::Tensor x) { return x.matmul(with_gaps); }, {{"gaps", with_gaps}});
  };
  CHECK(refusal(adamw, [](chevron::trainer&, long) {}, {.shard = chevron::sharding::optimizer, .overlap_gather = true}, 2,
                build) == "");
}

namespace {

struct replaced : torch::nn::Module {
  torch::nn::Linear a{nullptr};
  explicit replaced(int s) {
    at::manual_seed(s);
    a = register_module("a", torch::nn::Linear(width, width));
  }
  at::Tensor forward(at::Tensor x) { return a(x); }
};

/// A change of a module after step 0; `steps` are trained.
std::string refusal_of(std::function<void(replaced&)> const& change, int steps, bool saves = false) {
  std::string said;
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 1, 2)));
  try {
    chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
      std::shared_ptr<replaced> mine;
      chevron::trainer train(small_model::setup(program, comm, [&](int s) {
        mine = std::make_shared<replaced>(s);
        return chevron::stage(mine);
      }, {.check_copies = 5}));
      auto const data = make_batch(8, 1);
      for (int k = 0; k < steps; ++k) {
        train.step(data.input, data.target);
        if (k == 0) change(*mine);
      }
      if (saves) train.check_finite();
    });
  } catch (chevron::error const& e) {
    said = e.what();
  }
  return said;
}

}  // namespace

TEST_CASE("parameters that a module registers or replaces after the trainer was made are told") {
  auto const more = [](replaced& m) { m.register_parameter("extra", at::zeros({2})); };
  CHECK(refusal_of(more, 2).find("stage 0's extra was registered, removed or replaced since the trainer was made") !=
        std::string::npos);
  auto const other = [](replaced& m) { m.a = m.replace_module("a", torch::nn::Linear(width, width)); };
  CHECK(refusal_of(other, 2).find("stage 0's a.weight was registered, removed or replaced") != std::string::npos);
  CHECK(refusal_of(other, 1).empty());
  CHECK(refusal_of(other, 1, /*saves=*/true).find("a.weight was registered") != std::string::npos);
  // A tensor assigned to a member is in no list: it is seen as a leaf that two forwards share.
  auto const assigned = [](replaced& m) { m.a->weight = m.a->weight.detach().mul(0.5).set_requires_grad(true); };
  CHECK(refusal_of(assigned, 130).find("was assigned to a module's member after the trainer was made") != std::string::npos);
  CHECK(refusal_of([](replaced&) {}, 130).empty());
}

namespace {

class heard_of : public c10::WarningHandler {
 public:
  heard_of() : before_(c10::WarningUtils::get_warning_handler()) { c10::WarningUtils::set_warning_handler(this); }
  ~heard_of() override { c10::WarningUtils::set_warning_handler(before_); }
  void process(c10::Warning const& w) override { said += w.msg() + "\n"; }
  std::string said;

 private:
  c10::WarningHandler* before_;
};

std::string warning_of(chevron::optimizer_factory const& make, chevron::trainer_options const& options = {}) {
  std::string said;
  std::mutex guard;
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
    heard_of const ears;
    chevron::trainer train(small_model::setup(program, comm, build_stage, options, make));
    std::lock_guard const hold(guard);
    said += ears.said;
  });
  return said;
}

}  // namespace

TEST_CASE("trained parameters that the optimizer's factory leaves out are warned of once, with the first three names") {
  auto const leaves_out = [](std::string ending) {
    return chevron::optimizer_factory([ending](std::vector<chevron::named_parameter> const& all) {
      std::vector<at::Tensor> some;
      for (auto const& p : all) {
        if (!p.name.ends_with(ending)) some.push_back(p.value);
      }
      return std::make_unique<torch::optim::SGD>(some, torch::optim::SGDOptions(0.1));
    });
  };
  for (auto const shard : {chevron::sharding::nothing, chevron::sharding::optimizer}) {
    std::string const said = warning_of(leaves_out("bias"), {.shard = shard});
    CHECK(said.find("no group of the optimizers contains stage 0's 0.bias, stage 0's 1.bias, stage 1's 0.bias and 1 more: ") !=
          said.npos);
    CHECK(std::count(said.begin(), said.end(), '\n') == 1);
    CHECK(warning_of(leaves_out("none"), {.shard = shard}) == "");
  }
}

namespace {

/// A stage of one weight of `dtype` and, with `mixed`, a float32 bias.
chevron::stage weight_of(at::ScalarType dtype, bool mixed) {
  at::Tensor const w = at::full({1}, 2, dtype).requires_grad_(), b = at::zeros({1}).requires_grad_();
  std::vector<chevron::parameter> all{{"w", w}};
  if (mixed) all.push_back({"b", b});
  return chevron::stage([w, b, mixed](at::Tensor x) { return mixed ? x * w.to(at::kFloat) + b : x * w.to(at::kFloat); }, all);
}

/// The change of w after accumulate(100 x), `drop`, step(x).
double change_of(at::ScalarType dtype, bool mixed, std::function<void(chevron::trainer&)> const& drop) {
  double out = 0;
  auto const program = chevron::lower(chevron::prove(plan_of("GPipe", 1, 1)));
  chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
    chevron::trainer train({.program = program,
                            .transport = comm,
                            .stages = [&](int) { return weight_of(dtype, mixed); },
                            .loss = [](at::Tensor y, at::Tensor) { return y.mean(); },
                            .optimizer = sgd});
    at::Tensor const x = at::ones({2, 1});
    train.accumulate(x * 100, x, 4);
    drop(train);
    train.step(x, x, train.accumulating() ? 4 : 2);
    out = 2 - train.stages()[0].parameters()[0].value.item<double>();
  });
  return out;
}

}  // namespace

TEST_CASE("drop_accumulated drops the sums of all dtypes; zero_grad that would drop a half of them is refused") {
  auto const drops = [](chevron::trainer& t) {
    CHECK(t.accumulating());
    t.drop_accumulated();
    CHECK(!t.accumulating());
    t.drop_accumulated();
  };
  for (auto const dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (bool const mixed : {false, true}) {
      CAPTURE(mixed);
      double const kept = change_of(dtype, mixed, [](chevron::trainer&) {}), dropped = change_of(dtype, mixed, drops);
      CHECK(kept == doctest::Approx(0.1 * 101 / 2).epsilon(0.01));
      CHECK(dropped == doctest::Approx(0.1).epsilon(0.1));
    }
  }
  for (bool const to_none : {true, false}) {
    auto const zero = [to_none](chevron::trainer& t) { t.optimizer()->zero_grad(to_none); };
    CHECK(change_of(at::kFloat, true, zero) == doctest::Approx(0.05).epsilon(0.01));
    CHECK_THROWS_WITH_AS(change_of(at::kBFloat16, true, zero), doctest::Contains("keeps those in half precision"),
                         chevron::usage_error);
  }
}

TEST_CASE("ranks that do not drop alike are found in the step") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 2},
                                            [&](transport& comm) {
                                              chevron::trainer train(small_model::setup(program, comm));
                                              auto const data = make_batch(8, 1);
                                              train.accumulate(data.input, data.target, 16);
                                              if (comm.topology().global_rank == 0) train.drop_accumulated();
                                              train.step(data.input, data.target, 16);
                                            }),
                       doctest::Contains("has called step() and accumulate()"), chevron::preflight_error);
}
