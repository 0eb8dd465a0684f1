#pragma once

// Training over replicas with a sharded optimizer and without, of the same batches, and comparisons of both.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <chevron/checkpoint/checkpoint.hpp>

#include <doctest/doctest.h>

#include "support/small_model.hpp"

namespace sharded_training {

using namespace small_model;
namespace fs = std::filesystem;

/// Odd: the last vector of a parameter is not full, and parameters of a row begin at any address.
constexpr int wide = 41, inner = 97;

/// Parameters that hold several blocks of the norm, and some that hold a part of one.
inline chevron::stage build_wide_stage(int number, at::ScalarType dtype = at::kFloat) {
  at::manual_seed(500 + number);
  torch::nn::Sequential made(torch::nn::LayerNorm(torch::nn::LayerNormOptions({wide})), torch::nn::Linear(wide, inner),
                             torch::nn::Dropout(0.1), torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }),
                             torch::nn::Linear(inner, wide));
  for (auto& p : made->parameters()) p.set_data(p.to(dtype));
  return made;
}

struct setting {
  std::string schedule = "1F1B";
  int ranks = 2, replicas = 2, micro_batches = 4, steps = 6;
  int chunks = 0;  // stages of a rank; 0: as many as the schedule has by itself
  chevron::optimizer_factory make = chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
  chevron::trainer_options options = {};
  at::ScalarType dtype = at::kFloat;
  bool tied = false;
  int passes = 1;                              // batches accumulated in a step
  int spoiled_step = -1;                       // an input that is no number
  bool overlap_gather = false;                 // where the optimizer is sharded
  std::optional<fs::path> from = {}, to = {};  // checkpoints
  std::function<void(chevron::trainer&)> before_step = {};
  std::function<chevron::stage(int)> build = {};  // in place of `build_wide_stage`; as wide
};

struct outcome {
  std::vector<chevron::step_report> reports;
  tensors values;  // all parameters of the rank
  std::int64_t state_bytes = 0;     // of the optimizer's state
  std::int64_t stepped = 0;         // elements of parameters that the rank's optimizer steps
  std::int64_t measured_state = 0;  // as `trainer::bytes_by_stage` measures it
};

inline outcome train_on(transport& comm, setting const& what) {
  outcome out;
  auto options = what.options;
  options.on_report = [&](chevron::step_report const& report) { out.reports.push_back(report); };
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan(
      what.schedule, {.ranks = what.ranks, .micro_batches = what.micro_batches, .chunks = what.chunks})));
  int const last = program.view().plan.stages - 1;
  auto const build = [&](int s) {
    chevron::stage made = what.build ? what.build(s) : build_wide_stage(s, what.dtype);
    return what.tied && (s == 0 || s == last) ? made.tie("1.weight", "table") : made;
  };
  auto const loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y.to(at::kFloat), target); };
  chevron::trainer train(
      {.program = program, .transport = comm, .stages = build, .loss = loss, .optimizer = what.make, .options = options});
  if (what.from) chevron::load_checkpoint(train, *what.from);
  for (long const first = train.next_step(); train.next_step() < first + what.steps;) {
    auto const generator =
        at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 * train.next_step() + comm.topology().replica()));
    if (what.before_step) what.before_step(train);
    std::int64_t const samples = 2 * what.micro_batches;
    auto const total = static_cast<double>(samples * what.passes * what.replicas);
    for (int pass = 0; pass < what.passes; ++pass) {
      at::Tensor input = at::randn({samples, wide}, generator);
      at::Tensor const target = at::randn({samples, wide}, generator);
      if (train.next_step() == what.spoiled_step) input[0][0] = std::numeric_limits<float>::quiet_NaN();
      input = input.to(what.dtype);
      if (pass + 1 < what.passes) {
        train.accumulate({input}, {target}, total);
      } else {
        train.step({input}, {target}, what.passes > 1 ? chevron::step_total{total} : chevron::step_total{});
      }
    }
  }
  train.synchronize();
  for (auto& s : train.stages()) {
    for (auto& p : s.parameters()) out.values.push_back(p.value.detach().clone());
  }
  if (train.optimizer() != nullptr && !chevron::detail::kind_of(*train.optimizer()).empty()) {
    for (auto& [key, state] : train.optimizer()->state()) {
      for (at::Tensor const& t : chevron::detail::tensors_of(*state))
        out.state_bytes += t.defined() ? static_cast<std::int64_t>(t.nbytes()) : 0;
    }
  }
  if (train.optimizer() != nullptr) {
    for (auto const& group : train.optimizer()->param_groups()) {
      for (at::Tensor const& p : group.params()) out.stepped += p.numel();
    }
  }
  for (chevron::measured_bytes const& one : train.bytes_by_stage()) out.measured_state += one.state;
  if (what.to) chevron::save_checkpoint(train, *what.to);
  return out;
}

inline std::vector<outcome> on_threads(setting const& what) {
  std::vector<outcome> all(static_cast<std::size_t>(what.ranks * what.replicas));
  chevron::run_threads({.pipeline_ranks = what.ranks, .replicas = what.replicas}, [&](transport& comm) {
    all[static_cast<std::size_t>(comm.topology().global_rank)] = train_on(comm, what);
  });
  return all;
}

inline bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

inline void check_same(std::vector<outcome> const& expected, std::vector<outcome> const& got) {
  REQUIRE(expected.size() == got.size());
  for (std::size_t r = 0; r < expected.size(); ++r) {
    CAPTURE(r);
    REQUIRE(expected[r].reports.size() == got[r].reports.size());
    for (std::size_t k = 0; k < expected[r].reports.size(); ++k) {
      auto const &a = expected[r].reports[k], &b = got[r].reports[k];
      CAPTURE(k);
      CHECK(same(a.loss, b.loss));
      CHECK(same(a.grad_norm, b.grad_norm));
      CHECK(a.skipped == b.skipped);
      CHECK(a.clipped == b.clipped);
      CHECK(a.loss_factor == b.loss_factor);
    }
    REQUIRE(expected[r].values.size() == got[r].values.size());
    int different = 0;
    for (std::size_t i = 0; i < expected[r].values.size(); ++i)
      different += expected[r].values[i].equal(got[r].values[i]) ? 0 : 1;
    CHECK(different == 0);
  }
}

inline setting sharded(setting what, chevron::sharding shard = chevron::sharding::optimizer) {
  what.options.shard = shard;
  what.options.overlap_gather = what.overlap_gather;
  return what;
}

/// A training whose steps are clipped now and then and whose copies are compared, and variants of it.
struct demanding {
  setting clipped, tied, skipped, accumulated;

  demanding(setting base, bool post_validation, double clip_grad_norm = 0.36) : clipped(std::move(base)) {
    clipped.options.post_validation = post_validation;
    clipped.options.stable_steps = 1;
    clipped.options.clip_grad_norm = clip_grad_norm;
    clipped.options.check_copies = 2;
    tied = skipped = accumulated = clipped;
    tied.tied = true;
    skipped.spoiled_step = 5;
    skipped.options.when_not_finite = chevron::not_finite::skip;
    skipped.options.scaling = chevron::loss_scaling{.initial = 1024, .growth_interval = 3};
    accumulated.passes = 2;
  }
};

/// The training with a limit that about half of the gradient's norms are above: the median of the first steps' norms.
inline setting half_clipped(setting what) {
  setting first = what;
  first.steps = 12;
  auto const unclipped = on_threads(first);
  std::vector<double> norms;
  for (auto const& report : unclipped[0].reports) norms.push_back(report.grad_norm);
  std::nth_element(norms.begin(), norms.begin() + 6, norms.end());
  what.options.clip_grad_norm = norms[6];
  return what;
}

inline void check_clips_some_steps(std::vector<outcome> const& of) {
  std::size_t clipped = 0;
  for (auto const& report : of[0].reports) clipped += report.clipped ? 1 : 0;
  CHECK(clipped > 2);
  CHECK(clipped + 2 < of[0].reports.size());
}

/// 50 steps, some of them clipped: with shares as without, to the last bit. Schedules, 1 to 4 replicas, optimizer or gradients in
/// shares, with masters or without: each value meets each value of the others in the four calls, which share the pairs of schedule
/// and replicas.
/// \param with_masters whether `base` has masters
inline void check_fifty_steps(chevron::sharding shard, bool with_masters = false, setting const& base = {}) {
  at::set_num_threads(1);
  char const* const schedules[] = {"GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble"};
  int const call = (with_masters ? 2 : 0) + (shard == chevron::sharding::gradients ? 1 : 0);
  int runs = 0;
  for (int i = 0; i < 6; ++i) {
    for (int const replicas : {1, 2, 3, 4}) {
      if ((i + replicas) % 4 != call) continue;
      setting what = base;
      what.schedule = schedules[i];
      what.replicas = replicas;
      what.steps = 50;
      CAPTURE(what.schedule);
      CAPTURE(replicas);
      what = half_clipped(what);
      auto const expected = on_threads(what);
      check_clips_some_steps(expected);
      check_same(expected, on_threads(sharded(what, shard)));
      ++runs;
    }
  }
  CHECK(runs == 6);
}

inline void check_same_as_unsharded(setting const& what, chevron::sharding shard = chevron::sharding::optimizer) {
  CAPTURE(what.schedule);
  CAPTURE(what.replicas);
  check_same(on_threads(what), on_threads(sharded(what, shard)));
}

}  // namespace sharded_training
