#include "start.hpp"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string>
#include <system_error>
#include <thread>

#include <chevron/run/comm/gloo/gloo_transport.hpp>
#include <chevron/run/comm/threads/run_threads.hpp>
#include <chevron/run/core/stop_request.hpp>

#include "pictures.hpp"
#include "train.hpp"

namespace chevron::train {
namespace {

std::chrono::milliseconds milliseconds(double seconds) { return std::chrono::milliseconds(static_cast<long>(seconds * 1000)); }

/// How many threads an operation of one rank may use: its share of the cores, unless OMP_NUM_THREADS says otherwise. The same for
/// all backends, since results depend on it in the last bits.
int share_of_cores(int world) {
  if (process_environment("OMP_NUM_THREADS")) return at::get_num_threads();
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / world);
}

void run_as_threads(task& what) {
  options const& o = what.options;
  what.launcher = "threads of this process";
  run_threads({.pipeline_ranks = o.ranks,
               .replicas = o.replicas,
               .deadline = milliseconds(o.timeout),
               .intra_op_threads = share_of_cores(o.world())},
              [&](transport& comm) { train_on_rank(what, comm); });
}

void train_over_gloo(task& what, chevron::job const& rank) {
  options const& o = what.options;
  gloo_transport comm(rank.topology(o.ranks, o.replicas), rank);
  comm.deadline(milliseconds(o.timeout));
  train_on_rank(what, comm);
  comm.close();
}

void run_as_processes(task& what, bool launched_already, gpu_side const* gpus) {
  options const& o = what.options;
  bool const on_gpus = o.backend == backend::nccl;
  if (on_gpus && !launched_already) gpus->before_fork(o);
  // Everything that can be refused has been: from here on there are several processes.
  // Ranks end together, but for what rank 0 has to write; those that are asked to stop have a step to finish, and to save.
  auto const longest = std::max(milliseconds(o.timeout), std::chrono::milliseconds(10000));
  chevron::job const rank = launch({.nproc = launched_already ? 0 : o.world(),
                                    .join = milliseconds(o.timeout),
                                    .children = {.stop_grace = longest, .last = longest}});
  what.launcher = std::string("a process each, ") +
                  (!on_gpus       ? "Gloo, "
                   : o.share_gpus ? "NCCL, sharing GPUs, "
                                  : "NCCL, ") +
                  (launched_already ? "started by " + rank.launcher : "forked here");
  rank.watch->end_process_after(std::chrono::milliseconds(1500));
  on_gpus ? gpus->train(what, rank) : train_over_gloo(what, rank);
}

/// Ends in chevron-train-nccl, with the same command line, or in a `usage_error`.
[[noreturn]] void become_nccl_program(char** argv) {
  std::error_code fault;
  auto const here = std::filesystem::read_symlink("/proc/self/exe", fault).parent_path();
  auto const there = here / "chevron-train-nccl";
  ::execv(there.c_str(), argv);
#ifdef CHEVRON_NO_NCCL
  throw usage_error("--backend nccl: this build has no GPU support, since " CHEVRON_NO_NCCL ", and configure again");
#else
  throw usage_error("--backend nccl needs " + there.string() + ", which cannot be started: " + std::strerror(errno) +
                    ". Remedy: cmake --build <build folder> --target chevron-train-nccl");
#endif
}

}  // namespace

int start(int argc, char** argv, gpu_side const* gpus) {
  task what;
  what.options = read_options(argc, argv);
  options& o = what.options;
  if (o.backend == backend::nccl && gpus == nullptr) become_nccl_program(argv);
  launch_environment const told = read_environment();
  bool const launched_already = told.world > 1;
  check_unlaunched(o.nproc);
  if (launched_already && !o.backend_given) o.backend = backend::gloo;
  if (launched_already && o.backend == backend::threads) {
    throw usage_error("--backend threads runs all ranks in one process, but " + told.launcher + " has started " +
                      std::to_string(told.world) + ". Remedy: --backend gloo, or start one process");
  }
  if (launched_already && told.world != o.world()) {
    throw usage_error("--ranks " + std::to_string(o.ranks) + " × --replicas " + std::to_string(o.replicas) + " need " +
                      std::to_string(o.world()) + " processes, but " + told.launcher + " has started " +
                      std::to_string(told.world) + ". Remedy: make them equal");
  }
  what.programs = make_programs(o);
  if (told.rank == 0) check_files(o);
  // Without a folder to save into, a signal ends the program as it ends others.
  std::optional<stop_signals> stop;
  if (!o.checkpoint.empty()) stop.emplace();
  if (o.stop_after > 0) request_stop_after(milliseconds(o.stop_after));
  what.text = read_corpus({.paths = o.data, .least = o.model.context + 1});

  if (o.backend == backend::threads)
    run_as_threads(what);
  else
    run_as_processes(what, launched_already, gpus);
  return 0;
}

}  // namespace chevron::train
