// timeout: 120
// Options of training on the simulated device: results equal those in main memory bit for bit, and every operator is ordered.
#include "accelerator/training.hpp"
#include "support/half_model.hpp"

#include <atomic>
#include <filesystem>
#include <map>
#include <mutex>

#include <unistd.h>

#include <chevron/checkpoint.hpp>

using accelerator::compare;
using accelerator::job;
using accelerator::joined;

namespace {

/// Schedules with different work of streams: messages in one direction, in both, halves of a backward, pairs, two chunks a rank.
constexpr char const* some[] = {"GPipe", "1F1B", "ZB-H2", "ZBVZeroBubble", "DualPipeV", "Interleaved1F1B"};

chevron::stage dropping(int number) { return small_model::build_dropping_stage(number); }
chevron::stage recomputed_first(int number) { return small_model::build_dropping_stage(number, 1); }
chevron::stage recomputed(int number) { return small_model::build_dropping_stage(number, 3); }

/// Keeps nothing of its input: once it is computed, that memory is free.
chevron::stage forgetful(int number) {
  at::manual_seed(400 + number);
  return torch::nn::Sequential(torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }),
                               torch::nn::Linear(small_model::width, small_model::width),
                               torch::nn::Functional([](at::Tensor const& x) { return x.mul(2); }));
}

/// In half precision, of inputs in any.
chevron::stage in_bfloat16(int number) {
  at::manual_seed(600 + number);
  torch::nn::Sequential made(torch::nn::Functional([](at::Tensor const& x) { return x.to(at::kBFloat16); }),
                             torch::nn::Linear(small_model::width, small_model::width),
                             torch::nn::Functional([](at::Tensor const& x) { return x.tanh().mul(2); }));
  for (auto& p : made->parameters()) p.set_data(p.to(at::kBFloat16));
  return made;
}

/// The first stage and the last one of a pipeline of four share a weight.
chevron::stage tied(int number) {
  chevron::stage made = small_model::build_stage(number);
  if (number == 0 || number == 3) made.tie(made.parameters()[2].name, "in and out");
  return made;
}

/// With running means, which replicas hand on.
chevron::stage normalized(int number) {
  at::manual_seed(300 + number);
  return torch::nn::Sequential(torch::nn::Linear(small_model::width, small_model::width),
                               torch::nn::BatchNorm1d(small_model::width),
                               torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }));
}

}  // namespace

TEST_CASE("dropout, and parts that are computed again") {
  for (char const* const name : some) {
    compare({.schedule = name, .ranks = 2, .micro_batches = 4, .build = dropping, .options = {.seed = 3}}, "dropout");
    compare({.schedule = name, .ranks = 2, .micro_batches = 4, .build = recomputed_first, .options = {.seed = 3}}, "first part");
    compare({.schedule = name, .ranks = 2, .micro_batches = 4, .build = recomputed, .options = {.seed = 3}}, "recompute");
  }
}

TEST_CASE("inputs and outputs that nobody keeps") {
  for (char const* const name : some) {
    compare({.schedule = name, .ranks = 2, .micro_batches = 6, .build = forgetful}, "forgetful");
    compare({.schedule = name, .ranks = 1, .micro_batches = 6, .build = forgetful}, "forgetful, one rank");
  }
}

TEST_CASE("accumulation, with small buckets over replicas") {
  for (char const* const name : some)
    compare({.schedule = name, .ranks = 2, .replicas = 2, .micro_batches = 4, .options = {.bucket_bytes = 100}, .passes = 2},
            "accumulation");
}

TEST_CASE("running means of replicas") {
  for (char const* const name : some)
    compare({.schedule = name, .ranks = 2, .replicas = 2, .micro_batches = 4, .build = normalized}, "batch norm");
}

TEST_CASE("tied weights, with messages outside of all programs") {
  compare({.schedule = "1F1B", .ranks = 4, .micro_batches = 5, .build = tied, .steps = 4}, "tied");
  compare({.schedule = "ZBVZeroBubble", .ranks = 2, .micro_batches = 5, .build = tied, .steps = 4}, "tied on one rank");
  compare({.schedule = "1F1B", .ranks = 4, .replicas = 2, .micro_batches = 5, .build = tied}, "tied, replicas");
}

TEST_CASE("a sharded optimizer, with gradients that are freed and without") {
  for (char const* const name : some) {
    for (bool const is_ahead : {false, true}) {
      for (auto const shard : {chevron::sharding::optimizer, chevron::sharding::gradients}) {
        compare({.schedule = name,
                 .ranks = 2,
                 .replicas = 2,
                 .micro_batches = 4,
                 .options = {.clip_grad_norm = 1, .shard = shard, .post_validation = is_ahead, .stable_steps = 1},
                 .steps = 6,
                 .large_batches = true},
                "shares");
      }
    }
  }
  compare({.schedule = "LoopedBFS",
           .ranks = 2,
           .replicas = 2,
           .micro_batches = 4,
           .options = {.shard = chevron::sharding::gradients}},
          "shares of several chunks");
  compare({.schedule = "1F1B",
           .ranks = 4,
           .replicas = 2,
           .micro_batches = 5,
           .build = tied,
           .options = {.shard = chevron::sharding::optimizer}},
          "shares, tied");
}

TEST_CASE("shares that are gathered while the next step begins") {
  for (char const* const name : {"1F1B", "ZBVZeroBubble"}) {
    for (auto const by : {joined::streams, joined::threads}) {
      for (bool const is_ahead : {false, true}) {
        job what{.schedule = name, .ranks = 2, .replicas = 2, .micro_batches = 4, .by = by, .steps = 6, .large_batches = true};
        what.options.clip_grad_norm = 1;
        what.options.shard = is_ahead ? chevron::sharding::gradients : chevron::sharding::optimizer;
        what.options.overlap_gather = true;
        what.options.post_validation = is_ahead;
        what.options.stable_steps = 1;
        compare(what, "overlapped gather");
      }
    }
  }
}

TEST_CASE("float32 masters of half-precision parameters, in shares and whole") {
  for (auto const shard : {chevron::sharding::nothing, chevron::sharding::optimizer, chevron::sharding::gradients}) {
    for (bool const is_ahead : {false, true}) {
      std::atomic<int> seen = 0, on_device = 0;
      job what{.schedule = "1F1B", .ranks = 2, .replicas = 2, .micro_batches = 4, .build = in_bfloat16, .steps = 6};
      what.loss = half_model::mean_square_in_float;
      what.large_batches = true;
      what.options.clip_grad_norm = 1;
      what.options.shard = shard;
      what.options.master_parameters = true;
      what.options.post_validation = is_ahead;
      what.options.stable_steps = 1;
      what.between = [&](chevron::trainer& train, long) {
        for (auto const& group : train.optimizer()->param_groups()) {
          for (at::Tensor const& stepped : group.params()) {
            ++seen;
            on_device += stepped.scalar_type() == at::kFloat && !stepped.is_cpu() ? 1 : 0;
          }
        }
      };
      compare(what, "masters");
      CHECK(seen.load() > 0);
      CHECK(2 * on_device.load() == seen.load());  // the other half is the job in main memory
    }
  }
}

TEST_CASE("at a step's end the host waits for its device once, and once for the gather") {
  // Of a step on inputs that are on the device, by rank.
  std::mutex mutex;
  std::map<int, long> waits;
  auto const count = [&](chevron::trainer& train, long step) {
    if (step == 0) return;
    auto const batch = small_model::make_batch(8, 7);
    int const rank = train.comm().topology().global_rank;
    at::Device const where = chevron::detail::trainer_access::context(train).streams()->where();
    at::Tensor const input = batch.input.to(where), target = batch.target.to(input.device());
    bool const away = !input.is_cpu();
    long const before = away ? accelerator::detector::instance().host_waits(rank) : 0;
    train.step({{input}, {target}}, 8. * train.comm().topology().replicas);
    std::lock_guard const hold(mutex);
    if (away) waits[rank] = accelerator::detector::instance().host_waits(rank) - before;
  };
  for (char const* const name : some) {
    for (bool const is_ahead : {false, true}) {
      waits.clear();
      compare({.schedule = name,
               .ranks = 2,
               .replicas = 2,
               .micro_batches = 4,
               .options = {.clip_grad_norm = 1, .post_validation = is_ahead, .stable_steps = 1},
               .steps = 3,
               .between = count},
              "waits");
      for (auto const& [rank, of_step] : waits) {
        CAPTURE(rank);
        CHECK(of_step == 2);
      }
    }
  }
}

TEST_CASE("steps that are taken back") {
  for (char const* const name : some) {
    compare({.schedule = name,
             .ranks = 2,
             .micro_batches = 4,
             .build = dropping,
             .options = {.clip_grad_norm = 20, .post_validation = true, .stable_steps = 1},
             .steps = 8,
             .large_batches = true},
            "post-validation");
  }
}

TEST_CASE("half precision") {
  for (char const* const name : some)
    compare({.schedule = name, .ranks = 2, .micro_batches = 4, .options = {.autocast = at::kBFloat16}}, "autocast");
}

TEST_CASE("evaluation between steps, and what follows it") {
  for (char const* const name : some) {
    auto const evaluate = [](chevron::trainer& train, long) {
      chevron::evaluator forwards(train);
      auto const b = small_model::make_batch(9, 7);
      forwards.loss(b.input, b.target);
      forwards.outputs(b.input);
    };
    compare({.schedule = name, .ranks = 2, .micro_batches = 4, .build = dropping, .between = evaluate}, "evaluation");
  }
}

TEST_CASE("checkpoints, saved and loaded between steps") {
  auto const folder = std::filesystem::temp_directory_path() / ("chevron-accelerator-" + std::to_string(::getpid()));
  auto const save = [&](chevron::trainer& train, long step) {
    bool const on_device = chevron::detail::trainer_access::context(train).streams()->on_accelerator();
    auto const place = folder / (on_device ? "device" : "main memory");
    if (step == 1) chevron::save_checkpoint(train, place);
    if (step == 2) chevron::load_checkpoint(train, place);
  };
  for (char const* const name : {"1F1B", "ZBVZeroBubble"}) {
    compare({.schedule = name, .ranks = 2, .micro_batches = 4, .steps = 5, .between = save}, "checkpoints");
    std::filesystem::remove_all(folder);
  }
}
