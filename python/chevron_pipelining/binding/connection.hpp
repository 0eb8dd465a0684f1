#pragma once

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include <chevron/multiprocess.hpp>
#include <chevron/transports/rendezvous.hpp>

#ifndef CHEVRON_NO_NCCL
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include <chevron/transports/gpu/nccl_transport.hpp>
#include <chevron/transports/gpu/shared_gpus.hpp>
#endif

/// \file
/// A rank's transport: Gloo and shared memory between stages on the CPU, NCCL between stages on GPUs.

namespace chevron_pipelining {

/// Why this binding has no NCCL, with the remedy; empty: it has. CHEVRON_NO_NCCL is set by compiler.py.
#ifdef CHEVRON_NO_NCCL
inline constexpr char const* no_nccl = CHEVRON_NO_NCCL;
#else
inline constexpr char const* no_nccl = "";
#endif

/// Requests hardware queues for the streams of a GPU (gpu/cuda_devices.hpp), unless this process has used a GPU already.
inline void ask_for_queues() {
#ifndef CHEVRON_NO_NCCL
  if (!chevron::detail::has_cuda_context()) chevron::detail::ask_for_device_queues();
#endif
}

/// A transport, and the collective call that ends it.
struct connection {
  std::unique_ptr<chevron::transport> transport;
  std::function<void()> close;

  template <class Transport, class... Arguments>
  static connection over(Arguments&&... arguments) {
    auto made = std::make_unique<Transport>(std::forward<Arguments>(arguments)...);
    std::function<void()> close = [&of = *made] { of.close(); };
    return {std::move(made), std::move(close)};
  }
};

namespace detail {

/// Checks that all ranks are on CPUs, or each on a GPU of its own. Collective.
/// \param device of this rank, `cpu` or `cuda:1` \param gpu its machine and address; empty on the CPU
/// \throws chevron::usage_error on every rank that sees two kinds of devices, or another rank on its GPU
inline void compare_devices(chevron::topology const& where, chevron::job const& rank, std::string const& device,
                            std::string const& gpu) {
  chevron::rendezvous meeting(rank.store, rank.watch, where);
  meeting.join(rank.join);
  std::string const mine = device + "\n" + gpu;
  auto const all = meeting.all_gather(mine, {.words = "the devices of all ranks"}, rank.join, {});
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (static_cast<int>(r) == where.global_rank) continue;
    auto const end = all[r].find('\n');
    std::string const theirs = all[r].substr(0, end), ranks = "rank " + std::to_string(where.global_rank) + " is on " + device +
                                                             ", rank " + std::to_string(r) + " on " + theirs;
    if ((theirs == "cpu") != gpu.empty())
      throw chevron::usage_error(ranks + ". Remedy: stages of all ranks on the CPU, or stages of all ranks on GPUs");
    if (!gpu.empty() && all[r].substr(end + 1) == gpu) {
      throw chevron::usage_error(ranks + ", which is the same GPU of one machine, and NCCL refuses two ranks on one GPU. Remedy: "
                                 "a GPU for each process, torch.cuda.set_device(int(os.environ[\"LOCAL_RANK\"])) before "
                                 "stages are made on \"cuda\"");
    }
  }
}

}  // namespace detail

/// Connects this rank to the others of a job. Collective.
/// \param where this rank's place \param gpu number of the GPU of this rank's stages among visible GPUs; -1: they are on the CPU
/// \throws chevron::usage_error for ranks on different kinds of devices, two ranks on one GPU, and a GPU that cannot be used
inline connection connect(chevron::topology const& where, chevron::job const& rank, int gpu) {
  if (gpu < 0) {
    detail::compare_devices(where, rank, "cpu", "");
    return connection::over<chevron::gloo_transport>(where, rank);
  }
#ifdef CHEVRON_NO_NCCL
  throw chevron::usage_error("cuda:" + std::to_string(gpu) + ": this binding has no NCCL, since " + no_nccl);
#else
  if (std::getenv(chevron::detail::device_queues) == nullptr && chevron::detail::has_cuda_context()) {
    throw chevron::usage_error(std::string("this process has used a GPU before chevron_pipelining was imported, so that ") +
                               chevron::detail::device_queues +
                               " could not be set: streams, and ranks, could wait for each other for ever. Remedy: import "
                               "chevron_pipelining before the first use of a GPU, or that variable set to 32 in the environment");
  }
  int const mine = chevron::cuda_device_of(0, chevron::look_for_cuda_devices(), {.given = gpu});
  // The program's current GPU is current again at the end, and gets no context.
  c10::cuda::CUDAGuard const here(static_cast<c10::DeviceIndex>(mine));
  chevron::nccl_options const options{.device = gpu};
  auto const [machine, address] = chevron::detail::gpu_place::of_process(gpu);
  detail::compare_devices(where, rank, "cuda:" + std::to_string(mine), machine + " " + address);
  return connection::over<chevron::nccl_transport>(where, rank, options);
#endif
}

}  // namespace chevron_pipelining
