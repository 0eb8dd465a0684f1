// timeout: 400
// Gradients that are freed between their sum and the stage's next backward: the same bits as without, and the bytes that go.
#include "support/counting_allocator.hpp"
#include "support/host_graphs.hpp"
#include "support/sharded_training.hpp"
#include "support/thread_ranks.hpp"

#include <thread>

#include <chevron/transports/gloo/gloo_transport.hpp>

#include <doctest/doctest.h>

using namespace sharded_training;
using chevron::sharding;

namespace {

/// A stage's only parameter, so wide that activations and all else are small beside it.
constexpr std::int64_t side = 512, gradient_bytes = side * side * 4;

struct bytes {
  std::int64_t peak = 0, after = 0;  // above the bytes before training: in the last step, and at its end
};

/// The plan with an R for each F, all of them between a rank's forwards and its backwards.
chevron::plan with_all_recomputed_early(chevron::plan_view const& of) {
  return chevron::detail::with_lists(of, 2 * of.total(), [&](int rank, auto const& put) {
    for (bool const again : {false, true}) {
      for (int i = of.begin[rank]; i < of.begin[rank + 1]; ++i) {
        chevron::action const a = of.actions[i];
        if (a.kind != chevron::kind::forward) continue;
        put(again ? chevron::make_action(chevron::kind::recompute, static_cast<int>(a.stage), static_cast<int>(a.micro_batch))
                  : a);
      }
    }
    for (int i = of.begin[rank]; i < of.begin[rank + 1]; ++i) {
      if (of.actions[i].kind != chevron::kind::forward) put(of.actions[i]);
    }
  });
}

/// One pipeline rank on each of two replicas. SGD keeps no state.
bytes of_training(char const* schedule, int chunks, sharding shard, bool recompute_early = false) {
  auto& alive = counting_allocator::installed();
  chevron::plan plan = chevron::catalogue::make_plan(schedule, {.ranks = 1, .micro_batches = 2, .chunks = chunks});
  if (recompute_early) plan = with_all_recomputed_early(plan);
  auto const program = chevron::lower(chevron::prove(plan));
  bytes out;
  std::atomic<int> ready{0}, done{0};
  auto const meet = [](std::atomic<int>& at, int count) {
    for (++at; at < count;) std::this_thread::yield();
  };
  std::int64_t before = 0;
  chevron::run_threads({.pipeline_ranks = 1, .replicas = 2}, [&](transport& comm) {
    bool const first = comm.topology().replica() == 0;
    meet(ready, 2);
    if (first) before = alive.live;
    meet(ready, 4);
    auto const build = [recompute_early](int number) {
      at::manual_seed(number);
      chevron::stage one(torch::nn::Linear(torch::nn::LinearOptions(side, side).bias(false)));
      if (recompute_early) one.recompute();
      return one;
    };
    chevron::trainer train(small_model::setup(program, comm, build, {.shard = shard},
                                              chevron::optimizer<chevron::fused_sgd>(torch::optim::SGDOptions(1e-2))));
    at::Tensor const x = at::ones({2, side}), y = at::zeros({2, side});
    train.step(x, y);
    meet(ready, 6);
    if (first) alive.peak = alive.live.load();
    meet(ready, 8);
    train.step(x, y);
    meet(done, 2);
    if (first) out = {alive.peak - before, alive.live - before};
    meet(done, 4);
    for (auto& s : train.stages()) {
      for (auto& p : s.parameters()) CHECK(p.value.grad().defined() == (shard != sharding::gradients));
    }
  });
  return out;
}

/// In gradients of one stage, of one replica.
double gradients(std::int64_t some) { return static_cast<double>(some) / gradient_bytes / 2; }

}  // namespace

TEST_CASE("50 steps of six schedules over 1 to 4 replicas, some of them clipped: every bit as without shares") {
  check_fifty_steps(sharding::gradients);
}

TEST_CASE("several chunks of a rank whose backwards follow one another, in small buckets") {
  at::set_num_threads(1);
  setting what{.schedule = "LoopedBFS", .replicas = 3, .chunks = 3};
  what.options.bucket_bytes = 3000;
  check_same_as_unsharded(what, sharding::gradients);
  what.schedule = "ZBVZeroBubble";
  what.chunks = 0;
  check_same_as_unsharded(what, sharding::gradients);
}

TEST_CASE("tied parameters, loss scaling, skipped steps, accumulated batches, half precision, post-validation") {
  at::set_num_threads(1);
  for (bool const post_validation : {false, true}) {
    for (char const* const schedule : {"ZB-H1", "LoopedBFS"}) {
      CAPTURE(post_validation);
      demanding const all({.schedule = schedule, .replicas = 3, .steps = 10}, post_validation);
      for (setting const& one : {all.tied, all.skipped, all.accumulated}) check_same_as_unsharded(one, sharding::gradients);
      setting one = all.clipped;
      one.dtype = at::kBFloat16;
      check_same_as_unsharded(one, sharding::gradients);
    }
  }
}

TEST_CASE("over Gloo, in shared memory and without: as on threads") {
  at::set_num_threads(1);
  for (bool const near : {true, false}) {
    setting what{.schedule = "LoopedBFS", .replicas = near ? 3 : 2};
    what.options.clip_grad_norm = 0.35;
    std::vector<outcome> got(static_cast<std::size_t>(what.ranks * what.replicas));
    auto const said = thread_ranks::said(
        thread_ranks::run(what.ranks, what.replicas, [&](chevron::topology const& where, auto const& store, auto const& watch) {
          chevron::gloo_transport comm(where, store, watch, {.shared_memory = near});
          comm.deadline(std::chrono::seconds(60));
          got[static_cast<std::size_t>(where.global_rank)] = train_on(comm, sharded(what, sharding::gradients));
          comm.close();
        }));
    for (auto const& each : said) CHECK(each == "");
    check_same(on_threads(what), got);
  }
}

TEST_CASE("bytes: of four chunks whose backwards follow one another a rank holds one gradient and shares, of one chunk all") {
  at::set_num_threads(1);
  bytes const whole = of_training("LoopedBFS", 4, sharding::optimizer), freed = of_training("LoopedBFS", 4, sharding::gradients);
  // Four parameters, and a gradient that autograd is about to add, on one replica or both. Then four gradients; or the last
  // gradient and three shares of a half.
  CHECK(gradients(whole.peak) >= 0.99 * (4 + 0.5 + 4));
  CHECK(gradients(freed.peak) <= 1.01 * (4 + 1 + 1 + 3 * 0.5));
  CHECK(gradients(whole.after) == doctest::Approx(4 + 4).epsilon(0.02));
  CHECK(gradients(freed.after) == doctest::Approx(4 + 4 * 0.5).epsilon(0.02));
  CHECK(gradients(of_training("GPipe", 1, sharding::gradients).peak) >= 0.99 * (1 + 0.5 + 1));
}

TEST_CASE("an R makes no gradients: of four chunks that are recomputed first a rank still holds one gradient and shares") {
  at::set_num_threads(1);
  CHECK(gradients(of_training("LoopedBFS", 4, sharding::gradients, true).peak) <= 1.01 * (4 + 1 + 1 + 3 * 0.5));
}

TEST_CASE("refused, with the remedy: graphs, hooks before the optimizer's step") {
  setting what = sharded({}, sharding::gradients);
  what.options.before_optimizer_step = [](chevron::final_gradients const&) {};
  CHECK_THROWS_WITH_AS(on_threads(what), doctest::Contains("before_optimizer_step does not go with a sharded optimizer"),
                       chevron::usage_error);
  what = sharded({}, sharding::gradients);
  what.options.graphs = std::make_shared<host_graphs::maker>();
  CHECK_THROWS_WITH_AS(on_threads(what), doctest::Contains("shard = sharding::gradients does not go with graphs"),
                       chevron::usage_error);
}

TEST_CASE("`.grad` that is emptied or given while a step runs is found, also once the buffer is freed") {
  at::set_num_threads(1);
  for (bool const gives : {false, true}) {
    auto const program =
        chevron::lower(chevron::prove(chevron::catalogue::make_plan("LoopedBFS", {.ranks = 1, .micro_batches = 2, .chunks = 3})));
    auto const rank = [&](transport& comm) {
      auto const build = [&](int number) {
        at::manual_seed(number);
        torch::nn::Linear made(4, 4);
        at::Tensor const weight = made->weight;
        if (number == 2) {
          made->weight.register_hook(
              [weight, gives](at::Tensor const& gradient) { weight.mutable_grad() = gives ? gradient.clone() : at::Tensor(); });
        }
        return chevron::stage(made);
      };
      chevron::trainer train(small_model::setup(program, comm, build, {.shard = sharding::gradients}, adamw));
      train.step(at::ones({2, 4}), at::zeros({2, 4}));
    };
    CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 1, .replicas = 2}, rank),
                         doctest::Contains("the gradient of stage 2's weight was replaced while the step ran"),
                         chevron::usage_error);
  }
}
