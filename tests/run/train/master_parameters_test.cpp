// timeout: 300
// Float32 masters of half-precision parameters, without shares: beside a plain loop that keeps float32 copies.
#include "support/half_model.hpp"
#include "support/rank_ends.hpp"

#include <atomic>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/adagrad.h>

#include <chevron/run/train/fused_optimizers.hpp>

#include <doctest/doctest.h>

using namespace half_model;

namespace {

auto const momentum = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
auto const slow_adamw = chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3));

std::map<std::string, chevron::optimizer_factory> const optimizers{
    {"SGD", momentum},
    {"AdamW", slow_adamw},
    {"Adagrad", chevron::optimizer<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2).initial_accumulator_value(0.1))},
    {"fused AdamW", chevron::optimizer<chevron::fused_adamw>(torch::optim::AdamWOptions(1e-3).weight_decay(0.1))},
    {"fused SGD", chevron::optimizer<chevron::fused_sgd>(torch::optim::SGDOptions(0.05).momentum(0.9))}};

/// The plain loop: float32 copies, stepped with float32 sums of gradients, and rounded.
struct master_loop {
  half_reference whole;
  tensors masters;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  double clip;

  master_loop(chevron::plan const& plan, at::ScalarType dtype, chevron::optimizer_factory const& make, double clipped_to = 0)
      : whole(plan.stages, dtype), clip(clipped_to) {
    for (at::Tensor const& p : whole.parameters()) masters.push_back(p.detach().to(at::kFloat).requires_grad_());
    optimizer = make(masters);
  }
  /// \returns whether the step was taken: a gradient that is not finite skips it
  bool step(chevron::plan const& plan, batch const& data, double factor = 1) {
    at::NoGradGuard const off;
    {
      at::AutoGradMode const on(true);
      whole.run(plan, data, factor);
    }
    if (!std::isfinite(whole.norm)) return false;
    std::size_t k = 0;
    for (tensors const& of_stage : whole.sums) {
      for (at::Tensor sum : of_stage) {
        if (clip > 0 && whole.norm > clip) sum.mul_(clip / (whole.norm + 1e-6));
        masters[k++].mutable_grad() = sum;
      }
    }
    optimizer->step();
    round();
    return true;
  }
  void round() {
    at::NoGradGuard const off;
    tensors const all = whole.parameters();
    for (std::size_t k = 0; k < all.size(); ++k) at::Tensor(all[k].detach()).copy_(masters[k]);
  }
};

/// Compares a trainer's parameters and masters with the loop's, which lie by stage.
void compare(chevron::trainer& train, master_loop& loop, complaints& wrong, std::string const& where) {
  std::size_t k = 0;
  for (std::size_t s = 0; s < train.stages().size(); ++s) {
    auto const& theirs = loop.whole.stages[s].parameters();
    for (std::size_t q = 0; q < theirs.size(); ++q, ++k) {
      if (!train.stages()[s]) continue;
      at::Tensor const& p = train.stages()[s].parameters()[q].value;
      at::Tensor const& master = train.master_of(p);
      wrong.require(master.scalar_type() == at::kFloat && !master.is_same(p), where + "no master of " + theirs[q].name);
      wrong.require(at::equal(p, theirs[q].value), where + "parameter " + theirs[q].name);
      wrong.require(at::equal(master, loop.masters[k]), where + "master of " + theirs[q].name);
    }
  }
}

chevron::trainer_setup setup_of(chevron::plan const& plan, transport& comm, at::ScalarType dtype,
                                chevron::optimizer_factory const& make, chevron::trainer_options options) {
  options.master_parameters = true;
  return {.program = chevron::lower(chevron::prove(plan)),
          .transport = comm,
          .stages = [dtype](int s) { return build_half(s, dtype); },
          .loss = mean_square_in_float,
          .optimizer = make,
          .options = std::move(options)};
}

std::vector<batch> batches(int steps, at::ScalarType dtype) {
  std::vector<batch> data;
  for (int step = 0; step < steps; ++step) {
    data.push_back(make_batch(9, 50 + step));
    data.back().input = data.back().input.to(dtype);
  }
  return data;
}

/// The weight of a stage.
at::Tensor const& weight_of(chevron::trainer& train, std::size_t stage = 0) {
  return train.stages()[stage].parameters()[0].value;
}

}  // namespace

TEST_CASE("masters are stepped with float32 gradients and rounded, bit for bit as in a plain loop that keeps float32 copies") {
  at::set_num_threads(1);
  for (char const* name : {"1F1B", "ZB-H1", "ZBVZeroBubble"}) {
    auto const plan = plan_of(name, 2, 4);
    for (auto const& [kind, make] : optimizers) {
      for (auto const dtype : {at::kBFloat16, at::kHalf}) {
        double const factor = dtype == at::kHalf ? 1024 : 1, clip = kind == "SGD" ? 0.3 : 0;
        std::string const where = std::string(name) + ", " + kind + ", " + c10::toString(dtype) + ": ";
        auto const data = batches(8, dtype);
        for (bool const early : {false, true}) {
          master_loop loop(plan, dtype, make, clip);
          std::vector<double> losses, norms;
          for (batch const& b : data) {
            CHECK(loop.step(plan, b, factor));
            losses.push_back(loop.whole.loss);
            norms.push_back(loop.whole.norm);
          }
          complaints wrong;
          chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
            chevron::trainer_options options{.clip_grad_norm = clip, .post_validation = early, .stable_steps = 0};
            if (factor != 1) options.scaling = chevron::loss_scaling{.initial = factor};
            chevron::trainer train(setup_of(plan, comm, dtype, make, options));
            tensors before;
            for (auto& s : train.stages()) {
              for (auto& p : s.parameters()) before.push_back(p.value);
            }
            for (std::size_t i = 0; i < data.size(); ++i) {
              train.step({data[i].input}, {data[i].target});
              auto const report = train.synchronize();
              wrong.require(report.loss == losses[i] && report.grad_norm == norms[i], where + "loss or norm");
            }
            compare(train, loop, wrong, where);
            std::size_t k = 0;
            for (auto& s : train.stages()) {
              for (auto& p : s.parameters()) {
                wrong.require(p.value.is_same(before[k++]), where + "another tensor");
                wrong.require(!p.value.grad().defined() && !train.master_of(p.value).grad().defined(),
                              where + "a gradient is left");
              }
            }
          });
          for (auto const& w : wrong.all) FAIL_CHECK(w);
        }
      }
    }
  }
}

TEST_CASE("updates smaller than a parameter's last place add up in its master; without masters they are rounded away") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const data = batches(1, at::kBFloat16)[0];
  auto const slow = chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(2e-4).weight_decay(0));
  for (bool const masters : {false, true}) {
    std::atomic<int> moved = 0, of = 0;
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      auto setup = setup_of(plan, comm, at::kBFloat16, slow, {});
      setup.options.master_parameters = masters;
      chevron::trainer train(std::move(setup));
      for (auto& s : train.stages()) {
        at::NoGradGuard const off;
        if (s) s.parameters()[0].value.fill_(0.25);  // the next numbers are 1e-3 away, or 5e-4
      }
      for (int step = 0; step < 12; ++step) train.step({data.input}, {data.target});
      for (auto& s : train.stages()) {
        if (!s) continue;
        moved += s.parameters()[0].value.ne(0.25).sum().item<int>();
        of += static_cast<int>(s.parameters()[0].value.numel());
      }
    });
    CHECK((masters ? moved >= of * 3 / 4 : moved == 0));
  }
}

TEST_CASE("float16, with steps that scaling skips: masters stay as they were, in the plain loop and here") {
  at::set_num_threads(1);
  for (char const* name : {"1F1B", "ZB-H1"}) {
    auto const plan = plan_of(name, 2, 3);
    auto const data = batches(30, at::kHalf);
    for (bool const early : {false, true}) {
      double factor = 1 << 24;
      int calm = 0, skipped = 0;
      master_loop loop(plan, at::kHalf, momentum);
      std::vector<double> factors;
      for (batch const& b : data) {
        factors.push_back(factor);
        if (!loop.step(plan, b, factor)) {
          factor /= 2, calm = 0, ++skipped;
        } else if (++calm == 4) {
          factor *= 2, calm = 0;
        }
      }
      CHECK(skipped > 3);
      CHECK(skipped < 25);
      complaints wrong;
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        chevron::trainer_options options{.post_validation = early, .stable_steps = 0};
        options.scaling = chevron::loss_scaling{.initial = 1 << 24, .growth_interval = 4};
        chevron::trainer train(setup_of(plan, comm, at::kHalf, momentum, options));
        for (std::size_t i = 0; i < data.size(); ++i) {
          train.step({data[i].input}, {data[i].target});
          wrong.require(train.synchronize().loss_factor == factors[i], "factor");
        }
        compare(train, loop, wrong, name);
      });
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    }
  }
}

TEST_CASE("a gradient that fits float32 and not the parameter's dtype is no overflow, as no optimizer reads it rounded") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  auto const data = make_batch(4, 1);
  for (bool const masters : {false, true}) {
    std::atomic<int> skipped = 0, stepped = 0;
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      // The gradients of the microbatches are 50,000, their sum is 100,000: more than float16 holds.
      auto const build = [](int s) -> chevron::stage {
        auto weight = at::ones({width}).to(at::kHalf).requires_grad_();
        if (s == 1) return {[weight](at::Tensor x) { return x + weight; }, {{"weight", weight}}};
        return {[weight](at::Tensor x) { return x * weight.to(at::kFloat).detach() + (weight * 4e4).to(at::kFloat); },
                {{"weight", weight}}};
      };
      chevron::trainer train({.program = program,
                              .transport = comm,
                              .stages = build,
                              .loss = [](at::Tensor a, at::Tensor) { return a.sum() * 2.5; },
                              .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(1e-6)),
                              .options = {.when_not_finite = chevron::not_finite::skip, .master_parameters = masters}});
      train.accumulate({data.input}, {data.target}, 8);
      auto const report = train.step({data.input}, {data.target}, 8);
      skipped += report.skipped ? 1 : 0;
      stepped += std::isfinite(report.grad_norm) && report.grad_norm > 1e5 ? 1 : 0;
      for (auto& s : train.stages()) {
        if (s && !s.parameters()[0].value.isfinite().all().item<bool>()) throw std::runtime_error("an infinite parameter");
      }
    });
    CHECK(skipped == (masters ? 0 : 2));
    CHECK(stepped == (masters ? 2 : 0));
  }
}

TEST_CASE("what the caller writes into a parameter between two steps goes into its master; all other elements keep theirs") {
  at::set_num_threads(1);
  auto const plan = plan_of("ZB-H1", 2, 4);
  auto const data = batches(9, at::kBFloat16);
  for (bool const early : {false, true}) {
    master_loop loop(plan, at::kBFloat16, momentum);
    complaints wrong;
    for (std::size_t i = 0; i < data.size(); ++i) {
      if (i == 4) {
        at::NoGradGuard const off;
        loop.masters[0][1].fill_(0.375);
        loop.masters[0][2][3] = -0.0;
        loop.round();
      }
      loop.step(plan, data[i]);
    }
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(setup_of(plan, comm, at::kBFloat16, momentum, {.post_validation = early, .stable_steps = 0}));
      for (std::size_t i = 0; i < data.size(); ++i) {
        train.synchronize();
        at::NoGradGuard const off;
        for (auto& s : train.stages()) {
          if (!s) continue;
          // An average takes the parameters' place, and gives it back.
          tensors kept;
          for (auto& p : s.parameters()) kept.push_back(p.value.detach().clone());
          for (auto& p : s.parameters()) p.value.mul_(0.5);
          for (std::size_t q = 0; q < kept.size(); ++q) s.parameters()[q].value.copy_(kept[q]);
        }
        if (i == 4 && train.stages()[0]) {
          weight_of(train)[1].fill_(0.375);
          weight_of(train)[2][3] = -0.0;
        }
        at::AutoGradMode const on(true);
        train.step({data[i].input}, {data[i].target});
      }
      train.synchronize();
      compare(train, loop, wrong, early ? "early: " : "");
    });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("a negative zero that the caller writes stays one in a parameter that no group holds") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const data = batches(1, at::kBFloat16)[0];
  auto const biases = [](std::vector<at::Tensor> all) { return momentum(std::vector<at::Tensor>{all[1]}); };
  std::atomic<int> kept = 0;
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    chevron::trainer train(setup_of(plan, comm, at::kBFloat16, biases, {}));
    std::size_t const mine = train.stages()[0] ? 0 : 1;
    for (double const zero : {0.0, -0.0}) {
      {
        at::NoGradGuard const off;
        weight_of(train, mine).fill_(zero);
      }
      train.step({data.input}, {data.target});
      at::Tensor const negative = weight_of(train, mine).signbit();
      kept += (std::signbit(zero) ? negative.all() : negative.logical_not().all()).item<bool>() ? 1 : 0;
    }
  });
  CHECK(kept == 4);
}

TEST_CASE("with post_validation a write to a parameter, or to its master, before the verdict is refused by name") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const data = batches(1, at::kBFloat16)[0];
  for (bool const to_master : {false, true}) {
    auto const ends = rank_ends::run(rank_ends::over::threads, 2, 1, [&](transport& comm) {
      chevron::trainer train(setup_of(plan, comm, at::kBFloat16, momentum, {.post_validation = true, .stable_steps = 0}));
      train.step({data.input}, {data.target});
      train.step({data.input}, {data.target});
      {
        at::NoGradGuard const off;
        at::Tensor const& p = weight_of(train, train.stages()[0] ? 0 : 1);
        at::Tensor(to_master ? train.master_of(p) : p)[0][0] += 1;
      }
      train.step({data.input}, {data.target});
    });
    for (std::size_t r = 0; r < 2; ++r) {
      CHECK(ends.codes[r] == 2);
      std::string const words =
          "stage " + std::to_string(r) + "'s 0.weight, or the optimizer's state for this parameter, was changed after step 1";
      CHECK_MESSAGE(ends.said[r].find(words) != std::string::npos, ends.said[r]);
    }
  }
}

TEST_CASE("factory and before_optimizer_step get masters under the parameters' names, with the sums of gradients in float32") {
  at::set_num_threads(1);
  auto const plan = plan_of("ZB-H1", 2, 4);
  auto const data = batches(3, at::kBFloat16);
  complaints wrong;
  master_loop loop(plan, at::kBFloat16, momentum);
  std::vector<std::vector<tensors>> sums;
  for (batch const& b : data) {
    at::AutoGradMode const on(true);
    loop.whole.run(plan, b, 1);
    at::NoGradGuard const off;
    sums.push_back(loop.whole.sums);
    std::size_t k = 0;
    for (tensors const& of_stage : loop.whole.sums) {
      for (std::size_t q = 0; q < of_stage.size(); ++q) {
        // The caller of before_optimizer_step doubles gradients.
        loop.masters[k++].mutable_grad() = of_stage[q] * 2;
      }
    }
    loop.optimizer->step();
    loop.round();
  }
  std::atomic<int> compared = 0;
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    tensors given;
    auto const make = [&](std::vector<chevron::named_parameter> const& all) {
      tensors values;
      for (auto const& p : all) {
        wrong.require(p.value.scalar_type() == at::kFloat && p.value.requires_grad(), "the factory got " + p.name);
        wrong.require(p.stage == comm.topology().pipeline_rank() && p.name.starts_with("0."), "a name: " + p.name);
        values.push_back(p.value);
      }
      given = values;
      return momentum(values);
    };
    auto const look = [&](chevron::final_gradients const& now) {
      wrong.require(now.parameters.size() == given.size(), "all parameters");
      for (std::size_t q = 0; q < now.parameters.size(); ++q) {
        auto const& p = now.parameters[q];
        wrong.require(p.value.is_same(given[q]), "the master of " + p.name);
        at::Tensor const& sum = sums[static_cast<std::size_t>(now.step)][static_cast<std::size_t>(p.stage)][q];
        wrong.require(p.value.grad().scalar_type() == at::kFloat && at::equal(p.value.grad(), sum), "gradient of " + p.name);
        ++compared;
        p.value.grad().mul_(2);
      }
    };
    chevron::trainer train(setup_of(plan, comm, at::kBFloat16, make, {.before_optimizer_step = look}));
    for (batch const& b : data) train.step({b.input}, {b.target});
    compare(train, loop, wrong, "");
  });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
  CHECK(compared == 3 * 2 * 2);
}

TEST_CASE("an optimizer of the parameters themselves is refused, as is an option that ranks were given differently") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const trained = [&](bool own, bool differs) {
    return rank_ends::run(rank_ends::over::threads, 2, 1, [&](transport& comm) {
      std::vector<at::Tensor> mine;
      auto setup =
          setup_of(plan, comm, at::kBFloat16, [&](std::vector<at::Tensor> all) { return momentum(own ? mine : all); }, {});
      setup.stages = [&](int s) {
        chevron::stage made = build_half(s, at::kBFloat16);
        for (auto const& p : made.parameters()) mine.push_back(p.value);
        return made;
      };
      if (differs) setup.options.master_parameters = comm.topology().global_rank == 0;
      chevron::trainer const train(std::move(setup));
    });
  };
  rank_ends::check_all_well(trained(false, false));
  auto const own = trained(true, false);
  for (std::size_t r = 0; r < 2; ++r) {
    std::string const words =
        "the optimizer factory gave the optimizer stage " + std::to_string(r) +
        "'s 0.weight in BFloat16, and with master_parameters its gradient goes to its float32 master. Remedy: ";
    CHECK_MESSAGE(own.said[r].find(words) != std::string::npos, own.said[r]);
    CHECK(own.codes[r] == 2);
  }
  rank_ends::check_all_say(trained(false, true), "half-precision parameters: with float32 masters");
}

TEST_CASE("float32 parameters are stepped as without the option, beside half-precision ones too") {
  at::set_num_threads(1);
  auto const program = chevron::lower(chevron::prove(plan_of("ZB-H1", 2, 4)));
  auto const data = make_batch(8, 5);
  auto const run = [&](bool masters, bool mixed) {
    std::vector<tensors> left(2);
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      auto const build = [mixed](int s) {
        at::manual_seed(40 + s);
        torch::nn::Linear first(width, width), second(width, width);
        if (mixed) second->to(at::kBFloat16);
        return torch::nn::Sequential(first, torch::nn::Functional([mixed](at::Tensor const& x) {
                                       return x.tanh().to(mixed ? at::kBFloat16 : at::kFloat);
                                     }),
                                     second, torch::nn::Functional([](at::Tensor const& x) { return x.to(at::kFloat); }));
      };
      chevron::trainer train(small_model::setup(program, comm, build, {.master_parameters = masters}, slow_adamw));
      for (auto& group : train.optimizer()->param_groups()) {
        int own = 0, of_masters = 0;
        for (at::Tensor const& t : group.params()) {
          bool is_own = false;
          for (auto& s : train.stages()) {
            for (auto& p : s.parameters()) is_own = is_own || p.value.is_same(t);
          }
          ++(is_own ? own : of_masters);
        }
        if (own != (mixed && masters ? 2 : 4) || own + of_masters != 4)
          throw std::runtime_error("masters of the wrong parameters");
      }
      for (int step = 0; step < 6; ++step) train.step({data.input}, {data.target});
      for (auto& s : train.stages()) {
        for (auto& p : s.parameters())
          left[static_cast<std::size_t>(comm.topology().global_rank)].push_back(p.value.detach().clone());
      }
    });
    return left;
  };
  auto const with = run(true, false), without = run(false, false);
  for (std::size_t r = 0; r < 2; ++r) {
    REQUIRE(with[r].size() == 4);
    for (std::size_t i = 0; i < 4; ++i) CHECK(at::equal(with[r][i], without[r][i]));
  }
  auto const mixed = run(true, true), rounded = run(false, true);
  bool differs = false;
  for (std::size_t i = 0; i < 4; ++i) differs = differs || !at::equal(mixed[0][i], rounded[0][i]);
  CHECK(differs);
}

TEST_CASE("masters and their states are compared over replicas and ties, also where the rounded copies are equal") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const data = batches(1, at::kBFloat16)[0];
  enum class what { nothing, master, state };
  for (bool const tied : {false, true}) {
    for (what const changed : {what::nothing, what::master, what::state}) {
      auto const ends = rank_ends::run(rank_ends::over::threads, 2, tied ? 1 : 2, [&](transport& comm) {
        auto setup = setup_of(plan, comm, at::kBFloat16, slow_adamw, {.check_copies = 1});
        setup.stages = [tied](int s) {
          chevron::stage made = build_half(s, at::kBFloat16);
          return tied ? made.tie("0.weight", "words") : made;
        };
        chevron::trainer train(std::move(setup));
        for (int step = 0; step < 4; ++step) {
          train.step({data.input}, {data.target});
          if (step != 2 || comm.topology().global_rank + 1 != comm.topology().world()) continue;
          at::NoGradGuard const off;
          at::Tensor const p = weight_of(train, 1);
          at::Tensor master = train.master_of(p);
          if (changed == what::master) master.copy_(p);  // as rounded
          if (changed == what::state)
            chevron::detail::tensors_of(*train.optimizer()->state().at(master.unsafeGetTensorImpl()))[0].mul_(2);
        }
      });
      if (changed == what::nothing) {
        rank_ends::check_all_well(ends);
      } else {
        rank_ends::check_all_say(
            ends,
            tied ? "step 3, OPTIMIZER_STEP: the optimizer's states of stage 0's 0.weight on rank 0 and stage 1's 0.weight on "
                   "rank 1 differ, which are tied as `words`"
                 : "step 3, OPTIMIZER_STEP: the optimizer's states of stage 1's 0.weight on rank 1 and stage 1's 0.weight on "
                   "rank 3 differ, which are copies of one");
      }
    }
  }
}

TEST_CASE("tied parameters whose masters are stepped with different options are refused") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const ends = rank_ends::run(rank_ends::over::threads, 2, 1, [&](transport& comm) {
    double const decay = comm.topology().global_rank == 0 ? 0 : 0.1;
    auto const make = chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3).weight_decay(decay));
    auto setup = setup_of(plan, comm, at::kBFloat16, make, {});
    setup.stages = [](int s) { return build_half(s, at::kBFloat16).tie("0.weight", "words"); };
    chevron::trainer const train(std::move(setup));
  });
  rank_ends::check_all_say(
      ends,
      "stage 0's 0.weight on rank 0 is stepped with weight decay 0 and stage 1's 0.weight on rank 1 with weight "
      "decay 0.1, but they are tied as `words`",
      2);
}

TEST_CASE("memory: a stage's state counts masters, and with post-validation their copies; a frozen parameter has none") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const data = batches(1, at::kBFloat16)[0];
  constexpr std::int64_t trained = width * width, frozen = width;
  for (bool const masters : {false, true}) {
    for (bool const early : {false, true}) {
      std::atomic<int> measured = 0;
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        auto setup = setup_of(plan, comm, at::kBFloat16, slow_adamw, {.post_validation = early, .stable_steps = 0});
        setup.options.master_parameters = masters;
        setup.stages = [](int s) {
          chevron::stage made = build_half(s, at::kBFloat16);
          made.parameters()[1].value.set_requires_grad(false);
          return made;
        };
        chevron::trainer train(std::move(setup));
        // The second snapshot has the state that the first step made.
        for (int step = 0; step < 3; ++step) train.step({data.input}, {data.target});
        train.synchronize();
        auto const bytes = train.bytes_by_stage();
        std::int64_t const state = trained * (masters ? 4 + 4 + 4 : 2 + 2);
        std::int64_t const copies = early ? trained * (masters ? 4 + 4 + 4 : 2 + 2 + 2) : 0;
        if (bytes.size() == 1 && bytes[0].state == state + copies) ++measured;
        // Parameters in bfloat16, gradients in float32 and, without masters, rounded for the optimizer.
        std::int64_t const rest = (trained + frozen) * 2 + trained * 4 + (masters ? 0 : trained * 2);
        if (bytes.size() == 1 && bytes[0].fixed == state + copies + rest) ++measured;
      });
      CHECK(measured == 4);
    }
  }
}
