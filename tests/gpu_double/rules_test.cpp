// timeout: 60
// Tests of the double itself: calls that it allows, calls that wait, and the rules that it checks.
#include "support/subprocess.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <ATen/ATen.h>

#include <doctest/doctest.h>

#include "gpu_double/double.hpp"

namespace {

using namespace std::chrono_literals;

ncclComm_t begin_joining(ncclUniqueId const& id, int rank, int size = 2, int channels = 4) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.maxCTAs = channels;
  ncclComm_t out = nullptr;
  ncclCommInitRankConfig(&out, size, id, rank, &config);
  return out;
}
void settle(ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  while (ncclCommGetAsyncError(comm, &state), state == ncclInProgress) std::this_thread::sleep_for(1ms);
}
/// Both ends of a communicator that does not block, on one thread.
struct pair_of_ranks {
  std::array<ncclComm_t, 2> ends{};
  std::array<cudaStream_t, 2> streams{};
  std::array<float, 2> values{1, 2};
  explicit pair_of_ranks(int channels = 4) {
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    for (int r : {0, 1}) {
      ends[static_cast<std::size_t>(r)] = begin_joining(id, r, 2, channels);
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
    settle_both();
    for (cudaStream_t const stream : streams) cudaStreamSynchronize(stream);
  }
  void settle_both() {
    for (ncclComm_t const end : ends) settle(end);
  }
};

/// A rank of a communicator that blocks, which another thread joins.
struct joining {
  ncclComm_t comm = nullptr;
  ncclResult_t result = ncclInProgress;
  std::thread thread;
  joining(ncclUniqueId const& id, int rank, int size)
      : thread([this, id, rank, size] {
          ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
          result = ncclCommInitRankConfig(&comm, size, id, rank, &config);
        }) {}
  ncclComm_t wait_for_handle() {
    while (std::atomic_ref(comm).load() == nullptr) std::this_thread::sleep_for(1ms);
    return comm;
  }
};
ncclUniqueId new_id() {
  ncclUniqueId out;
  ncclGetUniqueId(&out);
  return out;
}

cudaStream_t new_stream() {
  cudaStream_t out = nullptr;
  cudaStreamCreateWithPriority(&out, cudaStreamNonBlocking, 0);
  return out;
}
cudaEvent_t new_event() {
  cudaEvent_t out = nullptr;
  cudaEventCreateWithFlags(&out, cudaEventDisableTiming);
  return out;
}

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
       settle(other.ends[1]);
       std::thread([] {
         std::this_thread::sleep_for(1s);
         std::fprintf(stderr, "still waiting\n");
         ::_exit(5);
       }).detach();
       ncclCommAbort(one.ends[0]);
     }},
    {"a communicator is freed while another thread joins it",
     [] {
       joining one(new_id(), 0, 2);
       ncclCommAbort(one.wait_for_handle());
       one.thread.join();
     }},
    {"memory is freed that another process has open",
     [] {
       std::array<int, 2> down{}, up{};
       if (::pipe(down.data()) != 0 || ::pipe(up.data()) != 0) return;
       pid_t const owner = ::fork();
       void* memory = nullptr;
       cudaIpcMemHandle_t handle{};
       char opened = 0;
       if (owner == 0) {
         cudaMalloc(&memory, 100);
         cudaIpcGetMemHandle(&handle, static_cast<char*>(memory) + 10);
         bool const told = ::write(up[1], &handle, sizeof handle) == sizeof handle && ::read(down[0], &opened, 1) == 1;
         cudaFree(memory);
         ::_exit(told ? 0 : 1);
       }
       bool const told = ::read(up[0], &handle, sizeof handle) == sizeof handle &&
                         cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess &&
                         ::write(down[1], &opened, 1) == 1;
       int status = 0;
       ::waitpid(owner, &status, 0);
       ::_exit(told && WIFEXITED(status) ? WEXITSTATUS(status) : 1);
     }},
    {"NCCL within a capture",
     [] {
       pair_of_ranks two;
       cudaStreamBeginCapture(two.streams[0], cudaStreamCaptureModeThreadLocal);
       two.send();
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
  says("a communicator is freed while another thread joins it", broken,
       "rule broken: a communicator is freed while another thread");
  says("memory is freed that another process has open", broken, "rule broken: memory is freed that another process has open");
  says("NCCL within a capture", broken, "rule broken: a kernel of NCCL within a capture");
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
  two.settle_both();
  for (std::size_t r : {0, 1}) {
    ncclGroupStart();
    ncclAllGather(&two.values[r], gathered[r].data(), 1, ncclFloat32, two.ends[r], two.streams[r]);
    ncclGroupEnd();
  }
  two.settle_both();
  for (cudaStream_t const stream : two.streams) cudaStreamSynchronize(stream);
  CHECK(two.values == std::array<float, 2>{3, 3});
  CHECK(gathered[0] == std::array<float, 2>{3, 3});
  CHECK(gathered[1] == std::array<float, 2>{3, 3});
}

TEST_CASE("communicators that are aborted in one group all end, whatever kernels wait") {
  pair_of_ranks one, other;
  other.connect();
  other.receive();
  settle(other.ends[1]);
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

TEST_CASE("a group of a communicator that does not block comes back before its kernel is on the stream") {
  pair_of_ranks two;
  two.connect();
  int late = 0;
  for (int i = 0; i < 20; ++i) {
    two.send();
    // An event recorded now precedes the kernel that NCCL's thread launches: a program must wait for that thread first.
    cudaEvent_t const sent = new_event();
    cudaEventRecord(sent, two.streams[0]);
    if (cudaEventQuery(sent) == cudaErrorNotReady) std::this_thread::sleep_for(100us);
    late += cudaEventQuery(sent) == cudaSuccess;
    two.receive();
    two.settle_both();
    for (cudaStream_t const stream : two.streams) cudaStreamSynchronize(stream);
    cudaEventDestroy(sent);
  }
  CHECK(late > 0);
}

TEST_CASE(
    "a group of a communicator that blocks comes back when its kernel is on the stream, and another thread ends a call that "
    "waits") {
  ncclUniqueId const id = new_id();
  std::array<joining, 2> ends{joining(id, 0, 2), joining(id, 1, 2)};
  for (joining& each : ends) each.thread.join();
  CHECK(ends[0].result == ncclSuccess);
  float value = 7;
  cudaStream_t const stream = new_stream();
  ncclResult_t sent = ncclInProgress;
  std::thread sender([&] {  // its way is not connected: it waits for the other end
    ncclGroupStart();
    ncclSend(&value, 1, ncclFloat32, 1, ends[0].comm, stream);
    sent = ncclGroupEnd();
  });
  std::this_thread::sleep_for(20ms);
  joining absent(new_id(), 0, 2);  // the other one never comes
  absent.wait_for_handle();
  ncclGroupStart();
  for (ncclComm_t const each : {ends[0].comm, ends[1].comm, absent.comm}) ncclCommAbort(each);
  sender.join();
  absent.thread.join();
  ncclGroupEnd();
  CHECK(sent == ncclInternalError);
  CHECK(absent.result == ncclInternalError);
}

TEST_CASE("streams and events belong to a device, and a launch elsewhere fails") {
  cudaStream_t const here = new_stream();
  cudaEvent_t const event = new_event();
  cudaSetDevice(1);
  cudaStream_t const there = new_stream();
  CHECK(cudaEventRecord(event, there) == cudaErrorInvalidResourceHandle);
  CHECK(gpu_double::may_launch(here) == cudaErrorInvalidResourceHandle);
  CHECK(gpu_double::may_launch(there) == cudaSuccess);
  CHECK(cudaStreamWaitEvent(there, event, 0) == cudaSuccess);
  cudaSetDevice(0);
  CHECK(cudaEventRecord(event, here) == cudaSuccess);
  pair_of_ranks two;
  ncclGroupStart();
  ncclSend(&two.values[0], 1, ncclFloat32, 1, two.ends[0], there);
  CHECK(ncclGroupEnd() == ncclUnhandledCudaError);
  cudaGetLastError();
}

TEST_CASE("a device has so many places for kernels, and so much memory") {
  std::array<pair_of_ranks, 2> many{pair_of_ranks(gpu_double::places / 2), pair_of_ranks(gpu_double::places / 2)};
  for (pair_of_ranks& each : many) each.connect();
  for (pair_of_ranks& each : many) {
    each.receive();
    settle(each.ends[1]);
  }
  std::this_thread::sleep_for(20ms);
  auto const until = std::chrono::steady_clock::now() + 20ms;
  CHECK_FALSE(gpu_double::take_places(0, 1, [&] { return std::chrono::steady_clock::now() > until; }));
  CHECK(gpu_double::take_places(1, 1));
  gpu_double::leave_places(1, 1);
  ncclGroupStart();
  for (pair_of_ranks const& each : many) {
    for (ncclComm_t const end : each.ends) ncclCommAbort(end);
  }
  ncclGroupEnd();
  CHECK(gpu_double::take_places(0, 1));
  gpu_double::leave_places(0, 1);

  std::size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  std::size_t const before = gpu_double::limit_memory(total - free + 1024);
  void *first = nullptr, *second = nullptr;
  CHECK(cudaMalloc(&first, 1024) == cudaSuccess);
  CHECK(cudaMalloc(&second, 1) == cudaErrorMemoryAllocation);
  CHECK(cudaFree(first) == cudaSuccess);
  CHECK(cudaMalloc(&second, 1) == cudaSuccess);
  CHECK(cudaFree(second) == cudaSuccess);
  gpu_double::limit_memory(before);
  cudaGetLastError();
}

namespace {

/// A capture on a stream, in which `work` is noted.
cudaError_t captured(cudaStream_t on, cudaGraph_t& out, std::function<void()> const& work) {
  REQUIRE(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  work();
  cudaError_t const end = cudaStreamEndCapture(on, &out);
  cudaGetLastError();
  CHECK((end == cudaSuccess) == (out != nullptr));
  return end;
}

}  // namespace

TEST_CASE("a stream waits until another one, or the host, has written a number or one beyond it, modulo 2^32") {
  using operation = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);
  auto const function = [](char const* name, unsigned version) {
    void* out = nullptr;
    cudaDriverEntryPointQueryResult found{};
    cudaError_t const result = cudaGetDriverEntryPointByVersion(name, &out, version, cudaEnableDefault, &found);
    CHECK((result == cudaSuccess) == (found == cudaDriverEntryPointSuccess));
    cudaGetLastError();
    return reinterpret_cast<operation>(out);
  };
  operation const write = function("cuStreamWriteValue32", 12000), wait = function("cuStreamWaitValue32", 12000);
  REQUIRE((write != nullptr && wait != nullptr));
  static_cast<void>(function("cuStreamWaitValue32", 11000));
  CHECK((function("cuStreamBatchMemOp", 12000) == nullptr));

  alignas(4096) static std::array<std::uint32_t, 1024> page{};
  auto const word = reinterpret_cast<CUdeviceptr>(page.data());
  cudaStream_t const waiting = new_stream(), writing = new_stream();
  CHECK(wait(waiting, word, 1, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_ERROR_INVALID_VALUE);  // not registered
  REQUIRE(cudaHostRegister(page.data(), sizeof page, cudaHostRegisterMapped) == cudaSuccess);
  auto const is_done = [&] {
    cudaError_t const now = cudaStreamQuery(waiting);
    cudaGetLastError();
    return now == cudaSuccess;
  };
  auto const done_soon = [&] {
    for (int i = 0; i < 2000 && !is_done(); ++i) std::this_thread::sleep_for(1ms);
    return is_done();
  };
  page[0] = 0xfffffff0;
  REQUIRE(wait(waiting, word, 0xfffffff0, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
  CHECK(done_soon());
  REQUIRE(wait(waiting, word, 3, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
  std::this_thread::sleep_for(50ms);
  CHECK_FALSE(is_done());
  REQUIRE(write(writing, word, 2, CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS);
  std::this_thread::sleep_for(50ms);
  CHECK_FALSE(is_done());
  REQUIRE(write(writing, word, 5, CU_STREAM_WRITE_VALUE_DEFAULT) == CUDA_SUCCESS);
  CHECK(done_soon());
  REQUIRE(wait(waiting, word, 7, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_SUCCESS);
  std::atomic_ref(page[0]).store(7);
  CHECK(done_soon());

  // Neither can be part of a capture here.
  cudaStreamBeginCapture(waiting, cudaStreamCaptureModeThreadLocal);
  CHECK(wait(waiting, word, 7, CU_STREAM_WAIT_VALUE_GEQ) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  cudaGraph_t noted = nullptr;
  CHECK(cudaStreamEndCapture(waiting, &noted) == cudaErrorStreamCaptureInvalidated);
  cudaGetLastError();
  REQUIRE(cudaHostUnregister(page.data()) == cudaSuccess);
}

TEST_CASE("a process cannot open a handle of its own, and a handle is of a whole allocation") {
  void *memory = nullptr, *other = nullptr;
  REQUIRE(cudaMalloc(&memory, 1000) == cudaSuccess);
  int const before = gpu_double::lent_blocks();
  cudaIpcMemHandle_t whole{}, part{};
  REQUIRE(cudaIpcGetMemHandle(&whole, memory) == cudaSuccess);
  REQUIRE(cudaIpcGetMemHandle(&part, static_cast<char*>(memory) + 500) == cudaSuccess);
  CHECK(std::memcmp(&whole, &part, sizeof whole) == 0);
  CHECK(gpu_double::lent_blocks() == before + 1);
  CHECK(cudaIpcOpenMemHandle(&other, whole, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess);
  cudaGetLastError();
  CHECK(cudaFree(memory) == cudaSuccess);
  CHECK(gpu_double::lent_blocks() == before);
}

TEST_CASE("a capture: what is noted runs at a launch, and in no order but that of its events") {
  cudaStream_t const origin = new_stream(), other = new_stream();
  cudaEvent_t const fork = new_event(), join = new_event();
  std::string ran;
  cudaGraph_t noted = nullptr;
  auto const noting = [&](bool joins) {
    return captured(origin, noted, [&] {
      gpu_double::enqueue(origin, [&] { ran += 'a'; });
      cudaEventRecord(fork, origin);
      CHECK(cudaStreamWaitEvent(other, fork, 0) == cudaSuccess);
      gpu_double::enqueue(other, [&] { ran += 'b'; });
      gpu_double::enqueue(origin, [&] { ran += 'c'; });
      cudaEventRecord(join, other);
      if (joins) CHECK(cudaStreamWaitEvent(origin, join, 0) == cudaSuccess);
      gpu_double::enqueue(origin, [&] { ran += 'd'; });
    });
  };
  CHECK(noting(false) == cudaErrorStreamCaptureUnjoined);
  REQUIRE(noting(true) == cudaSuccess);
  CHECK(ran.empty());
  cudaGraphExec_t ready = nullptr;
  REQUIRE(cudaGraphInstantiate(&ready, noted, 0) == cudaSuccess);
  std::map<std::string, int> orders;
  for (int i = 0; i < 40; ++i) {
    ran.clear();
    REQUIRE(cudaGraphLaunch(ready, other) == cudaSuccess);
    cudaStreamSynchronize(other);
    ++orders[ran];
  }
  CHECK(orders.size() == 2);
  CHECK(orders["abcd"] > 0);
  CHECK(orders["acbd"] > 0);
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(noted);
}

TEST_CASE("a capture: calls that end it, by whom they are made") {
  cudaStream_t const on = new_stream(), other = new_stream();
  cudaEvent_t const event = new_event(), outside = new_event();
  cudaEventRecord(outside, other);
  cudaGraph_t noted = nullptr;
  void* memory = nullptr;
  auto const fails = [&](cudaError_t wanted, std::function<cudaError_t()> const& call) {
    cudaError_t said = cudaSuccess;
    CHECK(captured(on, noted, [&] { said = call(); }) == cudaErrorStreamCaptureInvalidated);
    CHECK(said == wanted);
  };
  fails(cudaErrorStreamCaptureUnsupported, [&] { return cudaMalloc(&memory, 512); });
  fails(cudaErrorStreamCaptureUnsupported, [&] { return cudaStreamSynchronize(on); });
  fails(cudaErrorStreamCaptureUnsupported, [&] { return cudaEventQuery(outside); });
  fails(cudaErrorStreamCaptureIsolation, [&] { return cudaStreamWaitEvent(on, outside, 0); });
  // Other threads may make these calls, and this thread in relaxed capture mode.
  CHECK(captured(on, noted, [&] {
          std::thread([&] {
            CHECK(cudaMalloc(&memory, 512) == cudaSuccess);
            CHECK(cudaFree(memory) == cudaSuccess);
            CHECK(cudaEventQuery(outside) != cudaErrorStreamCaptureUnsupported);
          }).join();
          cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
          cudaThreadExchangeStreamCaptureMode(&mode);
          CHECK(cudaMalloc(&memory, 512) == cudaSuccess);
          cudaThreadExchangeStreamCaptureMode(&mode);
          cudaEventRecord(event, on);
          std::thread([&] { CHECK(cudaEventQuery(event) == cudaErrorCapturedEvent); }).join();
        }) == cudaSuccess);
  cudaGraphDestroy(noted);
  cudaFree(memory);
  REQUIRE(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  std::thread([&] { CHECK(cudaStreamEndCapture(on, &noted) == cudaErrorStreamCaptureWrongThread); }).join();
  CHECK(cudaStreamEndCapture(on, &noted) == cudaSuccess);
  cudaGraphDestroy(noted);
}

TEST_CASE("tensors of different devices in one operator are refused, with the devices") {
  auto const on = [](int gpu) { return at::TensorOptions(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu))); };
  at::Tensor const zero = at::ones({3, 3}, on(0)), one = at::ones({3, 3}, on(1)), host = at::ones({3, 3});
  at::Tensor const of_zero = at::full({}, 2, on(0)), of_one = at::full({}, 2, on(1)), of_host = at::full({}, 2.0F);
  at::Tensor const row = at::ones({3}, on(0)), places = at::ones({3}, at::kLong);
  auto const refused = [](std::string const& first, std::string const& other, std::function<void()> const& call) {
    std::string said = "nothing";
    try {
      call();
    } catch (c10::Error const& e) {
      said = e.what_without_backtrace();
    }
    INFO(said);
    CHECK(said.find("Expected all tensors to be on the same device") != std::string::npos);
    CHECK(said.find(first) != std::string::npos);
    CHECK(said.find(other) != std::string::npos);
  };
  refused("cuda:0", "cuda:1", [&] { zero + one; });
  refused("cuda:0", "cpu", [&] { zero + host; });
  refused("cuda:0", "cpu", [&] { host + zero; });
  refused("cuda:0", "cpu", [&] { zero.clone().add_(host); });
  refused("cuda:0", "cuda:1", [&] { zero + of_one; });  // without dimensions, but of another GPU
  refused("cuda:0", "cuda:1", [&] { at::mm(zero, one); });
  refused("cuda:0", "cpu", [&] { at::addmm(row, zero, host); });
  refused("cuda:0", "cuda:1", [&] { at::linear(zero, one); });
  refused("cuda:0", "cuda:1", [&] { at::cat({zero, one}); });
  refused("cuda:0", "cpu", [&] { at::embedding(zero, places); });
  refused("cuda:0", "cpu", [&] { at::mse_loss(zero, host); });
  refused("cuda:0", "cpu", [&] { zero.index_select(0, places); });
  CHECK_THROWS_WITH(at::index(zero, {places.to(one.device())}),
                    doctest::Contains("on the same device as the indexed tensor (cuda:0)"));
  refused("cuda:0", "cpu", [&] {
    at::Tensor into = at::zeros({});  // the operator writes it
    at::add_out(into, of_zero, of_zero);
  });
  refused("cuda:0", "cuda:1", [&] { at::_foreach_add(std::vector{zero, one}, std::vector{zero, zero}); });
  refused("cuda:0", "cuda:1", [&] { at::_foreach_mul(std::vector{zero}, of_one); });

  // As LibTorch allows them.
  auto const is = [](at::Tensor const& t, double value) { CHECK(at::equal(t.cpu(), at::full({3, 3}, value, t.dtype()))); };
  is(zero + of_host, 3);
  is(of_host - zero, 1);
  is(zero + of_zero, 3);
  is(at::where(zero > 0, of_host, zero), 2);
  is(zero.masked_fill(zero > 0, of_host), 2);
  is(zero.clone().fill_(of_host), 2);
  is(at::index(zero, {places}), 1);
  is(at::index_put(zero, {at::arange(3)}, of_host), 2);
  is(at::empty({3, 3}, on(1)).copy_(zero), 1);
  is(zero.to(one.device()) + one, 2);
  auto const pairs = at::_foreach_add(std::vector{zero, one}, std::vector{zero, one});
  is(pairs[0], 2);
  is(pairs[1], 2);
  CHECK(pairs[1].device() == one.device());
  is(at::_foreach_mul(std::vector{zero}, of_host)[0], 2);
}
