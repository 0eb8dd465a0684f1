// timeout: 180
// waits: deadlines run out
// Jobs over NCCL that end well, and jobs that break at each point of their way: which exit code, which cause, how soon.
#include "support/subprocess.hpp"
#include "support/thread_ranks.hpp"

#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
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
#include <chevron/run/comm/streams/stream_transport.hpp>
#include <chevron/run/cuda/cuda_streams.hpp>
#include <chevron/run/cuda/nccl_transport.hpp>
#include <chevron/run/launch/process_options.hpp>
#include <chevron/run/launch/run_main.hpp>

#include <doctest/doctest.h>

#include "gpu_double/double.hpp"

namespace {

using namespace std::chrono_literals;

constexpr int width = 4;

/// What a job is told through the environment.
struct order {
  int ranks = 2, replicas = 1;
  std::string fault = "none";   // what happens
  std::string point = "never";  // where: start, joining, connecting, first, later, end
  int culprit = 0;              // on which rank
  std::string schedule = "1F1B";
  int deferred = 0;  // W's that a rank may hold back

  std::string text() const {
    std::ostringstream out;
    out << ranks << ' ' << replicas << ' ' << fault << ' ' << point << ' ' << culprit << ' ' << schedule << ' ' << deferred;
    return out.str();
  }
  static order read(char const* text) {
    order out;
    std::istringstream(text) >> out.ranks >> out.replicas >> out.fault >> out.point >> out.culprit >> out.schedule >>
        out.deferred;
    return out;
  }
};

/// How long a rank waits for another. Nobody is to be given up in a job that ends well, and a busy machine can keep one of
/// eight processes waiting for seconds.
std::chrono::milliseconds deadline_of(order const& o) { return o.fault == "none" ? 60s : o.ranks > 4 ? 6s : 2s; }

using steady = std::chrono::steady_clock;
long long now_ms() { return std::chrono::duration_cast<std::chrono::milliseconds>(steady::now().time_since_epoch()).count(); }

/// What goes wrong here and now.
void strike(std::string const& fault) {
  std::fprintf(stderr, "struck at %lld\n", now_ms());
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
  auto const strikes_in = [&](long at) {
    return culprit && ((at == 0 && o.point == "first") || (at == 2 && o.point == "later"));
  };
  auto const build = [&](int s) -> chevron::stage {
    chevron::stage inner = build_stage(s, device);
    auto const hurt = torch::nn::Sequential(torch::nn::Functional([&, calls = 0L](at::Tensor const& x) mutable {
      // The second microbatch of a step: messages are under way.
      if (calls++ % (2L * o.ranks) == 1 && strikes_in(step)) {
        strike(o.fault);
        if (o.fault == "shape") return x.slice(0, 0, 1).clone();
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
                            .optimizer =
                                [](std::vector<at::Tensor> const& parameters) {
                                  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1));
                                },
                            .options = {.device = device, .deferred_weights = o.deferred}});
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
  chevron::process_options options{.replicas = o.replicas, .deadline = deadline_of(o)};
  options.launch.join = deadline_of(o);
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
  comm.deadline(deadline_of(o));
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

/// A job and how it is to end.
struct ending {
  order job;
  int code = 0;
  std::vector<std::string> words;  // all of them in one line of what its ranks say
};

bool says(std::string const& output, std::vector<std::string> const& words) {
  std::istringstream in(output);
  for (std::string line; std::getline(in, line);) {
    if (std::all_of(words.begin(), words.end(), [&](auto const& each) { return line.find(each) != std::string::npos; }))
      return true;
  }
  return false;
}

/// Runs these beside each other, since they mostly wait. One that ends too late may do so once: the machine may have been busy.
void run(std::vector<ending> const& all, bool again = false) {
  struct running {
    subprocess::started job;
    subprocess::program_end end{};
    long long ended = 0;
  };
  std::vector<running> jobs;
  for (auto const& each : all)
    jobs.push_back({.job = subprocess::started("a job over NCCL", {"GPU_DOUBLE_JOB=" + each.job.text(), "OMP_NUM_THREADS=1"})});
  auto const patience = steady::now() + 90s;
  std::size_t left = jobs.size();
  while (left > 0 && steady::now() < patience) {
    for (running& each : jobs) {
      if (each.ended != 0) continue;
      each.end = each.job.wait(20ms);
      if (each.end.code < 0) continue;
      each.ended = now_ms();
      --left;
    }
  }
  std::vector<ending> too_late;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    auto const& [job, code, words] = all[i];
    auto const& [started, end, ended] = jobs[i];
    long long struck = 0;
    if (auto const at = end.output.find("struck at "); at != std::string::npos) struck = std::atoll(end.output.c_str() + at + 10);
    INFO(job.text() << ": " << end.output << end.took.count() << " ms, " << ended - struck << " ms after the fault");
    CHECK(end.code == code);
    CHECK(says(end.output, words));
    CHECK(end.lines_with("rule broken") == 0);
    CHECK((struck != 0) == (job.fault != "none"));
    bool const late = struck != 0 && ended - struck >= (deadline_of(job) + 3s).count();
    if (late && !again) too_late.push_back(all[i]);
    CHECK_FALSE((late && again));
    if (std::getenv("GPU_DOUBLE_SHOW") != nullptr)
      std::printf("== %s: %d after %lld ms\n%s", job.text().c_str(), end.code, ended - struck, end.output.c_str());
  }
  clean_up();
  for (ending const& each : too_late) run({each}, true);
}

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
  std::vector<ending> all;
  for (order const& o :
       {order{.ranks = 2}, order{.ranks = 2, .replicas = 2}, order{.ranks = 4, .schedule = "ZBVZeroBubble"},
        order{.ranks = 3, .schedule = "ZB-H1", .deferred = 2}, order{.ranks = 8, .schedule = "Interleaved1F1B"}}) {
    std::string losses;
    chevron::run_threads({.pipeline_ranks = o.ranks, .replicas = o.replicas}, [&](chevron::transport& comm) {
      std::string const mine = train(o, comm, at::kCPU);
      if (comm.topology().global_rank == 0) losses = mine;
    });
    all.push_back({o, 0, {"losses" + losses}});
  }
  run(all);
}

// Rank 1 of two breaks. Who is told what, and the exit code of the whole job.
TEST_CASE("a job that breaks ends soon after the deadline, with the cause's exit code and words") {
  auto const at = [](std::string fault, std::string point, int code, std::vector<std::string> words, int culprit = 1) {
    return ending{{.fault = std::move(fault), .point = std::move(point), .culprit = culprit}, code, std::move(words)};
  };
  std::string const killed = "rank 1 was lost (killed by signal 9)", silent = "rank 1 did not answer within 2000 ms",
                    absent = "rank 1 did not join within 2000 ms", refused = "NCCL: unhandled system error",
                    gone = "was lost (NCCL: remote process exited or there was a network error)", thrown = "no such file";
  SUBCASE("before it joins") {
    run({at("kill", "start", 3, {killed}), at("stop", "start", 4, {absent}), at("sleep", "start", 4, {absent}),
         at("throw", "start", 1, {"rank 1 ended: " + thrown})});
  }
  SUBCASE("while it joins") {
    run({at("kill", "joining", 3, {killed}), at("stop", "joining", 4, {silent}), at("sleep", "joining", 4, {"within 2000 ms"}),
         at("system-error", "joining", 3, {refused})});
  }
  SUBCASE("while it connects") {
    run({at("kill", "connecting", 3, {killed}), at("kernel-hangs", "connecting", 4, {"did not answer within 2000 ms"}),
         at("call-hangs", "connecting", 4, {"did not answer within 2000 ms"}), at("remote-error", "connecting", 3, {gone}),
         at("system-error", "connecting", 3, {refused})});
  }
  for (char const* const point : {"first", "later"}) {
    std::string const step = std::string("step ") + (std::string(point) == "first" ? "0" : "2");
    CAPTURE(step);
    SUBCASE("in a step: a rank") {
      run({at("kill", point, 3, {"rank 0, " + step + ", 0", killed}), at("stop", point, 4, {"rank 0, " + step + ", 0", silent}),
           at("sleep", point, 4, {"rank 0, " + step + ", 0", silent}),
           at("throw", point, 1, {"rank 1, " + step + ", 1F1: stage 1 threw: " + thrown}),
           at("shape", point, 5, {"rank 0, step ", "0SEND_F1: would send Float["}, 0)});
    }
    SUBCASE("in a step: NCCL") {
      run({at("kernel-hangs", point, 4, {"did not answer within 2000 ms"}), at("call-hangs", point, 4, {silent}),
           at("remote-error", point, 3, {gone}), at("system-error", point, 3, {refused})});
    }
  }
  SUBCASE("at the end") {
    run({at("kill", "end", 3, {killed}), at("stop", "end", 4, {silent}), at("sleep", "end", 4, {silent}),
         at("throw", "end", 1, {"rank 1 ended: " + thrown})});
  }
}

TEST_CASE("communicators that the environment forbids to block are refused, with the remedy") {
  auto const end =
      subprocess::started("a job over NCCL", {"GPU_DOUBLE_JOB=" + order{}.text(), "OMP_NUM_THREADS=1", "NCCL_COMM_BLOCKING=0"})
          .wait(30s);
  INFO(end.output);
  CHECK(end.code == 3);
  CHECK(says(end.output, {"communicators do not block. Remedy: unset NCCL_COMM_BLOCKING"}));
  clean_up();
}

TEST_CASE("a stream to compute on is of one rank at a time, on its GPU") {
  at::Device const gpus[] = {{at::kCUDA, 0}, {at::kCUDA, 1}};
  std::set<c10::StreamId> seen;
  for (int round = 0; round < 2; ++round) {
    std::vector<chevron::compute_lane> held;
    std::set<c10::StreamId> now;
    for (int i = 0; i < 40; ++i) {
      at::Device const gpu = gpus[i % 2];
      held.push_back(chevron::cuda_streams::make_lane(gpu));
      CHECK(held.back().stream.device() == gpu);
      CHECK(gpu_double::device_of(c10::cuda::CUDAStream(held.back().stream).stream()) == gpu.index());
      now.insert(held.back().stream.id());
    }
    CHECK(now.size() == 40);
    if (round == 0) seen = now;
    CHECK(now == seen);  // those that were given back, and no more
  }
}

TEST_CASE("streams that a program makes by hand refuse settings under which ranks hang") {
  ::setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  CHECK_THROWS_WITH_AS(chevron::cuda_streams(at::Device(at::kCUDA, 0)),
                       doctest::Contains("CUDA_LAUNCH_BLOCKING=1 has the host wait"), chevron::usage_error);
  ::unsetenv("CUDA_LAUNCH_BLOCKING");
}

TEST_CASE("eight ranks: one breaks, all end") {
  auto const at = [](std::string fault, std::string point, int code, std::vector<std::string> words, int culprit) {
    return ending{{.ranks = 8, .fault = std::move(fault), .point = std::move(point), .culprit = culprit}, code, std::move(words)};
  };
  run({at("kill", "joining", 3, {"rank 3 was lost (killed by signal 9)"}, 3)});
  run({at("kill", "later", 3, {"rank 4 was lost (killed by signal 9)"}, 4)});
  run({at("stop", "later", 4, {"rank 7 did not answer within 6000 ms"}, 7)});
  run({at("kernel-hangs", "first", 4, {"did not answer within 6000 ms"}, 2)});
}

TEST_CASE("ranks that are threads of one process, each with a GPU") {
  auto const over_nccl = [](order const& o) {
    std::vector<std::string> losses(static_cast<std::size_t>(o.ranks));
    auto const thrown = thread_ranks::run(o.ranks, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
      at::Device const device(at::kCUDA, static_cast<c10::DeviceIndex>(where.global_rank));
      // Whichever device is current: a program need not set it.
      chevron::stream_transport<chevron::cuda_streams> comm(where, store, watch, deadline_of(o), device);
      comm.deadline(deadline_of(o));
      CHECK(comm.make_lane(device).owner != nullptr);  // of no pool
      losses[static_cast<std::size_t>(where.global_rank)] = train(o, comm, device);
      comm.close();
    });
    return std::pair(losses, thread_ranks::said(thrown));
  };
  for (int const ranks : {2, 8}) {
    CAPTURE(ranks);
    order const o{.ranks = ranks};
    std::string expected;
    chevron::run_threads({.pipeline_ranks = ranks}, [&](chevron::transport& comm) {
      std::string const mine = train(o, comm, at::kCPU);
      if (comm.topology().global_rank == 0) expected = mine;
    });
    auto const [losses, said] = over_nccl(o);
    CHECK(said == std::vector<std::string>(losses.size()));
    CHECK(losses[0] == expected);
  }
  struct ending {
    std::string fault, words;
  };
  for (auto const& [fault, words] :
       {ending{"throw", "1F1: stage 1 threw: no such file"}, ending{"kernel-hangs", "did not answer within 2000 ms"},
        ending{"remote-error", "NCCL: remote process exited"}, ending{"system-error", "NCCL: unhandled system error"}}) {
    CAPTURE(fault);
    auto const begun = steady::now();
    order const broken{.ranks = 4, .fault = fault, .point = "later", .culprit = 1};
    auto const [losses, said] = over_nccl(broken);
    CHECK(steady::now() - begun < deadline_of(broken) + 5s);  // from the start
    for (std::string const& of_rank : said) {
      INFO(of_rank);
      CHECK(of_rank.find(words) != std::string::npos);
    }
    CHECK(gpu_double::communicators() == 0);
    CHECK(gpu_double::kernels() == 0);
  }
}
