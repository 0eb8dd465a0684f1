// timeout: 300
// Parameters that replicas gather while the next step begins: the same bits, and no stage that computes before its own are whole.
#include "support/scratch_folder.hpp"
#include "support/sharded_training.hpp"

#include <algorithm>

#include <chevron/run/train/evaluator.hpp>

#include <doctest/doctest.h>

using namespace sharded_training;

namespace {

setting late(setting what) {
  what.overlap_gather = true;
  return what;
}

/// Trains a few steps on two replicas, and calls `see(trainer, rank's trace)` after each.
template <class See>
void watch(char const* schedule, chevron::trainer_options options, See const& see) {
  options.shard = chevron::sharding::optimizer;
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
    auto const program =
        chevron::lower(chevron::prove(chevron::catalogue::make_plan(schedule, {.ranks = 2, .micro_batches = 4})));
    chevron::trainer train({.program = program,
                            .transport = comm,
                            .stages = [](int s) { return build_wide_stage(s); },
                            .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
                            .optimizer = chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2)),
                            .options = options});
    for (int k = 0; k < 4; ++k) {
      auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(10 * k + comm.topology().replica()));
      at::Tensor const input = at::randn({8, wide}, generator);
      train.step(input, at::randn({8, wide}, generator));
      see(train);
    }
    train.synchronize();
  });
}

}  // namespace

TEST_CASE("every schedule over 1 to 4 replicas, some steps clipped: every bit as without shares") {
  at::set_num_threads(1);
  for (char const* const schedule : {"GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"}) {
    for (int const replicas : {1, 2, 3, 4}) {
      setting what = late({.schedule = schedule, .replicas = replicas, .steps = 8});
      what.options.clip_grad_norm = 0.35;
      check_same_as_unsharded(what, replicas == 3 ? chevron::sharding::gradients : chevron::sharding::optimizer);
    }
  }
}

TEST_CASE("ties, scaling, skipped steps, accumulated batches, copies compared, post-validation") {
  at::set_num_threads(1);
  for (bool const post_validation : {false, true}) {
    CAPTURE(post_validation);
    demanding const all(late({.schedule = "ZBVZeroBubble", .replicas = 3, .steps = 10}), post_validation);
    for (setting const& one : {all.tied, all.skipped, all.accumulated}) check_same_as_unsharded(one);
  }
}

TEST_CASE("checkpoints and evaluations between two steps read whole parameters") {
  at::set_num_threads(1);
  scratch_folder const folder;
  setting what = late({.schedule = "Interleaved1F1B", .replicas = 3, .steps = 4});
  auto first = what, second = what;
  first.to = folder.path / "four";
  second.from = first.to;
  auto const whole = on_threads({.schedule = "Interleaved1F1B", .replicas = 3, .steps = 8});
  on_threads(sharded(first));
  auto resumed = on_threads(sharded(second));
  for (std::size_t r = 0; r < whole.size(); ++r) {
    for (std::size_t i = 0; i < whole[r].values.size(); ++i) CHECK(whole[r].values[i].equal(resumed[r].values[i]));
  }

  std::vector<double> losses;
  for (bool const overlaps : {false, true}) {
    watch("ZBVZeroBubble", {.overlap_gather = overlaps}, [&](chevron::trainer& train) {
      chevron::evaluator evaluate(
          chevron::lower(chevron::prove(chevron::forward_part(train.program().plan, 2))), train);
      double const loss = evaluate.loss({at::ones({4, wide})}, {at::zeros({4, wide})});
      if (train.comm().topology().global_rank == 0) losses.push_back(loss);
    });
  }
  REQUIRE(losses.size() == 8);
  for (std::size_t k = 0; k < 4; ++k) CHECK(losses[k] == losses[k + 4]);
}

TEST_CASE("step returns with gathers under way; a stage of the next step waits for its own, and synchronize for all") {
  for (char const* const schedule : {"1F1B", "Interleaved1F1B", "ZBVZeroBubble"}) {
    for (bool const overlaps : {true, false}) {
      CAPTURE(schedule);
      watch(schedule, {.overlap_gather = overlaps}, [&](chevron::trainer& train) {
        CHECK(chevron::detail::trainer_access::optimizer(train).gathering() == overlaps);
        std::vector<bool> whole(static_cast<std::size_t>(train.program().plan.stages));
        long unsharded = 0;
        for (chevron::trace_event const& e : train.last_trace().entries()) {
          if (e.op.kind == chevron::kind::unshard) whole[e.op.stage] = true, ++unsharded;
          if (overlaps && e.op.kind == chevron::kind::forward) CHECK(whole[e.op.stage]);
        }
        auto const& stages = train.stages();
        auto const here = std::count_if(stages.begin(), stages.end(), [](chevron::stage const& s) { return bool(s); });
        CHECK(unsharded == (overlaps ? here : 0));
        if (train.next_step() != 2) return;
        train.synchronize();
        CHECK(!chevron::detail::trainer_access::optimizer(train).gathering());
      });
    }
  }
}

TEST_CASE("without a sharded optimizer no parameter is gathered: refused") {
  setting what{.steps = 1};
  what.options.overlap_gather = true;
  CHECK_THROWS_WITH_AS(on_threads(what), doctest::Contains("overlap_gather without a sharded optimizer"), chevron::usage_error);
}
