// Training with slices: whole runs, replicas, post-validation, accumulation, evaluation, packed documents, and errors.
// timeout: 400
#include "support/gloo_ranks.hpp"
#include "support/sliced_model.hpp"

#include <doctest/doctest.h>

using namespace sliced_model;
using chevron::transport;
using small_model::adamw, small_model::mean_square, small_model::sgd;

namespace {

constexpr int steps = 20;
constexpr double clip = 0.1;
double rate(long step) { return 1e-2 / static_cast<double>(step + 1); }

void run_ranks(bool processes, int ranks, int replicas, std::function<void(transport&)> const& rank) {
  if (processes) {
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(ranks, replicas, gloo_ranks::all_share, rank));
  } else {
    chevron::run_threads({.pipeline_ranks = ranks, .replicas = replicas}, rank);
  }
}

/// Sizes differ from step to step.
sequences data_of(int step, int replica) { return make_sequences(5 - replica, 8 + step % 3, 10 * step + replica); }

/// Losses of a plain training run.
std::vector<double> plain_losses(chevron::plan const& plan, builder const& build, int replicas) {
  reference whole(plan.stages, build);
  auto const optimizer = adamw(whole.parameters());
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    std::vector<std::vector<sequences>> parts;
    for (int r = 0; r < replicas; ++r) parts.push_back(parts_of(data_of(step, r), plan.size.micro_batches));
    whole.run(plan, parts, {.step = step});
    losses.push_back(whole.loss);
    if (whole.grad_norm > clip) {
      for (auto& p : whole.parameters()) p.mutable_grad().mul_(clip / (whole.grad_norm + 1e-6));
    }
    optimizer->param_groups()[0].options().set_lr(rate(step));
    optimizer->step();
  }
  return losses;
}

void compare_training(chevron::plan const& plan, builder const& build, int replicas, bool processes,
                      chevron::trainer_options options = {}) {
  std::string const where = words_of(plan);
  INFO(where);
  auto const expected = plain_losses(plan, build, replicas);
  auto const program = chevron::lower(chevron::prove(plan));
  options.clip_grad_norm = clip;
  options.learning_rate = rate;
  complaints wrong;
  run_ranks(processes, plan.size.ranks, replicas, [&](transport& comm) {
    std::vector<double> losses;
    auto own = options;
    own.on_report = [&](chevron::step_report const& report) { losses.push_back(report.loss); };
    chevron::trainer train(
        {.program = program, .transport = comm, .stages = build, .loss = mean_square, .optimizer = adamw, .options = own});
    for (int step = 0; step < steps; ++step) {
      if (step == 3) train.measure_bytes();
      auto const data = data_of(step, comm.topology().replica());
      train.step(data.input, data.target);
    }
    train.synchronize();
    wrong.require(losses == expected, where + "other losses");
  });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
  CHECK(expected.back() < expected.front());
}

chevron::stage build_dropping(int number) {
  at::manual_seed(800 + number);
  return chevron::in_sequence({build_attention(number),
                               torch::nn::Sequential(torch::nn::Linear(width, width), torch::nn::Dropout(0.2)),
                               build_recurrent(number)});
}

}  // namespace

TEST_CASE("sliced training runs are those of a plain loop: threads, processes, replicas") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1", "SeqInterleaved1F1B", "GPipe"}) {
    auto const plan = plan_of(name, {.ranks = 2, .micro_batches = 3, .slices = 3});
    compare_training(plan, build_attention, 2, false);
    compare_training(plan, build_dropping, 1, true);
  }
  compare_training(plan_of("SeqInterleaved1F1B", {.ranks = 2, .micro_batches = 3, .slices = 3}), build_attention, 1, false);
  compare_training(plan_of("SeqZB-H1", {.ranks = 2, .micro_batches = 2, .slices = 4}), build_recurrent, 2, true);
}

TEST_CASE("sliced training that steps before all ranks were heard: forwards that are thrown away leave no carry") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1"}) {
    auto const plan = plan_of(name, {.ranks = 3, .micro_batches = 3, .slices = 3});
    // Most steps are clipped, so with so few stable steps they are done over.
    compare_training(plan, build_dropping, 1, false, {.post_validation = true, .stable_steps = 0});
    compare_training(plan, build_attention, 2, false, {.post_validation = true, .stable_steps = 0});
  }
}

TEST_CASE("sliced training runs with a sharded optimizer and with sharded gradients are those of a plain loop") {
  at::set_num_threads(1);
  // Each pair of a sharding, a schedule and a kind of step once.
  for (bool const of_gradients : {false, true}) {
    for (bool const ahead : {false, true}) {
      chevron::trainer_options options{};
      options.shard = of_gradients ? chevron::sharding::gradients : chevron::sharding::optimizer;
      options.bucket_bytes = 300;  // several buckets, and parameters cut in two
      options.post_validation = ahead;
      options.stable_steps = 0;
      char const* const name = of_gradients == ahead ? "Seq1F1B" : "SeqZB-H1";
      auto const plan = plan_of(name, {.ranks = 2, .micro_batches = 2, .slices = 3});
      compare_training(plan, build_dropping, 2, ahead && of_gradients, options);
    }
  }
}

TEST_CASE("sliced: batches that are accumulated") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1"}) {
    auto const plan = plan_of(name, {.ranks = 2, .micro_batches = 2, .slices = 3});
    auto const first = make_sequences(4, 7, 1), second = make_sequences(3, 5, 2);
    reference whole(plan.stages, build_dropping);
    whole.run(plan, {parts_of(first, 2)}, {.total = 7});
    whole.run(plan, {parts_of(second, 2)}, {.total = 7, .first = plan.size.units(), .adds = true});
    complaints wrong;
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(plan, comm, build_dropping));
      train.accumulate(first.input, first.target, 7);
      train.step(second.input, second.target, 7);
      compare_gradients(train, whole, words_of(plan), wrong);
    });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("sliced: evaluation, of all microbatches and of fewer, and outputs put together") {
  at::set_num_threads(1);
  auto const plan = plan_of("SeqZB-H1", {.ranks = 2, .micro_batches = 3, .slices = 3});
  auto const data = make_sequences(5, 8, 4);
  complaints wrong;
  reference whole(plan.stages, build_attention);
  auto const evaluated = [&](int micro_batches) {
    double loss = 0;
    tensors outputs;
    auto const fewer = plan_of("SeqZB-H1", {.ranks = 2, .micro_batches = micro_batches, .slices = 3});
    reference again(fewer.stages, build_attention);
    again.run(fewer, {parts_of(data, micro_batches)});
    loss = again.loss;
    return loss;
  };
  tensors of_parts;
  for (auto const& part : parts_of(data, 3)) {
    std::vector<tensors> left;
    tensors of_slices;
    for (std::int64_t begin = 0; begin < 8; begin += 3) {
      at::NoGradGuard const no_graph;
      tensors values{part.input.narrow(1, begin, std::min<std::int64_t>(3, 8 - begin))}, next;
      for (std::size_t s = 0; s < whole.stages.size(); ++s) {
        if (left.size() == s) left.emplace_back(2);
        whole.stages[s].forward(values, next, {.carried = &left[s]});
        values = next;
      }
      of_slices.push_back(values[0]);
    }
    of_parts.push_back(at::cat(of_slices, 1));
  }
  at::Tensor const expected = at::cat(of_parts);
  double const of_three = evaluated(3), of_two = evaluated(2);
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm, build_attention));
    chevron::evaluator all(train), two(train, 2);
    wrong.require(all.loss(data.input, data.target) == of_three, "loss of three microbatches");
    wrong.require(two.loss(data.input, data.target) == of_two, "loss of two microbatches");
    tensors const outputs = all.outputs(data.input);
    if (comm.topology().pipeline_rank() == 1) wrong.require(at::equal(outputs[0], expected), "outputs");
    train.step(data.input, data.target);
    train.step(data.input, data.target);
    wrong.require(all.loss(data.input, data.target) < of_three, "the loss does not fall");
  });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("gradients of slices are those of whole sequences within rounding, in float32 and under autocast") {
  at::set_num_threads(1);
  auto const data = make_sequences(4, 12, 6);
  auto const gradients = [&](int slices, std::optional<at::ScalarType> autocast, double attention) {
    auto const plan = plan_of("SeqZB-H1", {.ranks = 2, .micro_batches = 2, .slices = slices});
    std::map<std::string, at::Tensor> out;
    std::mutex mutex;
    chevron::trainer_options options{.autocast = autocast};
    if (attention > 0) options.slice_cuts = chevron::slices_by_cost(attention);
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                              .transport = comm,
                              .stages = build_attention,
                              .loss = [](at::Tensor y, at::Tensor t) { return at::mse_loss(y.to(at::kFloat), t); },
                              .optimizer = sgd,
                              .options = options});
      train.step(data.input, data.target);
      std::lock_guard const hold(mutex);
      for (std::size_t s = 0; s < train.stages().size(); ++s) {
        for (auto const& p : train.stages()[s].parameters()) out[std::to_string(s) + p.name] = p.value.grad().clone();
      }
    });
    return out;
  };
  auto const largest_difference = [](auto const& a, auto const& b) {
    double most = 0;
    for (auto const& [name, value] : a) {
      double const norm = value.norm().template item<double>();
      most = std::max(most, (value - b.at(name)).norm().template item<double>() / norm);
    }
    return most;
  };
  auto const whole = gradients(1, {}, 0);
  auto const half = gradients(1, at::kBFloat16, 0);
  for (int slices = 2; slices <= 4; ++slices) {
    for (double const attention : {0.0, 0.5}) {
      CHECK(largest_difference(whole, gradients(slices, {}, attention)) < 1e-5);
      CHECK(largest_difference(half, gradients(slices, at::kBFloat16, attention)) < 2e-2);
    }
  }
}
