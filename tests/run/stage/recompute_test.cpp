#include "support/recomputed_model.hpp"

#include <atomic>

#include <torch/nn/modules/batchnorm.h>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// The most bytes that one step needs beyond those that were there before it, on one rank.
std::int64_t peak_of_step(char const* name, int micro_batches, builder const& build) {
  std::int64_t most = 0;
  chevron::run_threads({}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan_of(name, 1, micro_batches), comm, build));
    most = small_model::peak_of_step(train, micro_batches);
  });
  return most;
}

}  // namespace

TEST_CASE("recomputing gives the same gradients to the last bit, with dropout, for every schedule") {
  check_recomputed_gradients(plan_of, {0, 1, 2, 3});
}

TEST_CASE("twenty steps with dropout, recomputed, two replicas") {
  check_recomputed_training({"1F1B", "ZBVZeroBubble", "ZB-H1"}, plan_of);
}

TEST_CASE("dropout differs by seed, step, replica, stage and microbatch, and never touches the default generator") {
  at::Tensor const ones = at::ones({64});
  auto const draw = [&](chevron::rng_key where) {
    chevron::random_scope const scope(where);
    return at::dropout(ones, 0.5, true);
  };
  chevron::rng_key const here{1, 2, 3, 4, 5, 6};
  at::manual_seed(7);
  auto const next_by_default = at::rand({4});
  at::manual_seed(7);
  CHECK(at::equal(draw(here), draw(here)));
  for (chevron::rng_key const other : {chevron::rng_key{0, 2, 3, 4, 5, 6},
                                       {1, 0, 3, 4, 5, 6},
                                       {1, 2, 0, 4, 5, 6},
                                       {1, 2, 3, 0, 5, 6},
                                       {1, 2, 3, 4, 0, 6},
                                       {1, 2, 3, 4, 5, 0}}) {
    CHECK_FALSE(at::equal(draw(here), draw(other)));
  }
  {
    chevron::random_scope const outer(here);
    auto const first = at::rand({4});
    draw({});
    auto const second = at::rand({4});
    chevron::random_scope const again(here);
    CHECK(at::equal(at::rand({4}), first));
    CHECK(at::equal(at::rand({4}), second));
    auto mine = at::make_generator<at::CPUGeneratorImpl>(3), same = at::make_generator<at::CPUGeneratorImpl>(3);
    CHECK(at::equal(at::rand({4}, mine), at::rand({4}, same)));  // a call that names a generator draws from it
  }
  CHECK(at::equal(at::rand({4}), next_by_default));
}

TEST_CASE("the forward of a recomputed stage runs twice, also where I and W are apart") {
  for (char const* name : schedules) {
    for (bool const on : {false, true}) {
      auto const plan = plan_of(name, 2, 4);
      auto const data = make_batch(8, 1);
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(plan.stages));
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        auto const build = [&](int s) {
          torch::nn::Linear layer(width, width);
          chevron::stage made(layer, [&calls, layer, s](at::Tensor x) mutable {
            ++calls[static_cast<std::size_t>(s)];
            return layer(x);
          });
          made.recompute(on);
          return made;
        };
        chevron::trainer train(small_model::setup(plan, comm, build));
        train.step({data.input}, {data.target});
      });
      for (auto const& c : calls) CHECK_MESSAGE(c == (on ? 8 : 4), name);
    }
  }
}

TEST_CASE("a recomputed chunk keeps its input and nothing else between F and B") {
  auto const builder_of = [](bool recompute) { return [recompute](int s) { return widening_stage(s).recompute(recompute); }; };
  // One rank, two stages, all forwards before all backwards: the growth by microbatch is the bytes of a chunk of each stage.
  auto const growth = [&](bool recompute) {
    return (peak_of_step("LoopedBFS", 8, builder_of(recompute)) - peak_of_step("LoopedBFS", 4, builder_of(recompute))) / 4;
  };
  std::int64_t const input = samples * wide * 4, saved = 2 * 8 * input;
  // Without: the tensors that both stages save, and stage 1's input and output (the loss saves it). Stage 0's inputs are the
  // batch.
  CHECK(growth(false) >= 2 * saved + 2 * input);
  CHECK(growth(false) < 2 * saved + 2 * input + 1024);
  // With: the second stage's input. Losses are a few bytes.
  CHECK(growth(true) >= input);
  CHECK(growth(true) < input + 1024);
}

TEST_CASE("between I and W a chunk keeps what W needs, and nothing that only I needed") {
  auto& count = counting_allocator::installed();
  chevron::stage part = widening_stage(1);
  for (auto const& p : part.parameters()) p.value.mutable_grad() = at::zeros_like(p.value);
  at::Tensor const x = at::ones({samples, wide});
  std::int64_t const input = samples * wide * 4;
  chevron::stage_call const task{.owner = &part, .training = true, .differentiable = true};
  chevron::detail::stage_execution work;
  tensors in{x}, out, of_out, of_in;
  std::int64_t const before = count.live;
  work.forward(task, in, out);
  of_out = {at::ones_like(out[0])};
  out.clear();
  CHECK(count.live - before <= 17 * input + 1024);  // the input of GELU, its output, and the gradient we made
  work.backward_input(task, of_out, of_in);
  of_in.clear();
  // For the two weights: GELU's output and the gradients that arrive. GELU's own input is gone.
  CHECK(count.live - before <= 17 * input + 1024);
  CHECK(count.live - before >= 17 * input);
  work.backward_weight(task);
  CHECK(count.live - before <= 1024);
}

TEST_CASE("a stage recomputed part by part has one part's activations at a time") {
  auto const builder_of = [](int parts, int pieces) {
    return [=](int) {
      std::vector<chevron::stage> made;
      for (int p = 0; p < parts; ++p) made.push_back(widening_stage(p));
      if (pieces == parts) return chevron::in_sequence(made).recompute();
      chevron::stage whole(
          [made](at::Tensor x) mutable {
            for (auto& each : made) {
              tensors in{x}, out;
              each.forward(in, out);
              x = out[0];
            }
            return x;
          },
          chevron::in_sequence(made).parameters());
      return whole.recompute();
    };
  };
  std::int64_t const input = samples * wide * 4, saved = 2 * 8 * input;
  auto const in_one = [&](int parts) { return peak_of_step("GPipe", 2, builder_of(parts, 1)); };
  auto const in_parts = [&](int parts) { return peak_of_step("GPipe", 2, builder_of(parts, parts)); };
  CHECK((in_one(6) - in_one(2)) / 4 >= saved);                // each further part adds the tensors that it saves
  CHECK((in_parts(6) - in_parts(2)) / 4 < 2 * input + 1024);  // or only its input, for each of two microbatches
}

TEST_CASE("BatchNorm's running mean counts each microbatch once") {
  auto const plan = plan_of("ZB-H1", 2, 4);
  auto const data = make_batch(16, 3);
  std::vector<std::vector<at::Tensor>> found;
  for (bool const on : {false, true}) {
    std::vector<torch::nn::BatchNorm1d> norms{torch::nn::BatchNorm1d(width), torch::nn::BatchNorm1d(width)};
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(
          plan, comm, [&](int s) { return chevron::stage(norms[static_cast<std::size_t>(s)]).recompute(on); }));
      train.step({data.input}, {data.target});
      train.step({data.input}, {data.target});
    });
    found.emplace_back();
    for (auto& n : norms) {
      for (auto& t : {n->running_mean, n->running_var, n->num_batches_tracked, n->weight, n->bias})
        found.back().push_back(t.detach().clone());
    }
  }
  for (std::size_t i = 0; i < found[0].size(); ++i) CHECK(at::equal(found[0][i], found[1][i]));
  CHECK(found[1][2].item<std::int64_t>() == 8);
}

TEST_CASE("a stage that changes its input in place is refused, with the remedy") {
  auto const data = make_batch(4, 3);
  auto const run = [&](bool recompute) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      auto const build = [&](int s) {
        torch::nn::Linear layer(width, width);
        chevron::stage made(layer, [layer, s](at::Tensor x) mutable { return layer(s == 1 ? x.mul_(2) : x); });
        return made.recompute(recompute);
      };
      chevron::trainer train(small_model::setup(plan_of("1F1B", 2, 2), comm, build));
      train.step({data.input}, {data.target});
    });
  };
  run(false);
  CHECK_THROWS_WITH_AS(run(true), doctest::Contains("rank 1, step 0, 1F0: stage 1 threw: the stage changes its input 0 in place"),
                       chevron::usage_error);
}

TEST_CASE("nor may what it was computed from be changed later, or what it takes from the batch") {
  auto const data = make_batch(4, 3);
  auto const run = [&](bool passed_on, bool recompute) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      auto const build = [&](int s) -> chevron::stage {
        torch::nn::Linear layer(width, width);
        if (!passed_on) {
          chevron::stage made(layer, [layer, s](at::Tensor x, at::Tensor factor) mutable {
            return layer(x) * (s == 1 ? factor.mul_(2) : factor).clone();
          });
          return made.side_inputs({"factor"}).recompute(recompute);
        }
        if (s == 1) return {layer, [layer](at::Tensor x, at::Tensor y) mutable { return layer(x) + y.mul_(2); }};
        chevron::stage made(layer, [layer](at::Tensor x) mutable { return std::make_tuple(layer(x.clone()), x); });
        return made.recompute(recompute);
      };
      chevron::trainer train(small_model::setup(plan_of("1F1B", 2, 2), comm, build));
      chevron::batch batch{{data.input.clone()}, {data.target}};
      if (!passed_on) batch.side_inputs.push_back({"factor", at::ones({4, width})});
      train.step(batch);
    });
  };
  run(false, false);
  run(true, false);
  CHECK_THROWS_WITH_AS(run(false, true),
                       doctest::Contains("1F0: stage 1 threw: the stage changes a side input of the batch in place"),
                       chevron::usage_error);
  CHECK_THROWS_WITH_AS(run(true, true),
                       doctest::Contains("0B0: stage 0 threw: a later part or stage changes this stage's input 0 in place"),
                       chevron::usage_error);
}
