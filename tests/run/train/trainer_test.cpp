#include "support/small_model.hpp"

#include <atomic>
#include <limits>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

void check_one_step(char const* name, int ranks, int micro_batches, std::int64_t samples, chevron::thread_options options) {
  auto const plan = plan_of(name, ranks, micro_batches);
  auto const data = make_batch(samples, micro_batches);
  reference whole(plan.stages);
  whole.run(plan, {data});
  options.pipeline_ranks = ranks;
  complaints wrong;
  chevron::run_threads(options, [&](transport& comm) { compare_one_step(comm, plan, data, whole, wrong); });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
  CHECK(whole.grad_norm > 0);
}

}  // namespace

TEST_CASE("gradients after one step equal those of the un-pipelined model, bit for bit") {
  at::set_num_threads(1);
  for (char const* name : schedules) {
    for (int const ranks : {1, 2, 4}) {
      for (int const m : {1, 2, 3, 5, 8}) {
        check_one_step(name, ranks, m, 2 * m, {});
        check_one_step(name, ranks, m, 2 * m + (m > 1 ? 1 : 0), {});
      }
    }
  }
}

TEST_CASE("the same with rendezvous sends and random delays") {
  for (char const* name : schedules) {
    for (int const ranks : {2, 4}) {
      for (int const m : {1, 3, 8}) {
        chevron::thread_options shaken;
        shaken.rendezvous = true;
        shaken.longest_delay = std::chrono::microseconds(500);
        shaken.seed = static_cast<std::uint64_t>(10 * ranks + m);
        shaken.deadline = std::chrono::seconds(20);
        check_one_step(name, ranks, m, 2 * m + 1, shaken);
      }
    }
  }
}

TEST_CASE("twenty steps of AdamW with clipping follow the un-pipelined loss curve exactly, two replicas included") {
  at::set_num_threads(1);
  for (char const* name : schedules) {
    for (int const replicas : {1, 2}) {
      CAPTURE(name);
      CAPTURE(replicas);
      auto const plan = plan_of(name, 2, 3);
      std::vector<batch> data;
      for (int r = 0; r < replicas; ++r) data.push_back(make_batch(7, 70 + r));
      curve const whole(plan, data, 20);
      CHECK(whole.losses.back() < whole.losses.front());
      CHECK(whole.norms.front() > curve::clip);
      complaints wrong;
      chevron::run_threads({.pipeline_ranks = 2, .replicas = replicas},
                           [&](transport& comm) { whole.compare(comm, plan, data, wrong); });
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    }
  }
}

TEST_CASE("replicas with batches of different sizes") {
  auto const plan = plan_of("ZB-H1", 2, 2);
  auto const program = chevron::lower(chevron::prove(plan));
  std::vector<batch> const data{make_batch(5, 1), make_batch(3, 2)};
  reference whole(plan.stages);
  whole.run(plan, data);
  auto const train_with = [&](std::int64_t all_samples) {
    double loss = 0;
    chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
      chevron::trainer train(
          {.program = program, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = sgd});
      auto const& mine = data[static_cast<std::size_t>(comm.topology().replica())];
      auto const report = train.step({mine.input}, {mine.target}, static_cast<double>(all_samples));
      if (comm.topology().global_rank == 3) loss = report.loss;
    });
    return loss;
  };
  CHECK(train_with(8) == whole.loss);
  CHECK(train_with(0) == whole.loss);
  CHECK_THROWS_WITH_AS(train_with(10), doctest::Contains("the replicas' batches count 5, 3 samples"), chevron::usage_error);
}

TEST_CASE("batches may change their size from step to step") {
  auto const plan = plan_of("ZBVZeroBubble", 2, 2);
  auto const program = chevron::lower(chevron::prove(plan));
  complaints wrong;
  std::vector<batch> const data{make_batch(6, 1), make_batch(3, 2), make_batch(8, 3)};
  std::vector<double> losses;
  reference whole(plan.stages);
  auto const optimizer = sgd(whole.parameters());
  for (auto const& b : data) {
    whole.run(plan, {b});
    losses.push_back(whole.loss);
    optimizer->step();
  }
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(program, comm));
    for (std::size_t i = 0; i < data.size(); ++i) {
      wrong.require(train.step({data[i].input}, {data[i].target}).loss == losses[i], "loss of step " + std::to_string(i));
    }
  });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("a batch that cannot be cut says why") {
  chevron::detail::split_batch parts;
  tensors const three{at::zeros({3, 2})}, four{at::zeros({4, 2})}, number{at::zeros({})};
  CHECK_THROWS_WITH_AS(parts.split({three, three}, 4),
                       doctest::Contains("a batch of 3 samples cannot be cut into 4 microbatches"), chevron::usage_error);
  CHECK_THROWS_WITH_AS(parts.split({three, four}, 2),
                       doctest::Contains("target 0 has 4 samples (dimension 0) but input 0 has 3. Remedy: as many in each"),
                       chevron::usage_error);
  CHECK_THROWS_WITH_AS(parts.split({number, {}}, 1),
                       doctest::Contains("no input or target has a dimension of samples (dimension 0) to be cut. Remedy:"),
                       chevron::usage_error);
  parts.split({four, {}}, 3);
  parts.share(8);
  CHECK(parts.inputs(0)[0].size(0) == 2);
  CHECK(parts.inputs(1)[0].size(0) == 1);
  CHECK(parts.weight(0) == 0.25);
  CHECK(parts.weight(2) == 0.125);
}

TEST_CASE("a failing rank is named to all others at once") {
  auto const plan = plan_of("1F1B", 4, 4);
  auto const program = chevron::lower(chevron::prove(plan));
  auto const data = make_batch(8, 1);
  for (int const failing : {0, 2, 3}) {
    CAPTURE(failing);
    std::mutex mutex;
    std::vector<std::string> heard;
    auto const begin = std::chrono::steady_clock::now();
    auto const run = [&] {
      chevron::run_threads({.pipeline_ranks = 4, .deadline = std::chrono::seconds(200)}, [&](transport& comm) {
        auto const build = [&](int s) -> chevron::stage {
          if (s != failing) return build_stage(s);
          auto calls = std::make_shared<int>(0);
          torch::nn::Linear inner(width, width);
          return chevron::stage(inner, [inner, calls](at::Tensor x) mutable {
            if (++*calls == 7) x = x.view({-1, 5});  // the third microbatch of the second step
            return inner(x);
          });
        };
        chevron::trainer train(small_model::setup(program, comm, build));
        try {
          for (int step = 0; step < 3; ++step) train.step({data.input}, {data.target});
        } catch (chevron::peer_lost_error const& e) {
          std::lock_guard const hold(mutex);
          heard.push_back(e.context().peer == failing ? e.what() : "wrong peer");
          throw;
        }
      });
    };
    std::string const where = "rank " + std::to_string(failing) + ", step 1, " + std::to_string(failing) + "F2: stage " +
                              std::to_string(failing) + " threw: ";
    CHECK_THROWS_WITH_AS(run(), doctest::Contains(where.c_str()), chevron::stage_error);
    CHECK(heard.size() == 3);
    for (auto const& h : heard) CHECK_MESSAGE(h.find(": " + where) != std::string::npos, h);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60));  // by far not the deadline
  }
}

TEST_CASE("ranks that do not agree are told apart before the first step") {
  auto const one = chevron::lower(chevron::prove(plan_of("1F1B", 2, 4))),
             other = chevron::lower(chevron::prove(plan_of("GPipe", 2, 4))),
             longer = chevron::lower(chevron::prove(plan_of("1F1B", 2, 5)));
  auto const start = [&](int replicas, auto make) {
    chevron::run_threads({.pipeline_ranks = 2, .replicas = replicas}, [&](transport& comm) { make(comm); });
  };
  CHECK_THROWS_WITH_AS(
      start(1,
            [&](transport& comm) { chevron::trainer(small_model::setup(comm.topology().global_rank == 0 ? one : other, comm)); }),
      doctest::Contains("rank 1 has `schedule: GPipe` where rank 0 has `schedule: 1F1B`"), chevron::preflight_error);
  CHECK_THROWS_WITH_AS(
      start(
          1,
          [&](transport& comm) { chevron::trainer(small_model::setup(comm.topology().global_rank == 0 ? one : longer, comm)); }),
      doctest::Contains("rank 1 has `microbatches: 5` where rank 0 has `microbatches: 4`"), chevron::preflight_error);
  CHECK_THROWS_WITH_AS(
      start(2,
            [&](transport& comm) {
              auto const build = [&](int s) -> chevron::stage {
                at::manual_seed(100 + s);
                return torch::nn::Sequential(torch::nn::Linear(width, s == 1 && comm.topology().replica() == 1 ? 7 : width));
              };
              chevron::trainer(small_model::setup(one, comm, build));
            }),
      doctest::Contains("rank 3 has `stage 1 0.weight: Float [7, 6]` where rank 1 has `stage 1 0.weight: Float [6, 6]`"),
      chevron::preflight_error);
  CHECK_THROWS_WITH_AS(
      start(1,
            [&](transport& comm) {
              chevron::trainer(small_model::setup(one, comm, build_stage, {.clip_grad_norm = comm.topology().global_rank * 1.0}));
            }),
      doctest::Contains("clip gradient norm"), chevron::preflight_error);
}

TEST_CASE("a loss that is not finite stops every rank, or is skipped") {
  auto const program = chevron::lower(chevron::prove(plan_of("ZBVZeroBubble", 2, 3)));
  auto const good = make_batch(6, 1);
  auto bad = make_batch(6, 2);
  bad.target[5][0] = std::numeric_limits<float>::quiet_NaN();
  auto const run = [&](chevron::not_finite what) {
    double before = 0, after = 0;
    bool skipped = false;
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(program, comm, build_stage, {.when_not_finite = what}, adamw));
      auto const first = train.step({good.input}, {good.target});
      auto const weight = [&] {
        double sum = 0;
        for (auto& s : train.stages()) {
          for (auto& p : s.parameters()) sum += p.value.abs().sum().item<double>();
        }
        return sum;
      };
      double const w = weight();
      auto const second = train.step({bad.input}, {bad.target});
      if (comm.topology().global_rank == 1) {
        before = w;
        after = weight();
        skipped = second.skipped && !first.skipped;
      }
      auto const third = train.step({good.input}, {good.target});
      if (!std::isfinite(third.loss)) throw std::runtime_error("the skipped step left its mark");
    });
    CHECK(before == after);
    CHECK(skipped);
  };
  run(chevron::not_finite::skip);
  CHECK_THROWS_WITH_AS(run(chevron::not_finite::stop),
                       doctest::Contains("step 1, OPTIMIZER_STEP: the loss of microbatch 2, unlike 2 others, is not finite"),
                       chevron::numerical_error);
}

TEST_CASE("several tensors, integers and unused outputs cross between stages") {
  auto const program = chevron::lower(chevron::prove(plan_of("ZB-H1", 3, 4)));
  std::vector<torch::nn::Linear> layers;
  at::manual_seed(3);
  for (int i = 0; i < 3; ++i) layers.emplace_back(width, width);
  auto const data = make_batch(8, 5);
  auto const ids = at::arange(8).view({8, 1});
  auto const first = [](torch::nn::Linear& layer, at::Tensor x, at::Tensor id) {
    return std::make_tuple(layer(x), id, x.sin(), x.cos().requires_grad_(true));
  };
  auto const second = [](torch::nn::Linear& layer, at::Tensor h, at::Tensor id, at::Tensor s, at::Tensor) {
    return std::make_tuple(layer(h) + s, h, id);
  };
  auto const third = [](torch::nn::Linear& layer, at::Tensor h, at::Tensor skip, at::Tensor id) { return layer(h) * id + skip; };

  std::vector<tensors> expected;
  {
    for (int m = 0; m < 4; ++m) {
      auto const x = data.input.narrow(0, 2 * m, 2), t = data.target.narrow(0, 2 * m, 2);
      auto const a = first(layers[0], x, ids.narrow(0, 2 * m, 2));
      auto const b = second(layers[1], std::get<0>(a), std::get<1>(a), std::get<2>(a), std::get<3>(a));
      auto const loss = mean_square(third(layers[2], std::get<0>(b), std::get<1>(b), std::get<2>(b)), t);
      torch::autograd::backward({loss}, {at::full({}, 0.25)});
    }
    for (auto& l : layers) {
      expected.push_back({l->weight.grad().clone(), l->bias.grad().clone()});
      l->zero_grad();
    }
  }
  complaints wrong;
  chevron::run_threads({.pipeline_ranks = 3, .rendezvous = true}, [&](transport& comm) {
    auto const build = [&](int s) -> chevron::stage {
      auto layer = layers[static_cast<std::size_t>(s)];
      if (s == 0) return {layer, [=](at::Tensor x, at::Tensor id) mutable { return first(layer, x, id); }};
      if (s == 1)
        return {layer,
                [=](at::Tensor h, at::Tensor id, at::Tensor a, at::Tensor b) mutable { return second(layer, h, id, a, b); }};
      return {layer, [=](at::Tensor h, at::Tensor skip, at::Tensor id) mutable { return third(layer, h, skip, id); }};
    };
    chevron::trainer train(small_model::setup(program, comm, build));
    train.step({data.input, ids}, {data.target});
    auto const r = static_cast<std::size_t>(comm.topology().pipeline_rank());
    wrong.require(at::equal(layers[r]->weight.grad(), expected[r][0]), "weight of " + std::to_string(r));
    wrong.require(at::equal(layers[r]->bias.grad(), expected[r][1]), "bias of " + std::to_string(r));
  });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("stages with nothing to train: no parameters, or frozen ones") {
  auto const data = make_batch(6, 4);
  for (char const* name : {"1F1B", "ZB-H1"}) {
    for (int const idle : {0, 1, 2}) {
      CAPTURE(name);
      CAPTURE(idle);
      std::vector<torch::nn::Linear> layers;
      at::manual_seed(8);
      for (int i = 0; i < 3; ++i) layers.emplace_back(width, width);
      for (auto& p : layers[static_cast<std::size_t>(idle)]->parameters()) p.requires_grad_(false);
      std::vector<at::Tensor> expected;
      for (int m = 0; m < 3; ++m) {
        at::Tensor x = data.input.narrow(0, 2 * m, 2);
        for (auto& l : layers) x = l(x).sin();
        torch::autograd::backward({mean_square(x, data.target.narrow(0, 2 * m, 2))}, {at::full({}, 1.0 / 3)});
      }
      for (auto& l : layers) {
        expected.push_back(l->weight.grad().defined() ? l->weight.grad().clone() : at::Tensor());
        l->zero_grad();
      }
      complaints wrong;
      chevron::run_threads({.pipeline_ranks = 3}, [&](transport& comm) {
        auto const build = [&](int s) -> chevron::stage {
          auto layer = layers[static_cast<std::size_t>(s)];
          auto const forward = [layer](at::Tensor x) mutable { return layer(x).sin(); };
          return s != idle || idle == 1 ? chevron::stage(layer, forward) : chevron::stage(forward);
        };
        chevron::trainer train(small_model::setup(plan_of(name, 3, 3), comm, build, {}, adamw));
        auto const r = comm.topology().pipeline_rank();
        wrong.require((train.optimizer() == nullptr) == (r == idle), "an optimizer where there is something to train");
        train.step({data.input}, {data.target});
        auto const& grad = layers[static_cast<std::size_t>(r)]->weight.grad();
        wrong.require(r == idle ? !grad.defined() : at::equal(grad, expected[static_cast<std::size_t>(r)]),
                      "gradient of rank " + std::to_string(r));
      });
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    }
  }
}

TEST_CASE("evaluation between steps: loss on all ranks, outputs on the last stage's, gradients untouched") {
  for (char const* name : {"1F1B", "ZBVZeroBubble"}) {
    auto const plan = plan_of(name, 2, 3);
    auto const training = chevron::lower(chevron::prove(plan));
    auto const evaluation = chevron::lower(chevron::prove(chevron::forward_part(plan_of(name, 2, 2))));
    CHECK_FALSE(chevron::check(evaluation.view().plan));
    auto const data = make_batch(7, 5), unseen = make_batch(5, 6);
    reference whole(plan.stages);
    auto const expected = whole.forward(unseen.input)[0];
    double const expected_loss = mean_square(expected, unseen.target).item<double>();
    complaints wrong;
    std::atomic<int> with_outputs = 0;
    std::vector<double> curves[2];
    for (int const evaluating : {0, 1}) {
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        chevron::trainer train(
            {.program = training, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = adamw});
        chevron::evaluator evaluate(evaluation, train);
        for (int step = 0; step < 3; ++step) {
          if (evaluating == 1) {
            double const loss = evaluate.loss({unseen.input}, {unseen.target});
            if (step == 0) wrong.require(std::abs(loss - expected_loss) < 1e-6, "evaluation loss " + std::to_string(loss));
            auto const outputs = evaluate.outputs({unseen.input});
            bool const last = plan.rank_of.data[plan.stages - 1] == comm.topology().pipeline_rank();
            wrong.require(outputs.size() == (last ? 1u : 0u), "outputs on the last stage's rank only");
            if (last && step == 0) {
              wrong.require(at::allclose(outputs[0], expected), "outputs");
              wrong.require(!outputs[0].requires_grad(), "no graph");
              ++with_outputs;
            }
          }
          auto const report = train.step({data.input}, {data.target});
          if (comm.topology().global_rank == 0) curves[evaluating].push_back(report.loss);
        }
      });
    }
    CHECK(with_outputs == 1);
    CHECK(curves[0] == curves[1]);
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("outputs that are one number, undefined, or of shapes that do not go together") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const data = make_batch(4, 1);
  auto const run = [&](bool shapes_differ) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      auto const build = [&](int s) -> chevron::stage {
        auto weight = at::full({width}, s + 1.0).requires_grad_();
        if (s == 0) return {[weight](at::Tensor x) { return x * weight; }, {{"weight", weight}}};
        return {[weight, shapes_differ](at::Tensor x) {
                  std::int64_t const wide = shapes_differ && x[0][0].item<float>() > 0 ? 2 : 3;
                  return std::tuple(x + weight, x.sum(), at::Tensor(), x.narrow(1, 0, wide));
                },
                {{"weight", weight}}};
      };
      auto const loss = [](std::span<at::Tensor const> all) { return all[0].sum(); };
      chevron::trainer train(
          {.program = chevron::lower(chevron::prove(plan)), .transport = comm, .stages = build, .loss = loss, .optimizer = sgd});
      chevron::evaluator evaluate(chevron::lower(chevron::prove(chevron::forward_part(plan))), train);
      at::Tensor input = at::ones({4, width});
      if (shapes_differ) input.narrow(0, 2, 2).mul_(-1);
      auto const outputs = evaluate.outputs({input});
      if (comm.topology().pipeline_rank() == 0) return;
      bool const right = outputs.size() == 4 && at::equal(outputs[0], at::full({4, width}, 3.0)) &&
                         at::equal(outputs[1], at::full({2}, 2.0 * width)) && !outputs[2].defined() &&
                         at::equal(outputs[3], at::ones({4, 3}));
      if (!right) throw std::runtime_error("wrong outputs");
    });
  };
  run(false);
  CHECK_THROWS_WITH_AS(run(true), doctest::Contains("output 3 of the microbatches cannot be put together"), chevron::usage_error);
}

TEST_CASE("the norm of complex gradients counts both parts") {
  at::Tensor const gradient = at::complex(at::full({3}, 3.0f), at::full({3}, 4.0f));
  CHECK(chevron::sum_of_squares(gradient) == 75);
  CHECK(chevron::sum_of_squares(gradient.to(at::kComplexDouble).view({1, 3}).t()) == 75);
}

TEST_CASE("rates set by hand, by a function, and by a function for groups that have their own") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  auto const data = make_batch(4, 1);
  auto const grouped = [](std::vector<at::Tensor> p) {
    auto made =
        std::make_unique<torch::optim::SGD>(std::vector<at::Tensor>(p.begin(), p.begin() + 1), torch::optim::SGDOptions(0.1));
    made->add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>(p.begin() + 1, p.end()),
                                                            std::make_unique<torch::optim::SGDOptions>(0.2)));
    return made;
  };
  auto const run = [&](chevron::optimizer_factory const& make, std::function<double(long)> rate, int steps = 3) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(program, comm, build_stage, {.learning_rate = rate}, make));
      for (int step = 0; step < steps; ++step) train.step({data.input}, {data.target});
    });
  };
  run(grouped, {});
  CHECK_THROWS_WITH_AS(run(grouped, [](long) { return 0.1; }), doctest::Contains("groups have learning rates 0.1 and 0.2"),
                       chevron::usage_error);
  CHECK_THROWS_WITH_AS(run(sgd, [](long step) { return step == 2 ? std::nan("") : 0.1; }),
                       doctest::Contains("step 2, OPTIMIZER_STEP: trainer_options::learning_rate gives nan"),
                       chevron::usage_error);
}

TEST_CASE("replicas that would step with other optimizers or rates are told apart before the first step") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  auto const run = [&](chevron::optimizer_factory const& first, chevron::optimizer_factory const& second) {
    chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(program, comm, build_stage, {}, comm.topology().replica() == 0 ? first : second));
    });
  };
  run(sgd, sgd);
  CHECK_THROWS_WITH_AS(run(sgd, adamw), doctest::Contains("is stepped with SGD and stage 0's 0.weight on rank 2 with AdamW"),
                       chevron::preflight_error);
  CHECK_THROWS_WITH_AS(run(sgd, chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.2))),
                       doctest::Contains("with learning rate 0.1 and stage 0's 0.weight on rank 2 with learning rate 0.2"), chevron::preflight_error);
}

TEST_CASE("what a trainer refuses") {
  auto const program = chevron::lower(chevron::prove(plan_of("Interleaved1F1B", 2, 2)));
  auto const alone = [](auto body) { chevron::run_threads({.pipeline_ranks = 2}, body); };
  torch::nn::Linear shared(width, width);
  CHECK_THROWS_WITH_AS(
      alone([&](transport& comm) { chevron::trainer(small_model::setup(program, comm, [&](int) { return shared; })); }),
      doctest::Contains("share a parameter"), chevron::usage_error);
  CHECK_THROWS_WITH_AS(
      alone([&](transport& comm) { chevron::trainer(small_model::setup(program, comm, [](int) { return chevron::stage(); })); }),
      doctest::Contains("was built empty"), chevron::usage_error);
  CHECK_THROWS_WITH_AS(alone([&](transport& comm) { chevron::trainer(small_model::setup(plan_of("1F1B", 4, 2), comm)); }),
                       doctest::Contains("the program is for 4 pipeline ranks, there are 2"), chevron::usage_error);
  for (double const clip : {-1.0, std::nan("")}) {
    CHECK_THROWS_WITH_AS(alone([&](transport& comm) {
                           chevron::trainer(small_model::setup(program, comm, build_stage, {.clip_grad_norm = clip}));
                         }),
                         doctest::Contains("give the largest norm, or 0"), chevron::usage_error);
  }
  CHECK_THROWS_WITH_AS(
      alone([&](transport& comm) {
        chevron::trainer(small_model::setup(program, comm, build_stage, {.post_validation = true, .stable_steps = -1}));
      }),
      doctest::Contains("stable_steps is -1"), chevron::usage_error);
  CHECK_THROWS_WITH_AS(
      alone([&](transport& comm) {
        chevron::trainer(small_model::setup(program, comm, build_stage, {},
                                            chevron::optimizer<torch::optim::LBFGS>(torch::optim::LBFGSOptions(1))));
      }),
      doctest::Contains("LBFGS wants the gradient several times"), chevron::usage_error);
  auto const data = make_batch(4, 1);
  CHECK_THROWS_WITH_AS(alone([&](transport& comm) {
                         chevron::trainer train({.program = program,
                                                 .transport = comm,
                                                 .stages = build_stage,
                                                 .loss = [](at::Tensor a, at::Tensor b) { return a - b; },
                                                 .optimizer = sgd});
                         train.step({data.input}, {data.target});
                       }),
                       doctest::Contains("the loss function must give one number"), chevron::usage_error);
}
