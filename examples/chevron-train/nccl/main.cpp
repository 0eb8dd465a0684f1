// chevron-train-nccl: what chevron-train becomes with --backend nccl. The same program, and ranks on GPUs.

#include <chrono>
#include <string>

#include <chevron/run/cuda/cuda_devices.hpp>
#include <chevron/run/cuda/cuda_graph.hpp>
#include <chevron/run/cuda/nccl_transport.hpp>
#include <chevron/run/launch/run_main.hpp>

#include "../start.hpp"
#include "../train.hpp"

namespace {

using namespace chevron;
using namespace chevron::train;

/// The GPU of a rank on this machine. With the flag in the error.
int gpu_for(int local_rank, cuda_devices const& found, cuda_sharing const& how) {
  try {
    return cuda_device_of(local_rank, found, how);
  } catch (usage_error const& none) {
    throw usage_error(std::string("--backend nccl: ") + none.what());
  }
}

void look_before_fork(options const& o) {
  (void)gpu_for(o.world() - 1, look_for_cuda_devices_before_fork(), {.share = o.share_gpus});
}

void train_over_nccl(task& what, chevron::job const& rank) {
  options const& o = what.options;
  int const gpu = gpu_for(rank.local_rank, look_for_cuda_devices(), {.own_view = true, .share = o.share_gpus});
  if (o.share_gpus) share_cuda_device(rank.local_rank);
  nccl_transport comm(rank.topology(o.ranks, o.replicas), rank, {.device = gpu});
  what.device = comm.device();
  if (o.cuda_graph) what.graphs = cuda_graphs();
  comm.deadline(std::chrono::milliseconds(static_cast<long>(o.timeout * 1000)));
  train_on_rank(what, comm);
  comm.close();
}

constexpr gpu_side gpus{.before_fork = look_before_fork, .train = train_over_nccl};

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** words) { return start(count, words, &gpus); });
}
