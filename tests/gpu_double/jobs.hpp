#pragma once

// Jobs that end well, and jobs with a fault at a chosen point: their settings, the work of their ranks, and how they end.

#include "support/cut_block.hpp"
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
#include <chevron/jobs/launch.hpp>
#include <chevron/jobs/process_options.hpp>
#include <chevron/jobs/run_main.hpp>
#include <chevron/lower/edges.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/run.hpp>
#include <chevron/transports/gpu/copy_transport.hpp>
#include <chevron/transports/gpu/nccl_transport.hpp>
#include <chevron/transports/gpu/shared_gpus.hpp>

#include <doctest/doctest.h>

#include "gpu_double/double.hpp"

namespace jobs {

using namespace std::chrono_literals;

constexpr int width = 4;

/// A job's settings, which it reads from the environment.
struct order {
  int ranks = 2, replicas = 1;
  std::string fault = "none";   // the kind of fault
  std::string point = "never";  // where: start, joining, connecting, making, first, later, end
  int culprit = 0;              // on which rank
  std::string schedule = "1F1B";
  std::string over = "NCCL";
  int per_gpu = 1;  // ranks
  int shards = 1;
  int deadline = 0;                                         // milliseconds; 0: a minute
  bool may_share = false;                                   // over NCCL: ranks may share GPUs
  chevron::sharding sharding = chevron::sharding::nothing;  // of ranks that are threads

  chevron::topology grid() const { return {.pipeline_ranks = ranks, .replicas = replicas, .shards = shards}; }

  std::string text() const {
    std::ostringstream out;
    out << ranks << ' ' << replicas << ' ' << fault << ' ' << point << ' ' << culprit << ' ' << schedule << ' ' << over << ' '
        << per_gpu << ' ' << shards << ' ' << deadline << ' ' << may_share;
    return out.str();
  }
  static order read(char const* text) {
    order out;
    std::istringstream(text) >> out.ranks >> out.replicas >> out.fault >> out.point >> out.culprit >> out.schedule >> out.over >>
        out.per_gpu >> out.shards >> out.deadline >> out.may_share;
    return out;
  }
};

/// How long a rank waits for another: by default longer than any wait of a job that no deadline has to end, also where the
/// machine is busy.
inline std::chrono::milliseconds deadline_of(order const& o) {
  return o.deadline > 0 ? std::chrono::milliseconds(o.deadline) : 60s;
}

/// The factor by which this machine's load lengthens deadlines that have to run out, and the time in which jobs have to end. 1,
/// and three times as much whenever a job without a fault does not end well with a third of the deadline; a third of it after
/// jobs that could be judged.
inline int& slowness() {
  static int factor = 1;
  return factor;
}
inline constexpr int most_slowness = 81;

/// The deadline, in milliseconds, of a job which that deadline has to end.
inline int short_deadline(order const& o) { return slowness() * (o.grid().world() > 4 ? 6000 : 2000); }
/// A job without a fault, by which `slowness` is judged, in the same grid.
inline order without_fault(order o) {
  o.deadline = short_deadline(o) / 3;
  o.fault = "none";
  o.point = "never";
  return o;
}

/// Lengthens deadlines until a job without a fault ends well with a third of them. \param ends_well runs a job
template <class EndsWell>
void judge_slowness(order const& o, EndsWell const& ends_well) {
  while (slowness() < most_slowness && !ends_well(without_fault(o))) slowness() *= 3;
}

/// So that each message has several pieces, sums have some, and flags go round beyond 2³².
inline constexpr chevron::copy_limits small_pieces{.edge_piece = 16, .edge_pieces = 3, .sum_piece = 32, .first = 0xffffffe0};

using steady = std::chrono::steady_clock;
inline long long now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(steady::now().time_since_epoch()).count();
}

/// A call that fails on the culprit, and what is known of the failure.
struct failing_call {
  std::string function;
  int result;
  std::string text;   // of ncclGetLastError
  std::string words;  // of ncclGetErrorString

  /// As Chevron quotes NCCL.
  std::string quoted() const { return "(NCCL: " + words + (text.empty() ? ")" : ", " + text + ")"); }
};
inline failing_call const& failing_call_of(std::string const& function) {
  static std::string const no_memory = "Cuda failure 'out of memory'", no_file = "Call to shm_open failed: Too many open files";
  static std::map<std::string, failing_call> const all = [] {
    std::map<std::string, failing_call> out;
    for (failing_call const& each :
         {failing_call{"ncclGetUniqueId", ncclSystemError, "Bootstrap : no socket interface found", "unhandled system error"},
          failing_call{"ncclCommInitRankConfig", ncclUnhandledCudaError, no_memory, "unhandled cuda error"},
          failing_call{"ncclSend", ncclInvalidArgument, "Send : invalid root 1", "invalid argument"},
          failing_call{"ncclRecv", ncclInvalidArgument, "Recv : invalid root 0", "invalid argument"},
          failing_call{"ncclGroupEnd", ncclSystemError, no_file, "unhandled system error"},
          failing_call{"ncclAllReduce", ncclUnhandledCudaError, no_memory, "unhandled cuda error"},
          failing_call{"ncclReduce", ncclUnhandledCudaError, no_memory, "unhandled cuda error"},
          failing_call{"ncclBroadcast", ncclSystemError, no_file, "unhandled system error"},
          failing_call{"ncclAllGather", ncclInternalError, "", "internal error"}})
      out.emplace(each.function, each);
    return out;
  }();
  return all.at(function);
}

/// Carries out a fault, at the point of this call. \param o its deadline is half of a nap \param device on which a call is to fail
inline void strike(std::string const& fault, order const& o, int device) {
  std::fprintf(stderr, "struck at %lld\n", now_ms());
  std::map<std::string, gpu_double::fault> const of_nccl = {{"kernel-hangs", gpu_double::fault::kernel_hangs},
                                                            {"call-hangs", gpu_double::fault::call_hangs},
                                                            {"remote-error", gpu_double::fault::remote_error},
                                                            {"system-error", gpu_double::fault::system_error}};
  if (auto const found = of_nccl.find(fault); found != of_nccl.end()) return gpu_double::arm(found->second);
  if (fault.starts_with("nccl")) {
    auto const& [function, result, text, words] = failing_call_of(fault);
    return gpu_double::fail_next(function, result, text, device);
  }
  if (fault == "kill") ::raise(SIGKILL);
  if (fault == "stop") ::raise(SIGSTOP);
  if (fault == "sleep") std::this_thread::sleep_for(std::max<std::chrono::milliseconds>(60s, 10 * deadline_of(o)));
  if (fault == "nap") std::this_thread::sleep_for(2 * deadline_of(o));
  if (fault == "throw") throw std::runtime_error("no such file");
}

inline chevron::plan plan_of(order const& o) {
  return chevron::catalogue::make_plan(o.schedule, {.ranks = o.ranks, .micro_batches = 2 * o.ranks});
}
inline chevron::stage build_stage(int number, at::Device device) {
  at::manual_seed(7 + number);
  torch::nn::Sequential out(torch::nn::Linear(width, width), torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }));
  out->to(device);
  return out;
}
inline at::Tensor samples(order const& o, int seed) {
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed));
  return at::randn({4L * o.ranks, width}, generator);
}

/// Three steps on this rank. \returns the losses, in hexadecimal: of equal bits
inline std::string train(order const& o, chevron::transport& comm, at::Device device) {
  chevron::topology const where = comm.topology();
  bool const culprit = where.global_rank == o.culprit;
  long step = 0;
  auto const strikes_in = [&](long at) {
    return culprit && ((at == 0 && o.point == "first") || (at == 2 && o.point == "later"));
  };
  auto const build = [&](int s) -> chevron::stage {
    chevron::stage inner = o.shards > 1 ? build_cut_stage(s, width, comm, device) : build_stage(s, device);
    auto const hurt = torch::nn::Sequential(torch::nn::Functional([&, calls = 0L](at::Tensor const& x) mutable {
      // The second microbatch of a step: messages are under way.
      if (calls++ % (2L * o.ranks) == 1 && strikes_in(step)) {
        strike(o.fault, o, device.index());
        if (o.fault == "shape") return x.slice(0, 0, 1).clone();
      }
      return x;
    }));
    return s < o.ranks ? chevron::in_sequence({hurt, inner}) : inner;
  };
  auto const program = chevron::lower(chevron::prove(plan_of(o)));
  if (culprit && (o.point == "connecting" || o.point == "making")) strike(o.fault, o, device.index());
  // Edges by themselves: a trainer connects them only after it has compared ranks over the channel of all ranks.
  if (o.point == "connecting") comm.connect(chevron::edges_of(program.view()));
  chevron::trainer trainer({.program = program,
                            .transport = comm,
                            .stages = build,
                            .loss = [](at::Tensor out, at::Tensor target) { return at::mse_loss(out, target); },
                            .optimizer =
                                [](std::vector<at::Tensor> const& parameters) {
                                  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.1));
                                },
                            .options = {.shard = o.sharding, .device = device}});
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

/// After training: sums of uneven shares, given to all replicas, and shares of another dtype.
/// \throws std::runtime_error where a replica then holds anything else
inline void use_shares(chevron::transport& comm, at::Device device) {
  chevron::topology const where = comm.topology();
  if (where.replicas == 1) return;
  std::int64_t const numbers = 20001;  // bytes beyond the room that ranks of the double share
  std::vector<std::int64_t> cut;
  for (int r = 0; r <= where.replicas; ++r) cut.push_back(r == 0 ? 0 : numbers - 7L * (where.replicas - r));
  auto const options = at::TensorOptions(device).dtype(at::kFloat);
  at::Tensor const values = at::full({numbers}, 0.5 + where.replica(), options), marks = at::full({numbers}, -0.0, options);
  if (where.replica() > 0) marks.fill_(1);
  comm.start_reduce_scatter(0, values, cut);
  comm.start_share_gather(1, marks, cut);
  comm.wait_bucket(0);
  comm.start_share_gather(0, values, cut);
  comm.wait_bucket(1);
  comm.wait_bucket(0);
  double const sum = 0.5 * where.replicas * where.replicas;
  at::Tensor const first = marks.narrow(0, 0, cut[1]), rest = marks.narrow(0, cut[1], numbers - cut[1]);
  if (!at::equal(values.cpu(), at::full({numbers}, sum, at::kFloat)) || !at::equal(rest.cpu(), at::ones({numbers - cut[1]})) ||
      !at::signbit(first.cpu()).all().item<bool>())
    throw std::runtime_error("shares are wrong");
}

/// After training: the three collectives over shards, beside a sum over replicas, of numbers beyond one piece of memory.
/// \throws std::runtime_error where a shard then holds anything else
inline void use_shards(chevron::transport& comm, at::Device device) {
  chevron::topology const where = comm.topology();
  if (where.shards == 1) return;
  std::int64_t const numbers = 20001;
  std::vector<std::int64_t> cut;
  for (int t = 0; t <= where.shards; ++t) cut.push_back(t == 0 ? 0 : numbers - 7L * (where.shards - t));
  auto const made = [&] { return at::full({numbers}, 0.5 + where.shard(), at::TensorOptions(device).dtype(at::kFloat)); };
  at::Tensor const whole = made(), pieces = made(), shares = made(), of_replicas = made();
  comm.start_all_reduce(0, of_replicas);
  comm.over_group(chevron::rank_group::shards, chevron::group_collective::all_reduce, whole);
  comm.over_group(chevron::rank_group::shards, chevron::group_collective::reduce_scatter, pieces, cut);
  comm.over_group(chevron::rank_group::shards, chevron::group_collective::share_gather, shares, cut);
  comm.wait_bucket(0);
  auto const holds = [&](at::Tensor const& of, int shard, double value) {
    auto const t = static_cast<std::size_t>(shard);
    at::Tensor const share = of.narrow(0, cut[t], cut[t + 1] - cut[t]).cpu();
    return at::equal(share, at::full_like(share, value));
  };
  double const sum = 0.5 * where.shards * where.shards;
  bool right = at::equal(of_replicas.cpu(), at::full({numbers}, where.replicas * (0.5 + where.shard()), at::kFloat)) &&
               holds(pieces, where.shard(), sum);
  for (int t = 0; t < where.shards; ++t) right = right && holds(whole, t, sum) && holds(shares, t, 0.5 + t);
  std::vector<std::int64_t> counts;
  for (int t = 0; t < where.shards; ++t) counts.push_back(100 + t);
  right = right && chevron::shard_group(comm).all_counts({100 + where.shard()}) == counts;
  if (!right) throw std::runtime_error("collectives over shards are wrong");
}

/// \throws std::runtime_error where a communicator's kernels may take another number of blocks than its use has
inline void check_blocks() {
  chevron::nccl_channel_limits const limits;
  for (auto const& [name, blocks] : gpu_double::channels()) {
    int const wanted = name.starts_with("edge ") ? limits.edge : name == "world" ? limits.gather : limits.sum;
    if (blocks != wanted) throw std::runtime_error("channel '" + name + "' has " + std::to_string(blocks) + " blocks");
  }
  if (gpu_double::channels().empty()) throw std::runtime_error("no channel has a name");
}

/// \throws std::runtime_error where this process has a context on another GPU than its rank's
inline void check_contexts(int gpu) {
  for (int other = 0; other < 8; ++other) {
    if (other != gpu && gpu_double::has_context(other))
      throw std::runtime_error("a rank on GPU " + std::to_string(gpu) + " has a context on GPU " + std::to_string(other));
  }
}

/// A rank, as a user's program is one.
inline int run_rank(order const& o) {
  chevron::process_options options{.replicas = o.replicas, .shards = o.shards, .deadline = deadline_of(o)};
  options.launch.join = deadline_of(o);
  auto const proved = chevron::prove(plan_of(o));
  auto const program = chevron::lower(proved);
  chevron::job const rank = chevron::launch_ranks(program, options);
  bool const culprit = rank.rank == o.culprit;
  int const gpu = rank.local_rank / o.per_gpu;
  if (culprit && o.point == "start") strike(o.fault, o, gpu);
  if (culprit && o.point == "joining") {
    // In the middle of it: the others are there already, or wait.
    if (o.fault == "kill" || o.fault == "stop" || o.fault == "sleep") {
      std::thread([&] {
        while (gpu_double::communicators() == 0 && gpu_double::pinned_blocks() == 0) std::this_thread::sleep_for(1ms);
        strike(o.fault == "sleep" ? "call-hangs" : o.fault, o, gpu);
      }).detach();
    } else {
      strike(o.fault, o, gpu);
    }
  }
  auto const work = [&](auto& comm) {
    comm.deadline(deadline_of(o));
    std::string const losses = train(o, comm, comm.device());
    if (o.fault == "none") {
      use_shares(comm, comm.device());
      use_shards(comm, comm.device());
      if (o.over == "NCCL" && comm.topology().world() > 1) check_blocks();
      check_contexts(comm.device().index());
    }
    if (culprit && o.point == "end") strike(o.fault, o, gpu);
    comm.close();
    if (rank.rank == 0) std::fprintf(stderr, "losses%s\n", losses.c_str());
    return 0;
  };
  chevron::topology const where = rank.topology(o.ranks, o.replicas, o.shards);
  if (o.over == "copies") {
    chevron::copy_transport comm(where, rank, {.device = gpu, .channels = small_pieces});
    return work(comm);
  }
  if (o.may_share) {
    bool const pretends = chevron::share_cuda_device(where, rank, gpu);
    std::fprintf(stderr, "rank %d is on %s\n", rank.rank, pretends ? "a machine of its own" : "the machine");
    if (pretends != (std::getenv("NCCL_HOSTID") != nullptr)) throw std::runtime_error("NCCL_HOSTID is not as told");
  }
  chevron::nccl_transport comm(where, rank, {.device = gpu});
  return work(comm);
}

inline void clean_up() {
  if (DIR* const folder = ::opendir("/dev/shm")) {
    while (dirent const* const entry = ::readdir(folder)) {
      std::string const name = entry->d_name;
      int pid = 0;
      if (std::sscanf(name.c_str(), "nccl-double-%d-", &pid) == 1 && ::kill(pid, 0) != 0) ::shm_unlink(("/" + name).c_str());
    }
    ::closedir(folder);
  }
}

/// A job and how it is to end. With exit code 4 its deadline has to run out.
struct ending {
  order job;
  int code = 0;
  std::vector<std::string> words;             // one line of the ranks' output has all of them; "@": the deadline in milliseconds
  std::vector<std::string> other_words = {};  // the same line or another has all of these
};

inline bool says(std::string const& output, std::vector<std::string> const& words) {
  std::istringstream in(output);
  for (std::string line; std::getline(in, line);) {
    if (std::all_of(words.begin(), words.end(), [&](auto const& each) { return line.find(each) != std::string::npos; }))
      return true;
  }
  return false;
}

/// How a job ended.
struct finished {
  order job;
  subprocess::program_end end{};
  long long ended = 0;  // 0: it did not

  /// Milliseconds from the fault to the job's end; -1 without a fault.
  long long after_fault() const {
    auto const at = end.output.find("struck at ");
    return at == std::string::npos ? -1 : ended - std::atoll(end.output.c_str() + at + 10);
  }
};

/// Runs these beside each other, since they mostly wait.
inline std::vector<finished> run_beside(std::vector<order> const& orders) {
  std::vector<subprocess::started> jobs;
  std::vector<finished> out;
  for (order const& o : orders) {
    jobs.emplace_back("a job over " + o.over, std::vector<std::string>{"GPU_DOUBLE_JOB=" + o.text(), "OMP_NUM_THREADS=1"});
    out.push_back({o});
  }
  auto const patience = steady::now() + 90s + 60s * slowness();
  for (std::size_t left = jobs.size(); left > 0 && steady::now() < patience;) {
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      if (out[i].ended != 0) continue;
      out[i].end = jobs[i].wait(20ms);
      if (out[i].end.code < 0) continue;
      out[i].ended = now_ms();
      --left;
    }
  }
  jobs.clear();
  clean_up();
  return out;
}

/// Checks how a job ended. \returns whether it ended as it has to, but too late after its fault
inline bool check_end(ending const& wanted, finished const& got) {
  auto const told = [&](std::vector<std::string> words) {
    for (std::string& each : words) {
      if (auto const at = each.find('@'); at != std::string::npos) each.replace(at, 1, std::to_string(got.job.deadline));
    }
    return says(got.end.output, words);
  };
  long long const after = got.after_fault();
  INFO(got.job.text() << ": " << got.end.output << got.end.took.count() << " ms, " << after << " ms after the fault");
  CHECK(got.end.code == wanted.code);
  CHECK(told(wanted.words));
  CHECK(told(wanted.other_words));
  CHECK(got.end.lines_with("rule broken") == 0);
  CHECK((after >= 0) == (got.job.fault != "none"));
  if (std::getenv("GPU_DOUBLE_SHOW") != nullptr)
    std::printf("== %s: %d after %lld ms\n%s", got.job.text().c_str(), got.end.code, after, got.end.output.c_str());
  return after >= short_deadline(got.job) + 4000LL * slowness();
}

/// Runs jobs beside each other and checks their ends. Beside jobs with faults runs one without, with a third of their deadline:
/// if that deadline runs out, the machine is too busy for this `slowness`, and all run again with the next one. One that ends
/// too late may do so once.
inline void run(std::vector<ending> const& all, bool again = false) {
  bool const breaks = std::any_of(all.begin(), all.end(), [](ending const& each) { return each.job.fault != "none"; });
  while (true) {
    std::vector<order> jobs;
    for (ending const& each : all) {
      jobs.push_back(each.job);
      if (each.code == 4) jobs.back().deadline = short_deadline(each.job);
    }
    if (breaks) jobs.push_back(without_fault(all.front().job));
    auto const ends = run_beside(jobs);
    if (breaks && ends.back().end.code != 0 && slowness() < most_slowness) {
      slowness() *= 3;
      MESSAGE("a job without a fault needs more than " << jobs.back().deadline << " ms: deadlines are " << slowness()
                                                       << " times as long");
      continue;
    }
    INFO("without a fault: " << ends.back().end.output);
    if (breaks) CHECK(ends.back().end.code == 0);
    std::vector<ending> too_late;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (check_end(all[i], ends[i])) too_late.push_back(all[i]);
    }
    CHECK((too_late.empty() || !again));
    if (breaks) slowness() = std::max(1, slowness() / 3);
    if (!again) {
      for (ending const& each : too_late) run({each}, true);
    }
    return;
  }
}

/// Runs the job of the environment in this process and exits; returns if the environment has no job.
inline void become_job() {
  char const* const text = std::getenv("GPU_DOUBLE_JOB");
  if (text == nullptr) return;
  order const o = order::read(text);
  int const code = chevron::run_main(0, nullptr, [&](int, char**) { return run_rank(o); });
  std::fflush(nullptr);
  ::_exit(code);
}

/// The losses of ranks that are threads and compute on the CPU.
inline std::string losses_on_cpu(order const& o) {
  std::string out;
  chevron::run_threads({.pipeline_ranks = o.ranks, .replicas = o.replicas, .shards = o.shards}, [&](chevron::transport& comm) {
    std::string const mine = train(o, comm, at::kCPU);
    if (comm.topology().global_rank == 0) out = mine;
  });
  return out;
}

}  // namespace jobs
