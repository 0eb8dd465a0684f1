#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include <chevron/jobs/launch.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/transports/rendezvous.hpp>

/// \file
/// Lets several ranks of a machine share a GPU over NCCL, for trials.

namespace chevron {
namespace detail {

/// A rank's machine and GPU, by which NCCL recognizes two ranks on one GPU.
struct gpu_place {
  std::string machine;  ///< NCCL_HOSTID, or the host's name and its start, as NCCL distinguishes machines
  std::string gpu;      ///< its address on the PCI bus

  /// The place of this process's rank. \param gpu its number among visible GPUs
  static gpu_place of_process(int gpu) {
    gpu_place out;
    if (char const* const given = std::getenv("NCCL_HOSTID"); given != nullptr && *given != 0) {
      out.machine = given;
    } else {
      char name[256] = "localhost";
      ::gethostname(name, sizeof name - 1);
      std::string boot;
      std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
      out.machine = name + ("." + boot);
    }
    char bus[64] = {};
    if (cudaDeviceGetPCIBusId(bus, sizeof bus, gpu) == cudaSuccess)
      out.gpu = bus;
    else
      (void)cudaGetLastError();  // clears the error; a GPU without an address counts as shared
    return out;
  }
};

/// Whether two ranks on the machine of rank `me` have one GPU: the same answer for all ranks of a machine.
inline bool machine_shares_gpus(std::vector<gpu_place> const& all, std::size_t me) {
  std::vector<std::string> gpus;
  for (gpu_place const& each : all) {
    if (each.machine == all[me].machine) gpus.push_back(each.gpu);
  }
  std::sort(gpus.begin(), gpus.end());
  return std::adjacent_find(gpus.begin(), gpus.end()) != gpus.end();
}

}  // namespace detail

/// Lets ranks share GPUs over NCCL, which refuses two ranks of one machine on one GPU: where two ranks of this rank's machine
/// have one GPU, each rank of the machine pretends to be on a machine of its own (NCCL_HOSTID), so that the messages of these
/// ranks go through sockets, and are slow. Where each rank has a GPU of its own, nothing is changed. Collective; to be called
/// before NCCL is used.
/// \param where this rank's place in the grid \param rank this rank of the job \param gpu number of its GPU among visible GPUs
/// \returns whether messages of this rank go through sockets
/// \throws timeout_error if ranks do not join within `rank.join`; peer_lost_error if a rank is lost
inline bool share_cuda_device(topology const& where, job const& rank, int gpu) {
  auto const mine = detail::gpu_place::of_process(gpu);
  rendezvous meeting(rank.store, rank.watch, where);
  meeting.join(rank.join);
  std::vector<detail::gpu_place> all;
  for (std::string const& text :
       meeting.all_gather(mine.machine + "\n" + mine.gpu, {.words = "the GPUs of all ranks"}, rank.join, {})) {
    auto const end = text.find('\n');
    all.push_back({text.substr(0, end), text.substr(end + 1)});
  }
  if (!detail::machine_shares_gpus(all, static_cast<std::size_t>(where.global_rank))) return false;
  ::setenv("NCCL_HOSTID", (mine.machine + ".rank" + std::to_string(where.global_rank)).c_str(), 1);
  return true;
}

}  // namespace chevron
