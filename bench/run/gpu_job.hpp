#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <nlohmann/json.hpp>

#include <chevron/base/new_file.hpp>
#include <chevron/jobs/launch.hpp>
#include <chevron/run.hpp>
#include <chevron/transports/gpu/copy_transport.hpp>
#include <chevron/transports/gpu/cuda_devices.hpp>
#include <chevron/transports/gpu/nccl_transport.hpp>
#include <chevron/transports/gpu/shared_gpus.hpp>

#include "job.hpp"

/// \file
/// Code that benchmarks on GPUs share.

namespace bench {

/// A rank that is a process of its own, and its GPU.
struct gpu_rank {
  chevron::job job;
  at::Device device;
  chevron::nccl_options options;
};

/// Forks so many ranks, each with a GPU, or with one that it shares where there are fewer. Call it before anything of CUDA.
inline gpu_rank fork_gpu_ranks(int ranks) {
  chevron::job job = chevron::launch({.nproc = ranks});
  auto const found = chevron::look_for_cuda_devices();
  chevron::nccl_options const options{.device = chevron::cuda_device_of(job.local_rank, found, {.share = true})};
  (void)chevron::share_cuda_device(job.topology(ranks), job, options.device);
  at::Device const device = chevron::gpu_of(job.local_rank, options);
  return {std::move(job), device, options};
}

/// Runs `body(transport&, device)` on every rank: threads that share GPU 0, or processes over NCCL or copies, of which this one
/// is the first.
template <class Body>
void on_gpu_ranks(std::string const& backend, int ranks, Body const& body) {
  if (backend == "threads") {
    at::Device const device = chevron::gpu_of(0);
    chevron::run_threads({.pipeline_ranks = ranks}, [&](chevron::transport& comm) {
      c10::cuda::set_device(device.index());
      body(comm, device);
    });
    return;
  }
  if (backend == "copies") {
    chevron::job const job = chevron::launch({.nproc = ranks});
    chevron::copy_transport comm(job.topology(ranks), job, {.share_gpus = true});
    body(static_cast<chevron::transport&>(comm), comm.device());
    comm.close();
    return;
  }
  gpu_rank const mine = fork_gpu_ranks(ranks);
  chevron::nccl_transport comm(mine.job.topology(ranks), mine.job, mine.options);
  body(static_cast<chevron::transport&>(comm), mine.device);
  comm.close();
}

/// Linear layers of one width, each with a tanh behind it.
inline torch::nn::Sequential linear_layers(int layers, int width, at::Device device) {
  torch::nn::Sequential out;
  for (int i = 0; i < layers; ++i) {
    out->push_back(torch::nn::Linear(width, width));
    out->push_back(torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }));
  }
  out->to(device);
  return out;
}

/// Waits for the current stream, and returns the time in milliseconds.
inline double ms_when_done(at::Device device) {
  c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// `--json FILE`.
inline void write_json(std::string const& file, nlohmann::json const& figures) {
  if (!file.empty()) chevron::detail::write_file(file, figures.dump(1) + "\n");
}

}  // namespace bench
