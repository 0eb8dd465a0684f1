// timeout: 240
#include "support/small_model.hpp"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <tuple>

#include <chevron/jobs/run_main.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>

#include "support/subprocess.hpp"

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// Stages with everything a message and a rank may have to deal with: undefined and integer tensors, a skip connection, a mask
/// from the batch, dropout, a weight tied between the first and the last stage, recomputed activations.
builder mixed_builder(int stages) {
  return chevron::with_skips(
      [=](int s) -> chevron::stage {
        at::manual_seed(300 + s);
        torch::nn::Linear layer(width, width);
        auto hidden = [=](at::Tensor const& x, at::Tensor const& mask) mutable {
          return at::dropout(layer(x).tanh().masked_fill(mask, 0.5), 0.2, true);
        };
        auto const first = [=](at::Tensor x, at::Tensor id, at::Tensor mask) mutable {
          return std::make_tuple(hidden(x, mask), std::optional<at::Tensor>(), id, x.sin());
        };
        auto const middle = [=](at::Tensor x, at::Tensor none, at::Tensor id, at::Tensor mask) mutable {
          if (none.defined()) throw std::runtime_error("an undefined tensor came as one");
          return std::make_tuple(hidden(x, mask), none, id);
        };
        auto const last = [=](at::Tensor x, at::Tensor, at::Tensor id, at::Tensor skip, at::Tensor mask) mutable {
          return hidden(x, mask) * id + skip;
        };
        chevron::stage made = s == 0           ? chevron::stage(layer, first)
                              : s + 1 < stages ? chevron::stage(layer, middle)
                                               : chevron::stage(layer, last);
        if (s == 0 || s + 1 == stages) made.tie("weight", "shared");
        return made.side_inputs({"mask"}).recompute(s % 2 == 1);
      },
      {{0, stages - 1}});
}

/// Losses and norms of a few steps.
std::vector<double> mixed_steps(transport& comm, chevron::plan const& plan) {
  chevron::trainer train(small_model::setup(plan, comm, mixed_builder(plan.stages), {.clip_grad_norm = 0.1, .seed = 9}, adamw));
  auto const data = make_batch(7, 40 + comm.topology().replica());
  std::vector<double> seen;
  for (int step = 0; step < 3; ++step) {
    auto const report =
        train.step(chevron::batch{{data.input, at::arange(7).view({7, 1})}, {data.target}, {{"mask", data.input > 1}}});
    seen.push_back(report.loss);
    seen.push_back(report.grad_norm);
  }
  return seen;
}

int train_as_rank(int ranks, int replicas) {
  at::set_num_threads(1);
  auto const job = chevron::launch({.nproc = ranks * replicas});
  chevron::gloo_transport comm(job.topology(ranks, replicas), job);
  comm.deadline(std::chrono::seconds(60));
  complaints wrong;
  int compared = 0;
  for (char const* name : schedules) {
    if (replicas == 1) {
      for (int const m : {1, 2, 3, 5, 8}) {
        auto const plan = plan_of(name, ranks, m);
        auto const data = make_batch(2 * m + (m > 1 ? 1 : 0), m);
        reference whole(plan.stages);
        whole.run(plan, {data});
        compare_one_step(comm, plan, data, whole, wrong);
        ++compared;
      }
    }
    auto const plan = plan_of(name, ranks, 3);
    if (plan.stages > 1) {
      std::vector<double> expected;
      chevron::run_threads({.pipeline_ranks = ranks, .replicas = replicas}, [&](transport& threads) {
        auto const seen = mixed_steps(threads, plan);
        if (threads.topology().global_rank == 0) expected = seen;
      });
      wrong.require(mixed_steps(comm, plan) == expected, std::string(name) + ": processes and threads differ");
      ++compared;
    }
    if (replicas == 1) {
      auto const data = make_batch(7, 9);
      reference whole(plan.stages, [](int s) { return build_dropping_stage(s); });
      whole.run(plan, {data});
      compare_one_step(comm, plan, data, whole, wrong, [](int s) { return build_dropping_stage(s, 3); });
      ++compared;
    }
    std::vector<batch> data;
    for (int r = 0; r < replicas; ++r) data.push_back(make_batch(7, 70 + r));
    curve(plan, data, 20).compare(comm, plan, data, wrong);
    ++compared;
  }
  comm.close();
  for (auto const& w : wrong.all) std::fprintf(stderr, "%s\n", w.c_str());
  if (job.rank == 0) std::fprintf(stderr, "compared %d runs\n", compared);
  return wrong.all.empty() ? 0 : 1;
}

/// Starts this program again, as ranks, and gives its exit code.
int start_ranks(int ranks, int replicas) {
  auto const end = subprocess::started("a rank of a training job", {"CHEVRON_TRAINED_RANKS=" + std::to_string(ranks),
                                                               "CHEVRON_TRAINED_REPLICAS=" + std::to_string(replicas)})
                       .wait(std::chrono::minutes(10));
  if (end.code != 0) std::fprintf(stderr, "%s\n", end.output.c_str());
  return end.code;
}

}  // namespace

TEST_CASE("a rank of a training job" * doctest::skip()) {
  char const* const ranks = std::getenv("CHEVRON_TRAINED_RANKS");
  char const* const replicas = std::getenv("CHEVRON_TRAINED_REPLICAS");
  if (ranks == nullptr || replicas == nullptr) return;
  int const code =
      chevron::run_main(0, nullptr, [&](int, char**) { return train_as_rank(std::atoi(ranks), std::atoi(replicas)); });
  std::fflush(nullptr);
  _exit(code);  // past doctest's own report
}

TEST_CASE("Gloo processes: gradients and loss curves equal those of the un-pipelined model, bit for bit") {
  CHECK(start_ranks(1, 1) == 0);
  CHECK(start_ranks(2, 1) == 0);
  CHECK(start_ranks(4, 1) == 0);
  CHECK(start_ranks(2, 2) == 0);
}
