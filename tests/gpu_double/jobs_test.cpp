// timeout: 180
// Jobs over NCCL that end well, and jobs that break at each point of their way: which exit code, which cause, how soon.
#include "support/subprocess.hpp"

#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/run.hpp>
#include <chevron/run/cuda/nccl_transport.hpp>
#include <chevron/run/launch/process_options.hpp>
#include <chevron/run/launch/run_main.hpp>

#include <doctest/doctest.h>

#include "gpu_double/double.hpp"

namespace {

using namespace std::chrono_literals;

constexpr int width = 4;
constexpr std::chrono::milliseconds deadline = 2s, join = 2s;

/// What a job is told through the environment.
struct order {
  int ranks = 2, replicas = 1;
  std::string fault = "none";   // what happens
  std::string point = "never";  // where: start, joining, connecting, first, later, end
  int culprit = 0;              // on which rank
  std::string schedule = "1F1B";

  std::string text() const {
    std::ostringstream out;
    out << ranks << ' ' << replicas << ' ' << fault << ' ' << point << ' ' << culprit << ' ' << schedule;
    return out.str();
  }
  static order read(char const* text) {
    order out;
    std::istringstream(text) >> out.ranks >> out.replicas >> out.fault >> out.point >> out.culprit >> out.schedule;
    return out;
  }
};

/// What goes wrong here and now.
void strike(std::string const& fault) {
  std::map<std::string, gpu_double::fault> const of_nccl = {{"kernel-hangs", gpu_double::fault::kernel_hangs},
                                                            {"call-hangs", gpu_double::fault::call_hangs},
                                                            {"remote-error", gpu_double::fault::remote_error},
                                                            {"system-error", gpu_double::fault::system_error}};
  if (auto const found = of_nccl.find(fault); found != of_nccl.end()) return gpu_double::arm(found->second);
  if (fault == "kill") ::raise(SIGKILL);
  if (fault == "stop") ::raise(SIGSTOP);
  if (fault == "sleep") std::this_thread::sleep_for(60s);
  if (fault == "throw") throw std::runtime_error("no such file");
}

chevron::plan plan_of(order const& o) {
  return chevron::catalogue::make_plan(o.schedule, {.ranks = o.ranks, .micro_batches = 2 * o.ranks});
}
chevron::stage build_stage(int number, at::Device device) {
  at::manual_seed(7 + number);
  torch::nn::Sequential out(torch::nn::Linear(width, width), torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }));
  out->to(device);
  return out;
}
at::Tensor samples(order const& o, int seed) {
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed));
  return at::randn({4L * o.ranks, width}, generator);
}

/// Three steps on this rank. \returns the losses, in hexadecimal: of equal bits
std::string train(order const& o, chevron::transport& comm, at::Device device) {
  chevron::topology const where = comm.topology();
  bool const culprit = where.global_rank == o.culprit;
  long step = 0;
  auto const strikes_in = [&](long at) { return culprit && ((at == 0 && o.point == "first") || (at == 2 && o.point == "later")); };
  auto const build = [&](int s) -> chevron::stage {
    chevron::stage inner = build_stage(s, device);
    auto const hurt = torch::nn::Sequential(torch::nn::Functional([&, calls = 0L](at::Tensor const& x) mutable {
      // The second microbatch of a step: messages are under way.
      if (calls++ % (2L * o.ranks) == 1 && strikes_in(step)) {
        if (o.fault == "shape") return x.slice(0, 0, 1).clone();
        strike(o.fault);
      }
      return x;
    }));
    return s < o.ranks ? chevron::in_sequence({hurt, inner}) : inner;
  };
  if (culprit && o.point == "connecting") strike(o.fault);
  chevron::trainer trainer({.program = chevron::lower(chevron::prove(plan_of(o))),
                            .transport = comm,
                            .stages = build,
                            .loss = [](at::Tensor out, at::Tensor target) { return at::mse_loss(out, target); },
                            .optimizer = [](std::vector<at::Tensor> const& parameters) {
                              return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1));
                            },
                            .options = {.device = device}});
  std::string losses;
  for (; step < 3; ++step) {
    int const seed = static_cast<int>(10 * step + where.replica());
    auto const report = trainer.step({samples(o, seed)}, {samples(o, 1000 + seed)});
    char text[40];
    std::snprintf(text, sizeof text, " %a", report.loss);
    losses += text;
  }
  return losses;
}

/// A rank, as a user's program is one.
int run_rank(order const& o) {
  chevron::process_options options{.replicas = o.replicas, .deadline = deadline};
  options.launch.join = join;
  auto const proved = chevron::prove(plan_of(o));
  auto const program = chevron::lower(proved);
  chevron::job const rank = chevron::launch_ranks(program, options);
  bool const culprit = rank.rank == o.culprit;
  if (culprit && o.point == "start") strike(o.fault);
  if (culprit && o.point == "joining") {
    // In the middle of it: the others are there already, or wait.
    if (o.fault == "kill" || o.fault == "stop" || o.fault == "sleep") {
      std::thread([&] {
        while (gpu_double::communicators() == 0) std::this_thread::sleep_for(1ms);
        o.fault == "sleep" ? strike("call-hangs") : strike(o.fault);
      }).detach();
    } else {
      strike(o.fault);
    }
  }
  chevron::nccl_transport comm(rank.topology(o.ranks, o.replicas), rank);
  comm.deadline(deadline);
  std::string const losses = train(o, comm, comm.device());
  if (culprit && o.point == "end") strike(o.fault);
  comm.close();
  if (rank.rank == 0) std::fprintf(stderr, "losses%s\n", losses.c_str());
  return 0;
}

void clean_up() {
  if (DIR* const folder = ::opendir("/dev/shm")) {
    while (dirent const* const entry = ::readdir(folder)) {
      std::string const name = entry->d_name;
      int pid = 0;
      if (std::sscanf(name.c_str(), "nccl-double-%d-", &pid) == 1 && ::kill(pid, 0) != 0) ::shm_unlink(("/" + name).c_str());
    }
    ::closedir(folder);
  }
}

class started_job : public subprocess::started {
 public:
  explicit started_job(order const& o)
      : subprocess::started("a job over NCCL", {"GPU_DOUBLE_JOB=" + o.text(), "OMP_NUM_THREADS=1"}), order_(o) {}
  /// \param words in some line of what the ranks say
  subprocess::program_end ends(int code, std::vector<std::string> const& words, std::chrono::milliseconds within) {
    auto const end = wait(60s);
    INFO(order_.text() << ": " << end.output << "after " << end.took.count() << " ms");
    CHECK(end.code == code);
    CHECK(end.took < within);
    for (auto const& each : words) CHECK_MESSAGE(end.lines_with(each) >= 1, each);
    CHECK(end.lines_with("rule broken") == 0);
    clean_up();
    return end;
  }

 private:
  order order_;
};

/// Starting processes and joining them takes a while on a small machine.
constexpr std::chrono::milliseconds to_start = 8s;

}  // namespace

TEST_CASE("a job over NCCL" * doctest::skip()) {
  char const* const text = std::getenv("GPU_DOUBLE_JOB");
  if (text == nullptr) return;
  order const o = order::read(text);
  int const code = chevron::run_main(0, nullptr, [&](int, char**) { return run_rank(o); });
  std::fflush(nullptr);
  ::_exit(code);
}

TEST_CASE("a job over NCCL ends well, with the losses of ranks that are threads") {
  for (order const& o : {order{.ranks = 2}, order{.ranks = 2, .replicas = 2}, order{.ranks = 4, .schedule = "ZBVZeroBubble"},
                         order{.ranks = 8, .schedule = "Interleaved1F1B"}}) {
    std::string losses;
    chevron::run_threads({.pipeline_ranks = o.ranks, .replicas = o.replicas}, [&](chevron::transport& comm) {
      std::string const mine = train(o, comm, at::kCPU);
      if (comm.topology().global_rank == 0) losses = mine;
    });
    started_job(o).ends(0, {"losses" + losses}, 40s);
  }
}
