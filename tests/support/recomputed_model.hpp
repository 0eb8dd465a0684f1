#pragma once

#include <cstdint>
#include <initializer_list>

#include <torch/nn/modules/activation.h>

#include <doctest/doctest.h>

#include "support/counting_allocator.hpp"
#include "support/small_model.hpp"

/// Stages that recompute, for tests that compare bits and bytes of each such schedule.

namespace small_model {

constexpr int wide = 64;
constexpr int samples = 32;  // of a microbatch

/// Saves its input and two tensors eight times as wide.
inline chevron::stage widening_stage(int seed) {
  at::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(wide, 8 * wide), torch::nn::GELU(), torch::nn::Linear(8 * wide, wide));
}

/// The most bytes that a step needs beyond those that were there before it: of the second step, which makes no state.
inline std::int64_t peak_of_step(chevron::trainer& train, int micro_batches) {
  auto& count = counting_allocator::installed();
  at::Tensor const x = at::ones({samples * micro_batches, wide});
  train.step({x}, {x});
  std::int64_t const before = count.live;
  count.peak = before;
  train.step({x}, {x});
  return count.peak - before;
}

/// Compares one step, with dropout, of every schedule on 1 to 4 ranks with the un-pipelined model.
/// \param plan plan(name, ranks, microbatches)
/// \param recomputed passed to `build_dropping_stage`, one after the other
template <class Plan>
void check_recomputed_gradients(Plan const& plan, std::initializer_list<int> recomputed) {
  at::set_num_threads(1);
  for (char const* name : schedules) {
    for (int const ranks : {1, 2, 4}) {
      for (int const m : {1, 3, 8}) {
        chevron::plan const p = plan(name, ranks, m);
        auto const data = make_batch(2 * m + 1, m);
        reference whole(p.stages, [](int s) { return build_dropping_stage(s); });
        whole.run(p, {data});
        CHECK(whole.grad_norm > 0);
        for (int const what : recomputed) {
          complaints wrong;
          chevron::thread_options shaken{.pipeline_ranks = ranks, .rendezvous = true};
          shaken.longest_delay = std::chrono::microseconds(100);
          shaken.seed = static_cast<std::uint64_t>(m + what);
          chevron::run_threads(shaken, [&](transport& comm) {
            compare_one_step(comm, p, data, whole, wrong, [&](int s) { return build_dropping_stage(s, what); });
          });
          for (auto const& w : wrong.all) FAIL_CHECK("recompute " << what << ", " << w);
        }
      }
    }
  }
}

/// The same of twenty steps of two replicas on two ranks.
template <class Plan>
void check_recomputed_training(std::initializer_list<char const*> names, Plan const& plan) {
  for (char const* name : names) {
    chevron::plan const p = plan(name, 2, 3);
    std::vector<batch> const data{make_batch(7, 70), make_batch(7, 71)};
    curve const whole(p, data, 20, [](int s) { return build_dropping_stage(s); });
    complaints wrong;
    chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
      whole.compare(comm, p, data, wrong, [](int s) { return build_dropping_stage(s, 3); });
    });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

}  // namespace small_model
