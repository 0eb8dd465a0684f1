#pragma once

// Shared by tests that train on GPUs: eight layers cut into stages, the results of training, ranks over NCCL.

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <chevron/run.hpp>
#include <chevron/transports/gpu/nccl_transport.hpp>

#include "support/thread_ranks.hpp"

#include <doctest/doctest.h>

namespace training {

constexpr int width = 64;

inline at::Device gpu(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

/// Eight layers, in as many stages as there are to be.
inline chevron::stage build_stage(int number, int stages, at::Device device) {
  torch::nn::Sequential out;
  for (int layer = number * 8 / stages; layer < (number + 1) * 8 / stages; ++layer) {
    at::manual_seed(100 + layer);
    out->push_back(torch::nn::Linear(width, width));
    out->push_back(torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }));
  }
  out->to(device);
  return out;
}

struct outcome {
  std::vector<double> losses, norms;                // of rank 0, by step
  std::vector<std::vector<at::Tensor>> parameters;  // by stage, on the CPU
  std::vector<std::vector<std::string>> why_not;    // launched as graphs: by rank and step
  std::mutex mutex;

  /// A step of a rank.
  void add(chevron::trainer const& train, chevron::transport const& comm) {
    std::string const why = train.graph_fallback_reason();
    auto const rank = static_cast<std::size_t>(comm.topology().global_rank);
    for (auto const& e : train.last_trace().entries()) {
      if (chevron::is_compute(e.op.kind)) CHECK(e.end >= e.start);
    }
    std::lock_guard const hold(mutex);
    if (why_not.size() <= rank) why_not.resize(rank + 1);
    why_not[rank].push_back(why);
  }
  /// Its report, when all is known of it.
  void add(chevron::transport const& comm, chevron::step_report const& report) {
    if (comm.topology().global_rank != 0) return;
    std::lock_guard const hold(mutex);
    losses.push_back(report.loss);
    norms.push_back(report.grad_norm);
  }
  /// The rank's stages, at the end.
  void add(chevron::trainer& train, int stages) {
    std::lock_guard const hold(mutex);
    parameters.resize(static_cast<std::size_t>(stages));
    for (std::size_t s = 0; s < parameters.size(); ++s) {
      if (!train.stages()[s]) continue;
      for (auto const& p : train.stages()[s].parameters()) parameters[s].push_back(p.value.detach().cpu());
    }
  }

  std::vector<at::Tensor> all_parameters() const {
    std::vector<at::Tensor> out;
    for (auto const& of_stage : parameters) out.insert(out.end(), of_stage.begin(), of_stage.end());
    return out;
  }
};

/// Equal up to the last bits of single precision, however many stages either has; says whether to the last bit.
inline void compare(outcome const& got, outcome const& wanted, std::string const& what) {
  auto const a = got.all_parameters(), b = wanted.all_parameters();
  REQUIRE(!a.empty());
  REQUIRE(a.size() == b.size());
  REQUIRE(!got.losses.empty());
  REQUIRE(got.losses.size() == wanted.losses.size());
  bool same = got.losses == wanted.losses && got.norms == wanted.norms;
  for (std::size_t i = 0; i < a.size(); ++i) {
    same = same && at::equal(a[i], b[i]);
    CHECK(at::allclose(a[i], b[i], 1e-4, 1e-6));
  }
  for (std::size_t i = 0; i < got.losses.size(); ++i) {
    CHECK(got.losses[i] == doctest::Approx(wanted.losses[i]).epsilon(1e-5));
    CHECK(got.norms[i] == doctest::Approx(wanted.norms[i]).epsilon(1e-4));
  }
  MESSAGE(std::string(what + (same ? ": equal to the last bit" : ": equal up to rounding")));
}

/// Runs body(line, device) on ranks that each have a GPU, over NCCL.
template <class Body>
void over_nccl(int ranks, Body const& body) {
  auto const thrown = ::thread_ranks::run(ranks, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
    at::Device const mine = gpu(where.global_rank);
    c10::cuda::CUDAGuard const here(mine);
    chevron::stream_transport<chevron::cuda_streams> comm(where, store, watch, std::chrono::seconds(60), mine);
    body(comm, mine);
    comm.close();
  });
  for (auto const& each : ::thread_ranks::said(thrown)) CHECK(each == "");
}

}  // namespace training
