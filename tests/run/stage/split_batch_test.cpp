// timeout: 240
#include "support/gloo_ranks.hpp"
#include "support/small_model.hpp"

#include <torch/nn/modules/dropout.h>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// One step: by replica and pass, microbatches as the trainer gets them.
using step_data = std::vector<std::vector<std::vector<chevron::batch>>>;

/// The gradients of the un-pipelined model if each microbatch weighs `weigh(microbatch) / all`.
struct plain_step {
  double loss = 0;
  std::vector<tensors> gradients;  // by stage

  plain_step(std::vector<chevron::stage>& stages, chevron::plan const& plan, step_data const& data,
             chevron::loss_function loss_of, chevron::loss_weight_function const& weigh) {
    double all = 0;
    for (auto const& replica : data) {
      for (auto const& pass : replica) {
        for (auto const& micro : pass) all += weigh(micro);
      }
    }
    for (auto& s : stages) {
      gradients.emplace_back();
      for (auto& p : s.parameters()) gradients.back().push_back(at::zeros_like(p.value));
    }
    bool first = true;
    for (auto const& replica : data) {
      std::vector<tensors> sum;
      for (auto& s : stages) {
        sum.emplace_back();
        for (auto& p : s.parameters()) sum.back().push_back(at::zeros_like(p.value));
      }
      std::vector<double> losses(replica[0].size());
      for (auto const& pass : replica) {
        std::vector<std::vector<tensors>> each;  // by microbatch, stage
        for (std::size_t m = 0; m < pass.size(); ++m) {
          for (auto& s : stages) {
            for (auto& p : s.parameters()) p.value.mutable_grad().reset();
          }
          tensors values = pass[m].inputs, next;
          for (auto& s : stages) {
            s.forward(values, next);
            values = next;
          }
          at::Tensor const one = loss_of(values, pass[m].targets, pass[m].side_inputs);
          double const weight = weigh(pass[m]) / all;
          losses[m] += one.item<double>() * weight;
          torch::autograd::backward({one}, {at::full({}, weight)});
          each.emplace_back();
          for (auto& s : stages) {
            each.back().emplace_back();
            for (auto& p : s.parameters()) each.back().back().push_back(p.value.grad().clone());
          }
        }
        for (std::size_t s = 0; s < stages.size(); ++s) {
          for (int const m : order_of(plan, static_cast<int>(s))) {
            for (std::size_t q = 0; q < sum[s].size(); ++q) sum[s][q] += each[static_cast<std::size_t>(m)][s][q];
          }
        }
      }
      for (double const l : losses) loss += l;
      for (std::size_t s = 0; s < stages.size(); ++s) {
        for (std::size_t q = 0; q < sum[s].size(); ++q) {
          if (first) {
            gradients[s][q] = sum[s][q];
          } else {
            gradients[s][q] += sum[s][q];
          }
        }
      }
      first = false;
    }
  }
};

using microbatches = std::vector<chevron::batch>;

/// The part of a pass that this rank is given.
using giver = std::function<microbatches(microbatches const&, transport&)>;
microbatches all_of(microbatches const& pass, transport&) { return pass; }
microbatches what_is_used(microbatches const& pass, transport& comm) {
  auto const& where = comm.topology();
  bool const first = where.pipeline_rank() == 0, last = where.pipeline_rank() + 1 == where.pipeline_ranks;
  microbatches out;
  if (!first && !last) return out;
  for (chevron::batch const& b : pass) out.push_back({first ? b.inputs : tensors(), last ? b.targets : tensors()});
  return out;
}

/// Trains over these steps and compares each with plain autograd.
void compare_steps(transport& comm, chevron::plan const& plan, std::vector<step_data> const& steps,
                   chevron::loss_function const& loss, chevron::loss_weight_function const& weigh,
                   chevron::trainer_options options, complaints& wrong, giver const& given = all_of) {
  options.loss_weight = weigh;
  auto const by = weigh ? weigh : [](chevron::batch const& b) { return static_cast<double>(b.inputs[0].size(0)); };
  chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                          .transport = comm,
                          .stages = build_stage,
                          .loss = loss,
                          .optimizer = sgd,
                          .options = options});
  std::vector<chevron::stage> whole;
  {
    static std::mutex one_at_a_time;  // building draws from the process's generator
    std::lock_guard const hold(one_at_a_time);
    for (int s = 0; s < plan.stages; ++s) whole.push_back(build_stage(s));
  }
  std::vector<at::Tensor> parameters;
  for (auto& s : whole) {
    for (auto& p : s.parameters()) parameters.push_back(p.value);
  }
  auto const optimizer = sgd(parameters);
  auto const replica = static_cast<std::size_t>(comm.topology().replica());
  for (std::size_t k = 0; k < steps.size(); ++k) {
    std::string const where =
        std::string(plan.name) + ", rank " + std::to_string(comm.topology().global_rank) + ", step " + std::to_string(k) + ": ";
    plain_step const expected(whole, plan, steps[k], loss, by);
    double all = 0;
    std::int64_t samples = 0;
    for (auto const& of_replica : steps[k]) {
      for (auto const& pass : of_replica) {
        for (auto const& micro : pass) {
          all += by(micro);
          samples += micro.inputs[0].size(0);
        }
      }
    }
    auto const& mine = steps[k][replica];
    for (std::size_t pass = 0; pass + 1 < mine.size(); ++pass) train.accumulate(given(mine[pass], comm), all);
    train.step(given(mine.back(), comm), all);
    auto const report = train.synchronize();
    wrong.require(report.loss == expected.loss,
                  where + "loss " + std::to_string(report.loss) + " instead of " + std::to_string(expected.loss));
    wrong.require(report.samples == samples, where + std::to_string(report.samples) + " samples");
    std::size_t i = 0;
    for (std::size_t s = 0; s < whole.size(); ++s) {
      auto const& ours = train.stages()[s].parameters();
      for (std::size_t q = 0; q < whole[s].parameters().size(); ++q, ++i) {
        whole[s].parameters()[q].value.mutable_grad() = expected.gradients[s][q];
        if (ours.empty()) continue;
        wrong.require(at::equal(ours[q].value.grad(), expected.gradients[s][q]),
                      where + "gradient of stage " + std::to_string(s) + " " + ours[q].name);
      }
    }
    optimizer->step();
    for (std::size_t s = 0; s < whole.size(); ++s) {
      auto const& ours = train.stages()[s].parameters();
      for (std::size_t q = 0; q < ours.size(); ++q) {
        wrong.require(at::equal(ours[q].value, whole[s].parameters()[q].value),
                      where + "parameter of stage " + std::to_string(s));
      }
    }
  }
}

/// Microbatches of sequences of other lengths and other numbers of samples.
chevron::batch sequences(std::int64_t samples, std::int64_t length, int seed) {
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed));
  return {{at::randn({samples, length, width}, generator)}, {at::randn({samples, length, width}, generator)}};
}

double tokens(chevron::batch const& b) { return static_cast<double>(b.targets[0].size(0) * b.targets[0].size(1)); }

std::vector<step_data> various(int steps, int replicas, int passes, int micro_batches, bool changing) {
  std::vector<step_data> out(static_cast<std::size_t>(steps));
  int seed = 1;
  for (auto& step : out) {
    step.resize(static_cast<std::size_t>(replicas));
    for (auto& replica : step) {
      replica.resize(static_cast<std::size_t>(passes));
      for (auto& pass : replica) {
        for (int m = 0; m < micro_batches; ++m, ++seed) {
          int const number = changing ? seed : m;
          pass.push_back(sequences(1 + number % 3, 2 + number * 7 % 5, seed));
        }
      }
    }
  }
  return out;
}

template <class Body>
void on_gloo(int ranks, int replicas, std::chrono::milliseconds deadline, complaints& wrong, Body const& body) {
  for (std::string const& said : gloo_ranks::run(ranks, replicas, deadline, body)) wrong.require(said.empty(), said);
}

}  // namespace

TEST_CASE("gradients of several batches add up to those of one step, bit for bit") {
  at::set_num_threads(1);
  for (char const* name : schedules) {
    for (int const replicas : {1, 2}) {
      auto const plan = plan_of(name, 2, 3);
      auto const steps = various(4, replicas, 3, 3, false);
      for (bool const early : {false, true}) {
        complaints wrong;
        chevron::run_threads({.pipeline_ranks = 2, .replicas = replicas}, [&](transport& comm) {
          compare_steps(comm, plan, steps, mean_square, {}, {.post_validation = early, .stable_steps = 1}, wrong);
        });
        for (auto const& w : wrong.all) FAIL_CHECK(w);
      }
    }
  }
}

TEST_CASE("microbatches as the caller cut them, each of its own sizes, weighed by tokens, on threads and over Gloo") {
  at::set_num_threads(1);
  for (char const* name : {"1F1B", "Interleaved1F1B", "ZB-H2", "ZBVZeroBubble"}) {
    auto const plan = plan_of(name, 2, 4);
    auto const steps = various(5, 2, 2, 4, true);
    complaints wrong;
    chevron::run_threads({.pipeline_ranks = 2, .replicas = 2},
                         [&](transport& comm) { compare_steps(comm, plan, steps, mean_square, tokens, {}, wrong); });
    on_gloo(2, 2, std::chrono::seconds(100), wrong, [&](transport& comm) {
      compare_steps(comm, plan, steps, mean_square, tokens, {.post_validation = true, .stable_steps = 0}, wrong);
    });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("weighed by tokens, the loss is the mean over tokens") {
  auto const plan = plan_of("1F1B", 2, 2);
  std::vector<chevron::batch> const parts{sequences(1, 2, 1), sequences(3, 5, 2)};
  std::vector<chevron::stage> whole;
  for (int s = 0; s < plan.stages; ++s) whole.push_back(build_stage(s));
  double sum = 0;
  for (auto const& b : parts) {
    tensors values = b.inputs, next;
    for (auto& s : whole) {
      s.forward(values, next);
      values = next;
    }
    sum += at::mse_loss(values[0], b.targets[0], at::Reduction::Sum).item<double>() / width;
  }
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm, build_stage, {.loss_weight = tokens}));
    chevron::evaluator evaluate(chevron::lower(chevron::prove(chevron::forward_part(plan))), train);
    double const evaluated = evaluate.loss(parts);
    double const trained = train.step(parts).loss;
    if (std::abs(trained - sum / 17) > 1e-6 || std::abs(evaluated - sum / 17) > 1e-6)
      throw std::runtime_error("not the mean over tokens");
  });
}

TEST_CASE("microbatches of no tokens, and of no samples, count nothing, though their loss is not a number") {
  auto const counted = [](chevron::batch const& b) { return b.targets[0].ge(0).sum().item<double>(); };
  auto const loss = [](at::Tensor out, at::Tensor target) { return at::cross_entropy_loss(out, target); };  // ignores -100
  auto const with_targets = [](std::int64_t samples, int seed, bool ignored) -> chevron::batch {
    at::Tensor const target = ignored ? at::full({samples}, -100, at::kLong) : at::arange(samples) % width;
    return {{make_batch(samples, seed).input}, {target}};
  };
  for (char const* name : {"1F1B", "ZB-H1", "ZBVZeroBubble"}) {
    for (int const ranks : {1, 2}) {
      auto const plan = plan_of(name, ranks, 4);
      std::vector<chevron::batch> const parts{with_targets(2, 1, false), with_targets(3, 2, true), with_targets(0, 3, false),
                                              with_targets(4, 4, false)};
      // The same without those that count nothing.
      std::vector<chevron::stage> whole;
      for (int s = 0; s < plan.stages; ++s) whole.push_back(build_stage(s));
      std::vector<std::vector<tensors>> expected;  // by microbatch, stage
      double expected_loss = 0;
      for (std::size_t const m : {0, 3}) {
        tensors values = parts[m].inputs, next;
        for (auto& s : whole) {
          for (auto& p : s.parameters()) p.value.mutable_grad().reset();
          s.forward(values, next);
          values = next;
        }
        at::Tensor const one = loss(values[0], parts[m].targets[0]);
        double const weight = counted(parts[m]) / 6;
        expected_loss += one.item<double>() * weight;
        torch::autograd::backward({one}, {at::full({}, weight)});
        expected.emplace_back();
        for (auto& s : whole) {
          expected.back().emplace_back();
          for (auto& p : s.parameters()) expected.back().back().push_back(p.value.grad().clone());
        }
      }
      for (bool const recompute : {false, true}) {
        complaints wrong;
        chevron::run_threads({.pipeline_ranks = ranks, .rendezvous = true}, [&](transport& comm) {
          auto const build = [&](int s) { return build_stage(s).recompute(recompute); };
          chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                                  .transport = comm,
                                  .stages = build,
                                  .loss = loss,
                                  .optimizer = sgd,
                                  .options = {.loss_weight = counted}});
          chevron::evaluator evaluate(chevron::lower(chevron::prove(chevron::forward_part(plan))), train);
          double const evaluated = evaluate.loss(parts);
          auto const report = train.step(parts);
          std::string const where = std::string(name) + ", P=" + std::to_string(ranks) + ": ";
          wrong.require(report.loss == expected_loss, where + "loss");
          wrong.require(evaluated == expected_loss, where + "loss in evaluation");
          for (int s = 0; s < plan.stages; ++s) {
            if (!train.stages()[static_cast<std::size_t>(s)]) continue;
            bool const last_first = order_of(plan, s).front() == 3;
            auto const& mine = train.stages()[static_cast<std::size_t>(s)].parameters();
            for (std::size_t q = 0; q < mine.size(); ++q) {
              auto const& a = expected[last_first ? 1 : 0][static_cast<std::size_t>(s)][q];
              auto const& b = expected[last_first ? 0 : 1][static_cast<std::size_t>(s)][q];
              wrong.require(at::equal(mine[q].value.grad(), a + b), where + mine[q].name);
            }
          }
        });
        for (auto const& w : wrong.all) FAIL_CHECK(w);
      }
    }
  }
}

TEST_CASE("replicas that begin with other weights are told apart before the first step") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  auto const run = [&] {
    chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
      auto const build = [&](int s) {
        chevron::stage made = build_stage(s);
        at::NoGradGuard const off;
        if (comm.topology().global_rank == 3) made.parameters()[2].value.select(0, 5).select(0, 5).add_(1e-6);
        return made;
      };
      chevron::trainer(small_model::setup(program, comm, build));
    });
  };
  CHECK_THROWS_WITH_AS(run(), doctest::Contains("rank 3 has `values of stage 1 1.weight: "), chevron::preflight_error);
}

TEST_CASE("each accumulated batch draws its own random numbers") {
  auto const plan = plan_of("ZB-H1", 2, 2);
  chevron::batch const half{{at::ones({2, width})}, {at::zeros({2, width})}};
  std::mutex mutex;
  std::vector<std::vector<float>> masks;
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    auto const build = [&](int s) -> chevron::stage {
      torch::nn::Linear layer(width, width);
      return chevron::stage(layer, [&, layer, s](at::Tensor x) mutable {
        auto const mask = at::rand({1, 8});
        std::lock_guard const hold(mutex);
        if (s == 0) masks.push_back({mask.data_ptr<float>(), mask.data_ptr<float>() + 8});
        return layer(x);
      });
    };
    chevron::trainer train(small_model::setup(plan, comm, build));
    for (int step = 0; step < 2; ++step) {
      train.accumulate(half, 4);
      train.step(half, 4);
    }
  });
  REQUIRE(masks.size() == 8);
  for (std::size_t a = 0; a < 8; ++a) {
    for (std::size_t b = a + 1; b < 8; ++b) CHECK(masks[a] != masks[b]);
  }
}

TEST_CASE("what cannot be weighed or cut says why") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const program = chevron::lower(chevron::prove(plan));
  auto const one = sequences(2, 3, 1), other = sequences(1, 4, 2);
  auto const run = [&](auto body, chevron::loss_weight_function loss_weight = {}, builder const& build = build_stage) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(program, comm, build, {.loss_weight = loss_weight}));
      body(train);
    });
  };
  using chevron::usage_error;
  CHECK_THROWS_WITH_AS(run([&](auto& train) { train.step(std::vector<chevron::batch>{one}); }),
                       doctest::Contains("the program runs 2 microbatches a step, 1 were given"), usage_error);
  // The offsets of packed documents are no rows: three documents, four offsets.
  at::Tensor const offsets = at::tensor({0, 2, 5, 6});
  auto const documents = make_batch(6, 3);
  CHECK_THROWS_WITH_AS(
      run([&](auto& train) {
        train.step(chevron::batch{{documents.input}, {documents.target}, {{"offsets", offsets}}});
      }),
      doctest::Contains("side input `offsets` has 4 samples (dimension 0) but input 0 has 6. Remedy: as many in each; a "
                        "number without dimensions, or a side input that is `whole`"),
      usage_error);
  CHECK_NOTHROW(run(
      [&](auto& train) {
        train.step(chevron::batch{{documents.input}, {documents.target}, {{"offsets", offsets, true}}});
      },
      {},
      [](int s) -> chevron::stage {
        if (s == 1) return build_stage(1);
        torch::nn::Linear layer(width, width);
        return chevron::stage(layer, [layer](at::Tensor x, at::Tensor) mutable { return layer(x); }).side_inputs({"offsets"});
      }));
  CHECK_THROWS_WITH_AS(run([&](auto& train) {
                         train.step(std::vector<chevron::batch>{one, {}});
                       }),
                       doctest::Contains("microbatch 1 has none"), usage_error);
  CHECK_THROWS_WITH_AS(run([&](auto& train) {
                         train.step(chevron::batch{{one.inputs[0].to_sparse()}, one.targets});
                       }),
                       doctest::Contains("input 0 is sparse, and cannot be cut into samples (dimension 0). Remedy: to_dense()"),
                       usage_error);
  CHECK_THROWS_WITH_AS(run([&](auto& train) { train.accumulate(one, 0); }),
                       doctest::Contains("accumulate() needs the total of the whole step"), usage_error);
  CHECK_THROWS_WITH_AS(run([&](auto& train) {
                         train.accumulate(one, 4);
                         train.step(one, 3);
                       }),
                       doctest::Contains("weighed as shares of 4 and of 3"), usage_error);
  CHECK_THROWS_WITH_AS(
      run([&](auto& train) {
        train.accumulate(one, 5);
        train.step(one, 5);
      }),
      doctest::Contains("the replicas' batches count 4 samples (or units of trainer_options::loss_weight), but each was taken for a share of 5"),
      usage_error);
  CHECK_THROWS_WITH_AS(run([&](auto& train) { train.step(one); }, [](chevron::batch const&) { return -1.0; }),
                       doctest::Contains("microbatch 0 was weighed as -1"), usage_error);
  CHECK_THROWS_WITH_AS(run([&](auto& train) { train.step(one); }, [](chevron::batch const&) { return 0.0; }),
                       doctest::Contains("count nothing"), usage_error);
  CHECK_THROWS_WITH_AS(
      run([&](auto& train) { train.step(); }),
      doctest::Contains("a step needs at least one input or target tensor on the ranks of the first and of the last "
                        "stage, and microbatch 0 has none"),
      usage_error);
  // Each microbatch counts 2 nodes on the first rank, and 1 graph on the last.
  CHECK_THROWS_WITH_AS(
      run([&](auto& train) {
        bool const first = train.comm().topology().global_rank == 0;
        microbatches parts;
        for (int m = 0; m < 2; ++m)
          parts.push_back({first ? one.inputs : tensors(), first ? tensors() : tensors{one.targets[0].narrow(0, 0, 1)}});
        train.step(parts);
      }),
      doctest::Contains("trainer_options::loss_weight where inputs and targets have different sizes"), usage_error);
}

TEST_CASE("a rank is given what its stages and the loss use, one between the ends nothing: the same as all of the batch") {
  at::set_num_threads(1);
  for (char const* name : {"1F1B", "ZB-H1"}) {
    auto const plan = plan_of(name, 3, 4);
    auto const steps = various(4, 2, 2, 4, true);  // of other shapes in each pass
    complaints wrong;
    chevron::run_threads({.pipeline_ranks = 3, .replicas = 2, .deadline = std::chrono::seconds(30)}, [&](transport& comm) {
      compare_steps(comm, plan, steps, mean_square, tokens, {}, wrong, what_is_used);
    });
    on_gloo(3, 2, std::chrono::seconds(30), wrong, [&](transport& comm) {
      compare_steps(comm, plan, steps, mean_square, tokens, {.post_validation = true, .stable_steps = 1}, wrong, what_is_used);
    });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("nothing for a rank between the ends: step(), evaluation, and shapes that only the other ranks see change") {
  at::set_num_threads(1);
  auto const plan = plan_of("1F1B", 3, 2);
  auto const program = chevron::lower(chevron::prove(plan));
  std::vector<batch> data;
  for (int i = 0; i < 4; ++i) data.push_back(make_batch(4 + 2 * i, 7 + i));
  std::vector<double> expected;
  tensors outputs;
  {
    reference whole(plan.stages);
    auto const optimizer = sgd(whole.parameters());
    for (auto const& b : data) {
      whole.run(plan, {b});
      expected.push_back(whole.loss);
      optimizer->step();
    }
    at::NoGradGuard const off;
    for (auto const& b : data) outputs.push_back(whole.forward(b.input)[0]);
  }
  complaints wrong;
  auto const body = [&](transport& comm) {
    int const rank = comm.topology().pipeline_rank();
    auto const given = [&](batch const& b) {
      return chevron::batch{rank == 0 ? tensors{b.input} : tensors(), rank == 2 ? tensors{b.target} : tensors()};
    };
    chevron::trainer train(small_model::setup(program, comm));
    for (std::size_t i = 0; i < data.size(); ++i) {
      auto const report = rank == 1 ? train.step() : train.step(given(data[i]));
      wrong.require(report.loss == expected[i], "loss of step " + std::to_string(i));
      wrong.require(report.samples == data[i].input.size(0), "samples of step " + std::to_string(i));
    }
    chevron::evaluator evaluator(train);
    for (std::size_t i = 0; i < data.size(); ++i) {
      tensors const out = evaluator.outputs(given(data[i]));
      if (rank == 2) wrong.require(at::allclose(out[0], outputs[i], 1e-5, 1e-6), "outputs of batch " + std::to_string(i));
      double const loss = evaluator.loss(given(data[i]));
      double const right = mean_square(outputs[i], data[i].target).item<double>();
      wrong.require(std::abs(loss - right) < 1e-6, "held-out loss of batch " + std::to_string(i));
    }
  };
  chevron::run_threads({.pipeline_ranks = 3, .deadline = std::chrono::seconds(30)}, body);
  on_gloo(3, 1, std::chrono::seconds(30), wrong, body);
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("microbatches of other first dimensions: each counts 1, or what loss_weight says") {
  at::set_num_threads(1);
  auto const plan = plan_of("ZB-H1", 2, 3);
  auto const pooled = [](at::Tensor nodes, at::Tensor graphs) {
    return at::mse_loss(nodes.view({-1, 3, width}).mean(1), graphs);
  };
  auto const length_first = [](at::Tensor rows, at::Tensor samples) { return at::mse_loss(rows.mean(0), samples); };
  for (bool const graphs : {true, false}) {
    microbatches parts;
    for (int m = 0; m < 3; ++m) {
      auto const x = make_batch(3 * (m + 1), 20 + m), y = make_batch(m + 1, 30 + m);
      if (graphs) parts.push_back({{x.input}, {y.input}});  // 3 nodes a graph
      if (!graphs) parts.push_back({{x.input.view({3, m + 1, width})}, {y.input}});
    }
    chevron::loss_function const loss = graphs ? chevron::loss_function(pooled) : chevron::loss_function(length_first);
    chevron::loss_weight_function const alike = [](chevron::batch const&) { return 1.0; },
                                        by_target = [](chevron::batch const&b) {
                                          return static_cast<double>(b.targets[0].size(0));
                                        };
    for (auto const& [given, counted] : {std::pair(chevron::loss_weight_function(), alike), std::pair(by_target, by_target)}) {
      std::vector<chevron::stage> whole;
      for (int s = 0; s < plan.stages; ++s) whole.push_back(build_stage(s));
      plain_step const expected(whole, plan, {{parts}}, loss, counted);
      complaints wrong;
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                                .transport = comm,
                                .stages = build_stage,
                                .loss = loss,
                                .optimizer = sgd,
                                .options = {.loss_weight = given}});
        wrong.require(train.step(parts).loss == expected.loss, "loss");
        for (std::size_t s = 0; s < whole.size(); ++s) {
          auto const& ours = train.stages()[s].parameters();
          for (std::size_t q = 0; q < ours.size(); ++q)
            wrong.require(at::equal(ours[q].value.grad(), expected.gradients[s][q]), "gradient of stage " + std::to_string(s));
        }
      });
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    }
  }
}

TEST_CASE("the loss takes side inputs: a number of the step, class weights, a mask by sample") {
  at::set_num_threads(1);
  auto const call = [](at::Tensor out, at::Tensor target, at::Tensor mask, at::Tensor weights, at::Tensor factor) {
    return ((out - target).square() * mask * weights).mean() * factor;
  };
  auto const loss = chevron::loss_function(call).side_inputs({"mask", "weights", "factor"});
  auto const plan = plan_of("ZBVZeroBubble", 2, 4);
  auto steps = various(3, 2, 2, 4, true);
  for (std::size_t step = 0; step < steps.size(); ++step) {
    for (auto& replica : steps[step]) {
      for (auto& pass : replica) {
        for (auto& b : pass) {
          b.side_inputs = {{"factor", at::full({}, 0.5 + static_cast<double>(step))},
                           {"weights", at::arange(1, width + 1), true},
                           {"mask", b.targets[0].gt(-0.5)}};
        }
      }
    }
  }
  for (bool const early : {false, true}) {
    complaints wrong;
    auto const body = [&](transport& comm) {
      compare_steps(comm, plan, steps, loss, tokens, {.post_validation = early, .stable_steps = 0}, wrong);
    };
    early ? on_gloo(2, 2, std::chrono::seconds(30), wrong, body)
          : chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, body);
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("side inputs of the loss are cut with the batch, go to a recomputed stage and to evaluation, and are missed by name") {
  at::set_num_threads(1);
  auto const plan = plan_of("1F1B", 2, 4);
  auto const masked = [](at::Tensor out, at::Tensor target, at::Tensor mask) { return ((out - target).square() * mask).mean(); };
  auto const [x, y] = make_batch(8, 3);
  at::Tensor const mask = at::arange(8).view({8, 1}) / 8.;
  double expected = 0;
  {
    at::NoGradGuard const off;
    reference whole(2);
    expected = masked(whole.forward(x)[0], y, mask).item<double>();
  }
  complaints wrong;
  for (bool const recompute : {false, true}) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                              .transport = comm,
                              .stages = [&](int s) { return build_stage(s).recompute(recompute); },
                              .loss = chevron::loss_function(masked).side_inputs({"mask"}),
                              .optimizer = sgd});
      chevron::batch const given{{x}, {y}, {{"mask", mask}}};
      chevron::evaluator evaluator(train);
      wrong.require(std::abs(evaluator.loss(given) - expected) < 1e-6, "held-out loss");
      wrong.require(std::abs(train.step(given).loss - expected) < 1e-6, "loss");
    });
  }
  for (auto const& w : wrong.all) FAIL_CHECK(w);
  CHECK_THROWS_WITH_AS(
      chevron::run_threads({.pipeline_ranks = 2},
                           [&](transport& comm) {
                             chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                                                     .transport = comm,
                                                     .stages = build_stage,
                                                     .loss = chevron::loss_function(masked).side_inputs({"mask"}),
                                                     .optimizer = sgd});
                             train.step({.inputs = {x}, .targets = {y}, .side_inputs = {{"maks", mask}}});
                           }),
      doctest::Contains("no stage and no loss takes the side input `maks` of the batch; those that are taken are `mask`"),
      chevron::error);
}

TEST_CASE("undefined tensors and numbers among inputs and targets go whole to each microbatch") {
  at::set_num_threads(1);
  auto const plan = plan_of("1F1B", 2, 4);
  auto const [x, y] = make_batch(8, 3);
  auto const scaled = [](at::Tensor out, at::Tensor target, at::Tensor factor) { return at::mse_loss(out, target) * factor; };
  auto const build = [](int s) -> chevron::stage {
    at::manual_seed(s);
    torch::nn::Linear l(width, width);
    if (s > 0) return l;
    return {l, [l](at::Tensor in, std::optional<at::Tensor> mask) mutable {
              return mask && mask->defined() ? l(in) * *mask : l(in);
            }};
  };
  std::vector<double> losses[2];
  complaints wrong;
  for (bool const given : {false, true}) {  // undefined, or a number that changes nothing
    auto const body = [&](transport& comm) {
      chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                              .transport = comm,
                              .stages = build,
                              .loss = scaled,
                              .optimizer = sgd});
      for (int step = 0; step < 3; ++step) {
        double const loss = train.step(tensors{x, given ? at::ones({}) : at::Tensor()}, tensors{y, at::full({}, step + 1.)}).loss;
        if (comm.topology().global_rank == 0) losses[given].push_back(loss / (step + 1));
      }
    };
    given ? on_gloo(2, 1, std::chrono::seconds(30), wrong, body) : chevron::run_threads({.pipeline_ranks = 2}, body);
  }
  for (auto const& w : wrong.all) FAIL_CHECK(w);
  CHECK(losses[0].size() == 3);
  CHECK(losses[0] == losses[1]);
  CHECK(losses[0][1] < losses[0][0]);
}

TEST_CASE("a microbatch may come to count nothing, and count again, under every transport") {
  auto const counted = [](chevron::batch const& b) { return b.targets[0].ge(0).sum().item<double>(); };
  auto const loss = [](at::Tensor out, at::Tensor target) { return at::cross_entropy_loss(out, target); };  // ignores -100
  auto const parts_of = [](int step) {
    std::vector<chevron::batch> parts;
    for (int m = 0; m < 4; ++m) {
      at::Tensor const target = m == step ? at::full({3}, -100, at::kLong) : at::arange(3) % width;
      parts.push_back({{make_batch(3, 10 * step + m).input}, {target}});
    }
    return parts;
  };
  for (char const* name : {"1F1B", "ZBVZeroBubble"}) {
    auto const program = chevron::lower(chevron::prove(plan_of(name, 2, 4)));
    std::vector<double> losses[2];
    auto const train_on = [&](transport& comm, std::vector<double>& out) {
      chevron::trainer train({.program = program,
                              .transport = comm,
                              .stages = build_stage,
                              .loss = loss,
                              .optimizer = sgd,
                              .options = {.loss_weight = counted}});
      for (int step = 0; step < 6; ++step) {  // in the first and the last two each counts
        double const got = train.step(parts_of(step == 0 ? -1 : step - 1)).loss;
        if (comm.topology().global_rank == 0) out.push_back(got);
      }
    };
    complaints wrong;
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) { train_on(comm, losses[0]); });
    on_gloo(2, 1, std::chrono::milliseconds(20000), wrong, [&](transport& comm) { train_on(comm, losses[1]); });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
    for (double const each : losses[0]) CHECK(std::isfinite(each));
    CHECK(losses[0].size() == 6);
    CHECK(losses[0] == losses[1]);
  }
}

TEST_CASE("a rank with another batch than its pipeline gets no wrong rows: Gloo's ranks all end with an error") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  for (std::int64_t const samples : {2, 6}) {
    complaints wrong;
    int steps_done = 0;
    on_gloo(2, 1, std::chrono::milliseconds(1500), wrong, [&](transport& comm) {
      chevron::trainer train(
          {.program = program, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = sgd});
      auto const usual = sequences(4, 3, 1), unusual = sequences(samples, 3, 2);
      train.step(usual);
      train.step(comm.topology().global_rank == 0 ? unusual : usual);
      ++steps_done;
    });
    CHECK(steps_done == 0);
    CHECK(wrong.all.size() == 2);
    for (auto const& w : wrong.all) CHECK_MESSAGE(w.find("rank ") == 0, w);
  }
}

TEST_CASE("a batch that was computed with parameters of its own is refused: they would not be trained") {
  auto const plan = plan_of("1F1B", 1, 2);
  chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm));
    torch::nn::Linear outside(width, width);
    at::Tensor const x = at::ones({4, width}), y = outside(x);
    CHECK_THROWS_WITH_AS(train.step({y}, {x}), doctest::Contains("input 0 needs a gradient, which does not leave the pipeline"),
                         chevron::usage_error);
    CHECK_THROWS_WITH_AS(train.step({x}, {y}), doctest::Contains("target 0 needs a gradient"), chevron::usage_error);
    CHECK_THROWS_WITH_AS(train.step(std::vector<chevron::batch>{{{x}, {x}}, {{x}, {x}, {{"mask", y}}}}),
                         doctest::Contains("side input `mask` needs a gradient"), chevron::usage_error);
    CHECK_THROWS_WITH_AS(train.accumulate({y}, {x}, 8), doctest::Contains("input 0 needs a gradient"), chevron::usage_error);
    CHECK_NOTHROW(train.step({x}, {x}));
  });
}

TEST_CASE("sparse inputs, in microbatches that the caller cut: the step of the same numbers in dense inputs") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  auto const first = make_batch(4, 1), second = make_batch(3, 2);
  microbatches const dense{{{first.input}, {first.target}}, {{second.input}, {second.target}}};
  at::Tensor const start = at::arange(width * width).view({width, width}).sin();
  auto const stepped = [&](bool sparse) {
    std::vector<at::Tensor> out(2);
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      at::Tensor w;
      chevron::trainer train(small_model::setup(program, comm, [&](int s) -> chevron::stage {
        torch::nn::Linear layer(torch::nn::LinearOptions(width, width).bias(false));
        w = layer->weight;
        at::NoGradGuard const off;
        w.copy_(start);
        if (s == 1) return layer;
        return chevron::stage(layer, [layer](at::Tensor x) { return at::mm(x, layer->weight); });
      }));
      microbatches given = dense;
      for (chevron::batch& one : given) {
        if (sparse) one.inputs[0] = one.inputs[0].to_sparse();
      }
      train.step(given);
      out[static_cast<std::size_t>(comm.topology().global_rank)] = w.detach().clone();
    });
    return out;
  };
  auto const of_dense = stepped(false), of_sparse = stepped(true);
  for (std::size_t rank = 0; rank < 2; ++rank) {
    CHECK(at::allclose(of_sparse[rank], of_dense[rank]));
    CHECK_FALSE(at::allclose(of_dense[rank], start));
  }
}
