// Losses that stages give beside the model's: gradients and reported means are those of a plain loop, and a loss without
// a gradient or a weight is an error with its reason.
#include "support/gloo_ranks.hpp"
#include "support/small_model.hpp"

#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// Rows that a prediction within the model is made for.
at::Tensor rows_ahead(at::Tensor const& target) { return target.select(1, 0).gt(0).nonzero().squeeze(1); }

/// A layer behind a gate whose use is to be even. With a head that predicts the target, too.
struct gated_impl : torch::nn::Module {
  explicit gated_impl(bool predicts) {
    layer = register_module("layer", torch::nn::Linear(width, width));
    gate = register_module("gate", torch::nn::Linear(width, 3));
    if (predicts) head = register_module("head", torch::nn::Linear(width, width));
  }
  at::Tensor forward(at::Tensor x) {
    at::Tensor const share = gate(x).softmax(-1);
    chevron::add_loss("balance", 0.5 * share.mean(0).square().sum());
    return layer(x).tanh() * share.select(-1, 0).unsqueeze(-1);
  }
  at::Tensor forward_with(at::Tensor x, at::Tensor target) {
    at::Tensor const out = forward(x);
    at::Tensor const rows = rows_ahead(target);
    chevron::add_loss("ahead", at::mse_loss(head(out).index_select(0, rows), target.index_select(0, rows)));
    return out;
  }
  torch::nn::Linear layer{nullptr}, gate{nullptr}, head{nullptr};
};

constexpr int predicting = 1;
std::shared_ptr<gated_impl> make_gated(int number) {
  at::manual_seed(300 + number);
  return std::make_shared<gated_impl>(number == predicting);
}
double count_ahead(chevron::batch const& b) { return static_cast<double>(rows_ahead(b.targets[0]).size(0)); }

constexpr double balance_factor = 0.25, ahead_factor = 3;

chevron::stage build_gated(int number) {
  auto const module = make_gated(number);
  if (number != predicting) return chevron::stage(module).losses({{.name = "balance", .factor = balance_factor}});
  return chevron::stage(module, [module](at::Tensor x, at::Tensor target) { return module->forward_with(x, target); })
      .targets()
      .losses({{.name = "balance", .factor = balance_factor}, {.name = "ahead", .factor = ahead_factor, .weight = count_ahead}});
}

using microbatches = std::vector<chevron::batch>;
/// Some microbatches have no row that is predicted ahead.
microbatches uneven(int seed) {
  microbatches out;
  for (int m = 0; m < 4; ++m) {
    auto const b = make_batch(1 + (m + seed) % 3, 10 * seed + m);
    out.push_back({{b.input}, {b.target}});
  }
  return out;
}
double count_rows(microbatches const& pass) {
  double sum = 0;
  for (auto const& b : pass) sum += static_cast<double>(b.inputs[0].size(0));
  return sum;
}
double sum_ahead(microbatches const& pass) {
  double sum = 0;
  for (auto const& b : pass) sum += count_ahead(b);
  return sum;
}

constexpr int steps = 3, replicas = 2, passes = 2;
int seed_of(int step, int replica, int pass) { return 1 + pass + passes * (replica + replicas * step); }

struct totals {
  double rows = 0, ahead = 0;
  explicit totals(int step) {
    for (int r = 0; r < replicas; ++r) {
      for (int pass = 0; pass < passes; ++pass) {
        rows += count_rows(uneven(seed_of(step, r, pass)));
        ahead += sum_ahead(uneven(seed_of(step, r, pass)));
      }
    }
  }
};

struct trained {
  std::vector<tensors> parameters;     // by stage
  std::vector<double> balance, ahead;  // by step
};

/// By plain autograd, one microbatch after the other.
trained plain(chevron::plan const& plan) {
  std::vector<std::shared_ptr<gated_impl>> modules;
  std::vector<at::Tensor> all;
  trained out;
  for (int s = 0; s < plan.stages; ++s) {
    modules.push_back(make_gated(s));
    for (auto const& p : modules.back()->parameters()) all.push_back(p);
  }
  auto const optimizer = sgd(all);
  for (int step = 0; step < steps; ++step) {
    totals const total(step);
    std::vector<std::vector<tensors>> sums(replicas);  // by replica and stage
    std::vector<std::vector<double>> balances(modules.size(), std::vector<double>(replicas));
    std::vector<double> of_ahead(replicas);
    for (std::size_t r = 0; r < replicas; ++r) {
      for (auto const& m : modules) {
        sums[r].emplace_back();
        for (auto const& p : m->parameters()) sums[r].back().push_back(at::zeros_like(p));
      }
      for (int pass = 0; pass < passes; ++pass) {
        auto const parts = uneven(seed_of(step, static_cast<int>(r), pass));
        std::vector<std::vector<tensors>> each;
        for (auto const& b : parts) {
          double const weight = static_cast<double>(b.inputs[0].size(0)) / total.rows, of_head = count_ahead(b) / total.ahead;
          for (auto const& m : modules) m->zero_grad();
          at::Tensor x = b.inputs[0];
          tensors ends, seeds;
          for (std::size_t s = 0; s < modules.size(); ++s) {
            chevron::collected_losses given;
            x = s == predicting ? modules[s]->forward_with(x, b.targets[0]) : modules[s]->forward(x);
            ends.push_back(given.sum("balance"));
            seeds.push_back(at::full({}, weight * balance_factor));
            balances[s][r] += ends.back().item<double>() * weight;
            if (s != predicting || of_head == 0) continue;
            ends.push_back(given.sum("ahead"));
            seeds.push_back(at::full({}, of_head * ahead_factor));
            of_ahead[r] += ends.back().item<double>() * of_head;
          }
          ends.push_back(mean_square(x, b.targets[0]));
          seeds.push_back(at::full({}, weight));
          torch::autograd::backward(ends, seeds);
          each.emplace_back();
          for (auto const& m : modules) {
            each.back().emplace_back();
            for (auto const& p : m->parameters())
              each.back().back().push_back(p.grad().defined() ? p.grad().clone() : at::zeros_like(p));
          }
        }
        for (std::size_t s = 0; s < modules.size(); ++s) {
          for (int const m : order_of(plan, static_cast<int>(s))) {
            for (std::size_t q = 0; q < each[0][s].size(); ++q) sums[r][s][q] += each[static_cast<std::size_t>(m)][s][q];
          }
        }
      }
    }
    for (std::size_t s = 0; s < modules.size(); ++s) {
      auto const mine = modules[s]->parameters();
      for (std::size_t q = 0; q < mine.size(); ++q) mine[q].mutable_grad() = sums[0][s][q] + sums[1][s][q];
    }
    optimizer->step();
    out.balance.push_back(0);
    for (auto const& of_stage : balances) out.balance.back() += of_stage[0] + of_stage[1];
    out.ahead.push_back(of_ahead[0] + of_ahead[1]);
  }
  for (auto const& m : modules) out.parameters.push_back(m->parameters());
  return out;
}

/// A step of a model of three stages, of which the rank of one may be given less.
void step_of(builder const& build, chevron::batch const& all, std::optional<chevron::batch> const& for_rank_1 = {},
             chevron::step_total const& total = {}) {
  chevron::run_threads({.pipeline_ranks = 3}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan_of("1F1B", 3, 2), comm, build));
    train.step(comm.topology().pipeline_rank() == 1 && for_rank_1 ? *for_rank_1 : all, total);
  });
}
chevron::batch some_batch() {
  auto const b = make_batch(4, 1);
  return {{b.input}, {b.target}};
}

}  // namespace

TEST_CASE("losses of stages have the gradients of terms of the loss, and are reported, to the last bit") {
  at::set_num_threads(1);
  for (char const* const name : schedules) {
    auto const plan = plan_of(name, 2, 4);
    auto const program = chevron::lower(chevron::prove(plan));
    trained const expected = plain(plan);
    for (bool const recompute : {false, true}) {
      bool const processes = recompute && plan.stages == 4;
      complaints wrong;
      auto const rank = [&](transport& comm) {
        chevron::trainer_options options{.post_validation = recompute, .stable_steps = 0};
        if (processes) options.scaling = chevron::loss_scaling{.initial = 64};
        std::vector<chevron::step_report> reports;
        options.on_report = [&](chevron::step_report const& report) { reports.push_back(report); };
        chevron::trainer train(small_model::setup(
            program, comm, [&](int s) { return build_gated(s).recompute(recompute); }, options));
        int const r = comm.topology().replica();
        for (int step = 0; step < steps; ++step) {
          totals const sum(step);
          chevron::step_total const total{sum.rows, {{"ahead", sum.ahead}}};
          train.accumulate(uneven(seed_of(step, r, 0)), total);
          train.step(uneven(seed_of(step, r, 1)), total);
        }
        train.synchronize();
        for (std::size_t s = 0; s < train.stages().size(); ++s) {
          auto const& mine = train.stages()[s].parameters();
          for (std::size_t q = 0; q < mine.size(); ++q)
            wrong.require(at::equal(mine[q].value, expected.parameters[s][q]),
                          std::string(name) + " stage " + std::to_string(s) + " " + mine[q].name);
        }
        for (std::size_t step = 0; step < reports.size(); ++step) {
          auto const& losses = reports[step].losses;
          wrong.require(losses.size() == 2 && losses[0].name == "balance" && losses[0].value == expected.balance[step] &&
                            losses[0].factor == balance_factor,
                        std::string(name) + ": the balance of step " + std::to_string(step));
          wrong.require(losses.size() == 2 && losses[1].name == "ahead" && losses[1].value == expected.ahead[step] &&
                            losses[1].factor == ahead_factor,
                        std::string(name) + ": the prediction of step " + std::to_string(step));
        }
        wrong.require(reports.size() == steps, "reports are missing");
      };
      if (processes) {
        gloo_ranks::check_all_well(gloo_ranks::on_ranks(2, replicas, gloo_ranks::all_share, rank));
      } else {
        chevron::run_threads({.pipeline_ranks = 2, .replicas = replicas}, rank);
      }
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    }
  }
}

TEST_CASE("replicas add up what their microbatches count in a loss with a weight of its own") {
  at::set_num_threads(1);
  auto const program = chevron::lower(chevron::prove(plan_of("ZB-H1", 2, 4)));
  std::vector<double> values[2];
  std::vector<tensors> ends[2];
  for (bool const given : {false, true}) {
    chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
      chevron::trainer train(
          {.program = program, .transport = comm, .stages = build_gated, .loss = mean_square, .optimizer = sgd});
      auto const mine = uneven(comm.topology().replica() + 1), other = uneven(2 - comm.topology().replica());
      chevron::step_total total;
      if (given) total = {count_rows(mine) + count_rows(other), {{"ahead", sum_ahead(mine) + sum_ahead(other)}}};
      auto const report = train.step(mine, total);
      if (comm.topology().global_rank != 0) return;
      for (auto const& one : report.losses) values[given].push_back(one.value);
      ends[given].emplace_back();
      for (auto const& p : train.stages()[0].parameters()) ends[given].back().push_back(p.value.detach().clone());
    });
  }
  CHECK(values[0].size() == 2);
  CHECK(values[0] == values[1]);
  for (std::size_t q = 0; q < ends[0][0].size(); ++q) CHECK(at::equal(ends[0][0][q], ends[1][0][q]));
}

TEST_CASE("a batch gives the same gradients in any number of microbatches") {
  at::set_num_threads(1);
  // Means over rows, so that a microbatch's value is a part of the batch's.
  auto const build = [](int s) {
    at::manual_seed(s);
    torch::nn::Linear layer(width, width);
    auto const give = [layer](at::Tensor x, at::Tensor target) mutable {
      x = layer(x).tanh();
      at::Tensor const chosen = rows_ahead(target);
      chevron::add_loss("ahead", at::mse_loss(x.index_select(0, chosen), target.index_select(0, chosen)));
      chevron::add_loss("size", x.square().mean());
      return x;
    };
    return chevron::stage(layer, give)
        .targets()
        .losses({{.name = "ahead", .factor = 2, .weight = count_ahead}, {.name = "size", .factor = 0.1}});
  };
  auto const data = make_batch(16, 5);
  std::optional<tensors> first;
  for (int const micro_batches : {1, 2, 4, 8}) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(plan_of("1F1B", 2, micro_batches), comm, build));
      train.step(data.input, data.target);
      if (comm.topology().pipeline_rank() != 0) return;
      tensors got;
      for (auto const& p : train.stages()[0].parameters()) got.push_back(p.value.grad().clone());
      if (!first) first = got;
      for (std::size_t q = 0; q < got.size(); ++q) CHECK(at::allclose(got[q], (*first)[q], 1e-6, 1e-7));
    });
  }
}

TEST_CASE("a step that is done over weighs losses as it did, with the factor of then") {
  at::set_num_threads(1);
  auto const program = chevron::lower(chevron::prove(plan_of("ZB-H1", 2, 4)));
  std::vector<double> losses[2];
  for (bool const early : {false, true}) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(program, comm, build_gated,
                                                {.clip_grad_norm = 0.1,
                                                 .scaling = chevron::loss_scaling{.initial = 64, .growth_interval = 2},
                                                 .post_validation = early,
                                                 .stable_steps = 0}));
      for (int step = 0; step < 6; ++step) {
        train.step(uneven(step + 1));
        auto const report = train.synchronize();
        if (comm.topology().global_rank != 0) continue;
        losses[early].insert(losses[early].end(), {report.loss, report.losses[0].value, report.losses[1].value});
      }
    });
  }
  CHECK(losses[0].size() == 18);
  CHECK(losses[0] == losses[1]);
}

TEST_CASE("evaluation leaves losses of stages out") {
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan_of("1F1B", 2, 2), comm, build_gated));
    chevron::evaluator evaluate(train);
    double const before = evaluate.loss(some_batch());
    CHECK(before > 0);
    CHECK(evaluate.loss(some_batch()) == before);
    CHECK(train.step(some_batch()).loss == doctest::Approx(before));
  });
}

TEST_CASE("a loss that is not finite is named, with its stage") {
  auto const build = [](int s) {
    torch::nn::Linear layer(width, width);
    if (s != 1) return chevron::stage(layer);
    return chevron::stage(layer,
                          [layer](at::Tensor x) mutable {
                            x = layer(x);
                            chevron::add_loss("odd", x.sum() / 0.0);
                            return x;
                          })
        .losses({{.name = "odd"}});
  };
  CHECK_THROWS_WITH_AS(step_of(build, some_batch()),
                       doctest::Contains("loss `odd` of stage 1 is not finite; no parameter was changed"), chevron::error);
}

TEST_CASE("a loss that nothing would be learned by, and a declaration that is not kept, say why") {
  auto const with = [](auto give, std::vector<chevron::stage_loss> declared) {
    return [=](int s) {
      torch::nn::Linear layer(width, width);
      if (s != 1) return chevron::stage(layer);
      return chevron::stage(layer,
                            [=](at::Tensor x) mutable {
                              x = layer->forward(x);
                              give(x);
                              return x;
                            })
          .losses(declared);
    };
  };
  auto const one = [](at::Tensor const& x) { chevron::add_loss("one", x.mean()); };
  auto const nothing = [](at::Tensor const&) {};
  auto const cut_off = [](at::Tensor const& x) { chevron::add_loss("one", x.detach().mean()); };
  CHECK_NOTHROW(step_of(with(one, {{.name = "one"}}), some_batch()));
  CHECK_THROWS_WITH_AS(
      step_of(with(one, {}), some_batch()),
      doctest::Contains("stage 1 threw: the stage gives loss `one`, which it does not declare. Remedy: .losses({{.name = "
                        "\"one\"}}) of the stage that is built"),
      chevron::error);
  CHECK_THROWS_WITH_AS(step_of(with(nothing, {{.name = "one"}}), some_batch()),
                       doctest::Contains("stage 1 threw: the stage declares loss `one`, and its forward gave none. Remedy: "
                                         "chevron::add_loss(\"one\", value) in the forward, or a weight of 0"),
                       chevron::error);
  CHECK_NOTHROW(step_of(with(nothing, {{.name = "one", .weight = [](chevron::batch const&) { return 0.; }}}), some_batch()));
  CHECK_THROWS_WITH_AS(step_of(with(cut_off, {{.name = "one"}}), some_batch()),
                       doctest::Contains("stage 1 threw: loss `one` depends on no parameter that is trained: nothing would be "
                                         "learned by it. Remedy: a value computed from trained parameters; in a microbatch without "
                                         "this loss no add_loss, and a weight of 0"),
                       chevron::error);
  CHECK_THROWS_WITH_AS(step_of(with(one, {{.name = "one", .weight = [](chevron::batch const&) { return -1.; }}}), some_batch()),
                       doctest::Contains("microbatch 0 was weighed as -1.000000. Remedy: a weight function"), chevron::error);
  CHECK_THROWS_WITH_AS(
      step_of(with(one, {{.name = "one"}}), some_batch(), chevron::batch{}),
      doctest::Contains("stage 1 threw: loss `one` is weighed by its microbatch's share of the step, and this "
                        "rank has no tensors to count. Remedy: give this rank the inputs or targets; if the loss "
                        "has a weight, the tensors that the weight counts"),
      chevron::error);
  CHECK_THROWS_WITH_AS(
      step_of(with(one, {{.name = "one", .weight = [](chevron::batch const&) { return 1.; }}}), some_batch(), {},
              chevron::step_total{4, {{"one", 3.}}}),
      doctest::Contains(
          "the microbatches count 2 in loss `one` of stage 1, but each was taken for a share of 3: give step() the total "
          "over all replicas, accumulated batches included"),
      chevron::error);
  auto const two_factors = [&](int s) {
    return chevron::stage(torch::nn::Linear(width, width)).losses({{.name = "one", .factor = 1. + s}});
  };
  CHECK_THROWS_WITH_AS(
      step_of(two_factors, some_batch()),
      doctest::Contains("loss `one` has the factor 1 on stage 0 and 2 on stage 1. Remedy: one factor, or another "
                        "name"),
      chevron::error);
  CHECK_THROWS_WITH_AS(
      step_of([](int s) { return build_gated(s).losses({}); }, some_batch(), chevron::batch{some_batch().inputs, {}}),
      doctest::Contains("this rank was given none"), chevron::error);
}

TEST_CASE("a stage's declaration, and add_loss outside of a trainer") {
  torch::nn::Linear layer(width, width);
  CHECK_THROWS_WITH_AS(chevron::stage(layer).losses({{.name = ""}}), "a stage declares a loss ``: give it a name, in one line",
                       chevron::usage_error);
  CHECK_THROWS_WITH_AS(chevron::stage(layer).losses({{.name = "a"}, {.name = "a", .factor = 2}}),
                       "a stage declares loss `a` with the factors 1.000000 and 2.000000. Remedy: one factor, or another name",
                       chevron::usage_error);
  CHECK_THROWS_WITH_AS(chevron::stage(layer).losses({{.name = "a", .factor = NAN}}), "the factor of loss `a` is nan",
                       chevron::usage_error);
  auto const both = chevron::in_sequence(
      {chevron::stage(layer).losses({{.name = "a"}}), chevron::stage(layer).losses({{.name = "b"}, {.name = "a"}})});
  CHECK(both.losses().size() == 2);

  at::Tensor const x = at::ones({2, 2}).requires_grad_();
  CHECK_THROWS_WITH_AS(chevron::add_loss("a", x),
                       "loss `a` must be one number, the mean over the microbatch, not a tensor of 4 elements",
                       chevron::usage_error);
  CHECK_THROWS_WITH_AS(chevron::add_loss("a", x.sum()),
                       doctest::Contains("loss `a` was given outside of a trainer's step, and would be "
                                         "lost. Remedy: a chevron::collected_losses around the forward"),
                       chevron::usage_error);
  CHECK_NOTHROW(chevron::add_loss("a", at::ones({})));
  {
    at::NoGradGuard const off;
    CHECK_NOTHROW(chevron::add_loss("a", x.sum()));
  }
  chevron::collected_losses given;
  chevron::add_loss("a", x.sum());
  chevron::add_loss("a", x.square().sum());
  given.sum("a").backward();
  CHECK(at::equal(x.grad(), at::full({2, 2}, 3.)));
  CHECK_THROWS_WITH_AS(given.sum("b"), "no loss `b` was given: chevron::add_loss(\"b\", value)", chevron::usage_error);
}

TEST_CASE("a batch that was not weighed has no share in a loss, so that a backward refuses it") {
  chevron::detail::split_batch cut;
  cut.split(some_batch(), 2);
  cut.share(4);
  CHECK(cut.weight(0) == 0.5);
  CHECK(std::isnan(cut.loss(0, 0).counts));
  cut.weigh_losses(std::vector<chevron::loss_weight_function>(1), false);
  CHECK(cut.loss(0, 0).counts == 2);
}

TEST_CASE("an evaluator reports declared losses: on the data of a step, with the step's bits") {
  complaints refusals;
  for (int const replicas : {1, 2}) {
    chevron::run_threads({.pipeline_ranks = 2, .replicas = replicas}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(plan_of("1F1B", 2, 4), comm, build_gated));
      chevron::evaluator evaluate(train);
      auto const mine = uneven(comm.topology().replica() + 1);
      for (int step = 0; step < 2; ++step) {
        double const loss = evaluate.loss(mine);
        chevron::evaluation_report const held_out = evaluate.report(mine);
        auto const report = train.step(mine);
        refusals.require(held_out.loss == loss, "the model's loss");
        refusals.require(held_out.losses.size() == 2 && report.losses.size() == 2, "balance and ahead");
        for (std::size_t k = 0; k < std::min(held_out.losses.size(), report.losses.size()); ++k) {
          refusals.require(held_out.losses[k].name == report.losses[k].name &&
                            held_out.losses[k].factor == report.losses[k].factor &&
                            held_out.losses[k].value == report.losses[k].value,
                        "loss `" + report.losses[k].name + "`: " + std::to_string(held_out.losses[k].value) + " evaluated, " +
                            std::to_string(report.losses[k].value) + " in the step");
        }
      }
    });
  }
  // A forward that adds its loss in training only.
  auto const only_in_training = [](int s) {
    auto const module = make_gated(s);
    return chevron::stage(module,
                          [module](at::Tensor x) {
                            if (module->is_training()) chevron::add_loss("balance", module->gate(x).square().mean());
                            return module->layer(x);
                          })
        .losses({{.name = "balance"}});
  };
  auto const evaluate_it = [&] {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(plan_of("1F1B", 2, 4), comm, only_in_training));
      chevron::evaluator evaluate(train);
      auto const data = make_batch(8, 1);
      evaluate.report(data.input, data.target);
    });
  };
  CHECK_THROWS_WITH_AS(evaluate_it(),
                       doctest::Contains("loss `balance` of stage 0, microbatch 0: the forward gave no value in evaluation mode"),
                       chevron::usage_error);
  for (auto const& w : refusals.all) FAIL_CHECK(w);
}

TEST_CASE("a complex loss is refused, whether it is the model's or a stage's") {
  auto const run = [](chevron::stage_builder const& build, chevron::loss_function const& loss) {
    chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
      chevron::trainer train({.program = chevron::lower(chevron::prove(plan_of("GPipe", 1, 1))),
                              .transport = comm,
                              .stages = build,
                              .loss = loss,
                              .optimizer = sgd});
      auto const data = make_batch(2, 1);
      train.step(data.input, data.target);
    });
  };
  auto const imaginary = [](at::Tensor out, at::Tensor) { return at::complex(out.mean(), out.mean()); };
  CHECK_THROWS_WITH_AS(run(build_stage, imaginary),
                       doctest::Contains("the loss is ComplexFloat, and only a real number can be minimized. Remedy: at::real"),
                       chevron::usage_error);
  auto const adding = [](int s) {
    auto const module = make_gated(s);
    return chevron::stage(module,
                          [module](at::Tensor x) {
                            x = module->layer(x);
                            chevron::add_loss("balance", at::complex(x.mean(), x.mean()));
                            return x;
                          })
        .losses({{.name = "balance"}});
  };
  CHECK_THROWS_WITH_AS(run(adding, mean_square), doctest::Contains("loss `balance` is ComplexFloat"), chevron::usage_error);
}
