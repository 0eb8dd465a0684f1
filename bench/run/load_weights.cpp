// bench-load_weights: the memory of ranks that load their stages' weights from one folder at the same time.
//
// Writes a folder of linear maps in shards, then starts a process for each rank. Each process builds its share of the layers, loads
// their weights and prints its peak memory: the whole, and the part above LibTorch's memory before.
//   build/bin/bench-load_weights --gigabytes 2 --ranks 2 --dtype bfloat16

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <torch/nn/modules/linear.h>

#include <chevron/checkpoint/load_weights.hpp>
#include <chevron/checkpoint/save_weights.hpp>
#include <chevron/jobs/run_main.hpp>

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t width = 2048;
constexpr double mebi = 1024.0 * 1024.0;

/// Layers [first, last) of the model.
struct layers_impl : torch::nn::Module {
  layers_impl(std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i)
      register_module("layer_" + std::to_string(i), torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
};
TORCH_MODULE_IMPL(layers, layers_impl);

/// A figure of this process, in MiB: VmRSS now, VmHWM at most.
double memory(std::string const& name) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(name + ":")) return std::strtod(line.c_str() + name.size() + 1, nullptr) / 1024;
  }
  return 0;
}

void load(fs::path const& folder, int rank, int ranks, std::int64_t count) {
  (void)layers(0, 1);  // LibTorch allocates its own memory at the first module
  double const before = memory("VmRSS");
  layers mine(rank * count / ranks, (rank + 1) * count / ranks);
  double own = 0;
  for (at::Tensor const& p : mine->parameters()) own += static_cast<double>(p.nbytes()) / mebi;
  auto const begin = std::chrono::steady_clock::now();
  chevron::load_weights(mine, folder, {}, {.may_stay = {"*"}});  // the rest is other ranks'
  double const seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  double const most = memory("VmHWM");
  std::printf(
      "rank %d: stages %.0f MiB, resident at most %.0f MiB: %.3f of its stages; %.3f without the %.0f MiB before; loaded in %.1f "
      "s\n",
      rank, own, most, most / own, (most - before) / own, before, seconds);
}

int run(int argc, char** argv) {
  double gigabytes = 2;
  int ranks = 2;
  std::string dtype = "float32", place = fs::temp_directory_path().string();
  CLI::App app("Memory of ranks that load a folder of weights.", "bench-load_weights");
  app.add_option("--gigabytes", gigabytes, "of the folder")->capture_default_str();
  app.add_option("--ranks", ranks, "processes that load at once")->capture_default_str();
  app.add_option("--dtype", dtype, "of the folder; modules are float32")
      ->capture_default_str()
      ->check(CLI::IsMember({"float32", "bfloat16"}));
  app.add_option("--place", place, "where the folder is made")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  int const bytes = dtype == "float32" ? 4 : 2;
  auto const count = static_cast<std::int64_t>(gigabytes * 1024 * mebi / (width * width * bytes));
  fs::path const folder = fs::path(place) / ("chevron-load-weights-" + std::to_string(::getpid()));

  std::fflush(stdout);
  if (::fork() == 0) {
    chevron::save_weights(layers(0, count), folder, {},
                          {.shard_bytes = std::uint64_t{512} << 20, .dtype = bytes == 2 ? at::kBFloat16 : at::kFloat});
    ::_exit(0);
  }
  ::wait(nullptr);
  std::vector<pid_t> started;
  for (int r = 0; r < ranks; ++r) {
    started.push_back(::fork());
    if (started.back() != 0) continue;
    load(folder, r, ranks, count);
    std::fflush(stdout);
    ::_exit(0);
  }
  bool whole = true;
  for (pid_t const one : started) {
    int status = 0;
    ::waitpid(one, &status, 0);
    whole = whole && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  fs::remove_all(folder);
  return whole ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) { return chevron::run_main(argc, argv, run); }
