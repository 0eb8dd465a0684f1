// timeout: 60
// The double itself: what it lets pass, what it makes wait, and which rules it knows.
#include "support/subprocess.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <doctest/doctest.h>

#include "gpu_double/double.hpp"

namespace {

using namespace std::chrono_literals;

ncclComm_t begin_joining(ncclUniqueId const& id, int rank, int size = 2) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t out = nullptr;
  ncclCommInitRankConfig(&out, size, id, rank, &config);
  return out;
}
void settle(ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  while (ncclCommGetAsyncError(comm, &state), state == ncclInProgress) std::this_thread::sleep_for(1ms);
}
/// Both ends of a communicator, on one thread.
struct pair_of_ranks {
  std::array<ncclComm_t, 2> ends{};
  std::array<cudaStream_t, 2> streams{};
  std::array<float, 2> values{1, 2};
  pair_of_ranks() {
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    for (int r : {0, 1}) {
      ends[static_cast<std::size_t>(r)] = begin_joining(id, r);
      cudaStreamCreateWithPriority(&streams[static_cast<std::size_t>(r)], cudaStreamNonBlocking, 0);
    }
    for (ncclComm_t const end : ends) settle(end);
  }
  void send() {
    ncclGroupStart();
    ncclSend(&values[0], 1, ncclFloat32, 1, ends[0], streams[0]);
    ncclGroupEnd();
  }
  void receive() {
    ncclGroupStart();
    ncclRecv(&values[1], 1, ncclFloat32, 0, ends[1], streams[1]);
    ncclGroupEnd();
  }
  void connect() {
    send();
    receive();
    for (ncclComm_t const end : ends) settle(end);
    for (cudaStream_t const stream : streams) cudaStreamSynchronize(stream);
  }
};

/// Each breaks a rule, or waits for ever.
std::map<std::string, std::function<void()>> const programs = {
    {"a call in progress",
     [] {
       pair_of_ranks two;
       two.send();  // connects, which takes both
       two.send();
     }},
    {"a call after abort",
     [] {
       pair_of_ranks two;
       ncclCommAbort(two.ends[0]);
       two.send();
     }},
    {"finalize before all have joined",
     [] {
       ncclUniqueId id;
       ncclGetUniqueId(&id);
       ncclCommFinalize(begin_joining(id, 0));
     }},
    {"destroy without finalize",
     [] {
       pair_of_ranks two;
       ncclCommDestroy(two.ends[0]);
     }},
    {"abort beside a kernel of another communicator",
     [] {
       pair_of_ranks one, other;
       other.connect();
       other.receive();
       std::thread([] {
         std::this_thread::sleep_for(1s);
         std::fprintf(stderr, "still waiting\n");
         ::_exit(5);
       }).detach();
       ncclCommAbort(one.ends[0]);
     }},
};

}  // namespace

TEST_CASE("a program that breaks a rule" * doctest::skip()) {
  char const* const name = std::getenv("GPU_DOUBLE_RULE");
  if (name == nullptr) return;
  programs.at(name)();
  ::_exit(0);
}

TEST_CASE("who breaks a rule is told") {
  auto const says = [](std::string const& name, int code, std::string const& words) {
    auto const end = subprocess::started("a program that breaks a rule", {"GPU_DOUBLE_RULE=" + name}).wait(20s);
    INFO(name << ": " << end.output);
    CHECK(end.code == code);
    CHECK(end.lines_with(words) == 1);
  };
  int const broken = gpu_double::rule_broken;
  says("a call in progress", broken, "rule broken: ncclSend while the communicator is in progress");
  says("a call after abort", broken, "rule broken: ncclSend on a communicator that was aborted or destroyed");
  says("finalize before all have joined", broken, "rule broken: ncclCommFinalize while the communicator is in progress");
  says("destroy without finalize", broken, "rule broken: ncclCommDestroy without ncclCommFinalize");
  says("abort beside a kernel of another communicator", 5, "still waiting");
}

TEST_CASE("messages arrive, sums and gathers are of all ranks") {
  pair_of_ranks two;
  two.values = {7, 0};
  two.connect();
  CHECK(two.values[1] == 7);

  two.values = {1, 2};
  std::array<std::array<float, 2>, 2> gathered{};
  for (std::size_t r : {0, 1}) {
    ncclGroupStart();
    ncclAllReduce(&two.values[r], &two.values[r], 1, ncclFloat32, ncclSum, two.ends[r], two.streams[r]);
    ncclGroupEnd();
  }
  for (ncclComm_t const end : two.ends) settle(end);
  for (std::size_t r : {0, 1}) {
    ncclGroupStart();
    ncclAllGather(&two.values[r], gathered[r].data(), 1, ncclFloat32, two.ends[r], two.streams[r]);
    ncclGroupEnd();
  }
  for (cudaStream_t const stream : two.streams) cudaStreamSynchronize(stream);
  CHECK(two.values == std::array<float, 2>{3, 3});
  CHECK(gathered[0] == std::array<float, 2>{3, 3});
  CHECK(gathered[1] == std::array<float, 2>{3, 3});
}

TEST_CASE("communicators that are aborted in one group all end, whatever kernels wait") {
  pair_of_ranks one, other;
  other.connect();
  other.receive();
  CHECK(gpu_double::kernels() == 1);
  ncclGroupStart();
  for (pair_of_ranks* const each : {&one, &other}) {
    for (ncclComm_t const end : each->ends) ncclCommAbort(end);
  }
  ncclGroupEnd();
  CHECK(gpu_double::kernels() == 0);
}

TEST_CASE("CUDA does not work in a child of a process that has used it") {
  int devices = 0;
  REQUIRE(cudaGetDeviceCount(&devices) == cudaSuccess);
  pid_t const child = ::fork();
  if (child == 0) ::_exit(cudaGetDeviceCount(&devices) == cudaErrorInitializationError ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WEXITSTATUS(status) == 0);
}
