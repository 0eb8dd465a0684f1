#include "ranks.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <string>
#include <system_error>
#include <thread>

#include <ATen/Parallel.h>

#include <chevron/run/comm/threads/run_threads.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>

namespace chevron::train {
namespace {

std::chrono::milliseconds milliseconds(double seconds) { return std::chrono::milliseconds(static_cast<long>(seconds * 1000)); }

/// How many threads an operation of one rank may use: its share of the cores, unless OMP_NUM_THREADS says otherwise. The same for
/// all backends, since results depend on it in the last bits.
int share_of_cores(int world) {
  if (process_environment("OMP_NUM_THREADS")) return at::get_num_threads();
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / world);
}

void run_as_threads(job_options const& o, rank_body const& body) {
  run_threads({.pipeline_ranks = o.ranks,
               .replicas = o.replicas,
               .shards = o.shards,
               .deadline = milliseconds(o.timeout),
               .intra_op_threads = share_of_cores(o.world())},
              [&](transport& comm) { body({.comm = comm, .launcher = "threads of this process"}); });
}

void run_over_gloo(job_options const& o, job const& rank, std::string const& launcher, rank_body const& body) {
  gloo_transport comm(rank.topology(o.ranks, o.replicas, o.shards), rank);
  comm.deadline(milliseconds(o.timeout));
  body({.comm = comm, .launcher = launcher});
  comm.close();
}

void run_as_processes(job_options const& o, bool launched_already, gpu_side const* gpus, rank_body const& body) {
  bool const on_gpus = is_on_gpus(o.backend);
  if (on_gpus && !launched_already) gpus->before_fork(o);
  // From here on there are several processes.
  // Ranks end together, but for what rank 0 has to write; those that are asked to stop have a step to finish, and to save.
  auto const longest = std::max(milliseconds(o.timeout), std::chrono::milliseconds(10000));
  job const rank = launch({.nproc = launched_already ? 0 : o.world(),
                           .join = milliseconds(o.timeout),
                           .children = {.stop_grace = longest, .last = longest}});
  std::string const launcher = std::string("a process each, ") +
                               (!on_gpus                       ? "Gloo, "
                                : o.backend == backend::copies ? "copies, "
                                                               : "NCCL, ") +
                               (launched_already ? "started by " + rank.launcher : "forked here");
  rank.watch->end_process_after(std::chrono::milliseconds(1500));
  on_gpus ? gpus->run(o, rank, launcher, body) : run_over_gloo(o, rank, launcher, body);
}

/// Ends in the program for GPUs, with the same command line, or in a `usage_error`.
[[noreturn]] void become_nccl_program(job_options const& o, char** argv) {
  std::string const flag = std::string("--backend ") + (o.backend == backend::copies ? "copies" : "nccl");
  std::error_code fault;
  auto const here = std::filesystem::read_symlink("/proc/self/exe", fault);
  std::string const name = here.filename().string() + "-nccl";
  auto const there = here.parent_path() / name;
  ::execv(there.c_str(), argv);
#ifdef CHEVRON_NO_NCCL
  throw usage_error(flag + ": this build has no GPU support, since " CHEVRON_NO_NCCL ", and configure again");
#else
  throw usage_error(flag + " needs " + there.string() + ", which cannot be started: " + std::strerror(errno) +
                    ". Remedy: cmake --build <build folder> --target " + name);
#endif
}

}  // namespace

launch_environment look_for_launcher(job_options& o, char** argv, gpu_side const* gpus) {
  if (is_on_gpus(o.backend) && gpus == nullptr) become_nccl_program(o, argv);
  launch_environment const told = read_environment();
  bool const launched_already = told.world > 1;
  check_unlaunched(o.nproc);
  if (launched_already && !o.backend_given) o.backend = backend::gloo;
  if (launched_already && o.backend == backend::threads) {
    throw usage_error("--backend threads runs all ranks in one process, but " + told.launcher + " has started " +
                      std::to_string(told.world) + ". Remedy: --backend gloo, or start one process");
  }
  if (launched_already && told.world != o.world()) {
    throw usage_error(words_for_world(o) + " need " + std::to_string(o.world()) + " processes, but " + told.launcher +
                      " has started " + std::to_string(told.world) + ". Remedy: make them equal");
  }
  return told;
}

void run_ranks(job_options const& o, launch_environment const& told, gpu_side const* gpus, rank_body const& body) {
  if (o.backend == backend::threads)
    run_as_threads(o, body);
  else
    run_as_processes(o, told.world > 1, gpus, body);
}

}  // namespace chevron::train
