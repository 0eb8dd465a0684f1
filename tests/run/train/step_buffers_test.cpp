// Buffers after steps that are skipped: as if the step had not been, with accumulation, recomputation, replicas, post-validation.

#include "support/small_model.hpp"

#include <limits>

#include <torch/nn/modules/batchnorm.h>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

struct variant {
  char const* name;
  bool post_validation = false, accumulates = false, recomputes = false, scaled = false, broadcast = true;
  int replicas = 1;
};

/// Trains on batches by number. \returns the buffers of each stage of replica 0 after each step that is not skipped
std::vector<at::Tensor> buffers_after(variant const& v, std::vector<int> const& batches, int bad) {
  std::vector<at::Tensor> out(2);
  std::mutex guard;
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  chevron::run_threads({.pipeline_ranks = 2, .replicas = v.replicas}, [&](transport& comm) {
    chevron::trainer_options options{.when_not_finite = chevron::not_finite::skip,
                                     .broadcast_buffers = v.broadcast,
                                     .post_validation = v.post_validation,
                                     .stable_steps = 0};
    auto const build = [&](int s) {
      at::manual_seed(s);
      chevron::stage made = torch::nn::Sequential(torch::nn::BatchNorm1d(width), torch::nn::Linear(width, width));
      return made.recompute(v.recomputes);
    };
    chevron::trainer train(small_model::setup(program, comm, build, options));
    int const replica = comm.topology().replica();
    for (int const number : batches) {
      auto data = make_batch(16, 10 * number + replica);
      if (number == bad && replica == 0) data.input[3][1] = std::numeric_limits<float>::quiet_NaN();
      if (v.accumulates) {
        auto const first = make_batch(16, 10 * number + 5 + replica);
        train.accumulate(first.input, first.target, 32 * v.replicas);
        train.step(data.input, data.target, 32 * v.replicas);
      } else {
        train.step(data.input, data.target);
      }
    }
    auto const last = train.synchronize();
    if (replica != v.replicas - 1) return;
    std::lock_guard const hold(guard);
    if (batches.back() == bad && !last.skipped) throw std::runtime_error("not skipped");
    for (std::size_t s = 0; s < 2; ++s) {
      if (!train.stages()[s]) continue;
      std::vector<at::Tensor> all;
      for (auto const& b : train.stages()[s].buffers()) all.push_back(b.value.to(at::kDouble).flatten());
      for (auto const& p : train.stages()[s].parameters()) all.push_back(p.value.detach().to(at::kDouble).flatten());
      out[s] = at::cat(all);
    }
  });
  return out;
}

}  // namespace

TEST_CASE("a step that is skipped leaves buffers and parameters as if it had not been") {
  std::vector<variant> const all = {{"plain"},
                                    {.name = "accumulated", .accumulates = true},
                                    {.name = "recomputed", .recomputes = true},
                                    {.name = "replicas", .replicas = 2},
                                    {.name = "buffers of each replica", .broadcast = false, .replicas = 2}};
  for (variant v : all) {
    for (bool const post : {false, true}) {
      v.post_validation = post;
      CAPTURE(v.name);
      CAPTURE(post);
      auto const without = buffers_after(v, {0, 2, 3}, -1);
      auto const skipped = buffers_after(v, {0, 1, 2, 3}, 1), at_the_end = buffers_after(v, {0, 2, 3, 1}, 1);
      for (std::size_t s = 0; s < 2; ++s) {
        CHECK(at::isfinite(without[s]).all().item<bool>());
        CHECK(at::equal(without[s], skipped[s]));
        CHECK(at::equal(without[s], at_the_end[s]));
      }
    }
  }
}

TEST_CASE("a buffer that the caller writes after a step keeps the value, though the step is skipped later") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 1, 2)));
  for (bool const waits : {false, true}) {
    chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(
          program, comm,
          [](int s) {
            at::manual_seed(s);
            return chevron::stage(torch::nn::Sequential(torch::nn::BatchNorm1d(width), torch::nn::Linear(width, width)));
          },
          {.when_not_finite = chevron::not_finite::skip, .post_validation = true, .stable_steps = 0}));
      auto const data = make_batch(16, 1);
      auto bad = data.input.clone();
      bad[3][1] = std::numeric_limits<float>::quiet_NaN();
      train.step(data.input, data.target);
      auto const before = train.stages()[0].buffers()[0].value.clone();
      train.step(bad, data.target);
      train.stages()[0].buffers()[2].value.fill_(100);  // num_batches_tracked
      if (waits) {
        train.synchronize();
        CHECK(train.stages()[0].buffers()[2].value.item<long>() == 100);
        CHECK(at::equal(train.stages()[0].buffers()[0].value, before));
      }
      train.step(data.input, data.target);
      train.synchronize();
      CHECK(train.stages()[0].buffers()[2].value.item<long>() == 102);
    });
  }
}
