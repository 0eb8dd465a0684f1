// NCCL, as far as Chevron calls it, between processes and between threads of one. Ranks of a communicator meet in a piece of
// shared memory that is called after its id; a kernel is work on its stream that ends when its peers' have met it.
//
// The rules, by where they stand in NCCL 2.28's user guide and sources:
//   joining       "ncclCommInitRankConfig": comes back when all ranks have come; in a communicator that does not block at once
//   blocking      group.cc, groupLaunch: a group comes back when its kernels are on their streams. One of communicators that do
//                 not block comes back in progress, always: a thread of NCCL makes missing connections and puts the
//                 kernels on the streams later (groupLaunchNonBlocking)
//   in progress   "ncclCommGetAsyncError": while it says ncclInProgress no other call may be made on the communicator, save abort
//   connecting    enqueue.cc, transport.cc: a way between two ranks is connected when it is first used, and the kernel is put on
//                 the stream only then; a collective's when all ranks have come
//   one thread    "Thread safety": two threads must not call on one communicator at a time; beside one in a call of a
//                 communicator that blocks another may ask for errors, which reads flags (init.cc, ncclCommGetAsyncError)
//   abort         init.cc, ncclCommAbort: says at once that all is to stop, in a group, too, and a call that blocks comes back.
//                 Then commReclaim frees memory, at the group's end, which waits for the device: for kernels of other
//                 communicators, too. No other thread may be in a call then
//   freed         a communicator that was aborted or destroyed is gone
//   places        a kernel takes a block of threads for each of its channels, config.maxCTAs at most
//   one GPU       two processes of a communicator on one GPU of one machine are refused (init.cc, "Duplicate GPU detected");
//                 another machine is another NCCL_HOSTID
//   device        of a communicator is the one that was current when it was made; a stream of another one is refused
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "gpu_double/double.hpp"

namespace {

constexpr int most_ranks = 16;
constexpr std::size_t piece = 1 << 15;

/// A message on its way, in pieces: the sender fills, the receiver takes.
struct wire {
  std::atomic<std::uint64_t> filled{0}, taken{0};
  std::uint64_t size = 0;
  std::array<char, piece> data{};
};

/// The memory that the ranks of a communicator share. Zeros at first.
struct meeting {
  std::atomic<int> joined{0};
  std::atomic<int> connected[most_ranks][most_ranks]{};  // ends of the way from one to another
  std::atomic<std::uint64_t> connects{0}, arrived{0};    // of collectives: ranks that came to connect, or to a barrier
  wire ways[most_ranks][most_ranks];
  std::array<char, piece> parts[most_ranks];
  std::uint64_t machines[most_ranks];
  int devices[most_ranks];
  pid_t processes[most_ranks];
};

void nap() { std::this_thread::sleep_for(std::chrono::microseconds(100)); }

std::atomic<gpu_double::fault> armed{gpu_double::fault::none};
bool strikes(gpu_double::fault what) { return armed.compare_exchange_strong(what, gpu_double::fault::none); }
/// A call that is to fail (`gpu_double::fail_next`).
struct failing_call {
  std::mutex mutex;
  std::string function, text;
  int result = 0, device = -1;
  static failing_call& here() {
    static auto* const one = new failing_call;
    return *one;
  }
};
ncclResult_t planned(std::string const& function) { return static_cast<ncclResult_t>(gpu_double::planned(function)); }
std::atomic<int> alive{0}, running{0};
/// Communicators that are joined and not yet freed.
struct joined_ones {
  std::mutex mutex;
  std::set<ncclComm const*> all;
  static joined_ones& here() {
    static auto* const one = new joined_ones;
    return *one;
  }
};
/// The machine of this process, as NCCL distinguishes machines.
std::uint64_t machine() {
  char const* const told = std::getenv("NCCL_HOSTID");
  return std::hash<std::string>{}(told == nullptr ? "this one" : told);
}

}  // namespace

struct ncclComm {
  std::string name;
  int rank = 0, size = 0, device = 0, blocks = 0;
  bool blocks_host = false;
  meeting* at = nullptr;
  std::atomic<ncclResult_t> state{ncclInProgress};
  std::atomic<bool> told_to_stop{false}, gone{false}, finalized{false};
  std::atomic<int> inside{0}, kernels{0};
  std::uint64_t barriers = 0, connects = 0;  // of collectives
  bool collectives_connected = false;
  std::array<bool, most_ranks> sends{}, receives{};  // ways that are connected
  std::thread background;
};

namespace {

char const* const guide = "NCCL user guide";

void check_alive(ncclComm const& c, char const* call) {
  if (c.gone) gpu_double::broken(std::string(call) + " on a communicator that was aborted or destroyed", guide);
}
void check_idle(ncclComm const& c, char const* call) {
  check_alive(c, call);
  if (c.state == ncclInProgress)
    gpu_double::broken(std::string(call) + " while the communicator is in progress",
                       std::string(guide) + ", ncclCommGetAsyncError");
}

/// Two threads in calls on one communicator.
class call_on {
 public:
  call_on(ncclComm& c, char const* call) : c_(c) {
    if (c_.inside.fetch_add(1) != 0)
      gpu_double::broken(std::string(call) + " while another thread is in a call on the communicator",
                         std::string(guide) + ", Thread safety");
  }
  ~call_on() { --c_.inside; }
  call_on(call_on const&) = delete;
  call_on& operator=(call_on const&) = delete;

 private:
  ncclComm& c_;
};

/// Until `done` or the communicator is told to stop.
template <class Done>
bool wait_in(ncclComm& c, Done const& done) {
  while (!done()) {
    if (c.told_to_stop) return false;
    nap();
  }
  return true;
}

void in_background(ncclComm& c, std::function<bool()> work) {
  if (c.background.joinable()) c.background.join();
  c.state = ncclInProgress;
  c.background = std::thread([&c, work = std::move(work)] {
    ncclResult_t as_before = ncclInProgress;
    if (work()) c.state.compare_exchange_strong(as_before, ncclSuccess);
  });
}

/// A kernel: put on the stream, takes its places, runs until its peers' have met it.
void launch(ncclComm& c, cudaStream_t on, std::function<bool()> run) {
  ++c.kernels;
  ++running;
  bool const lost = strikes(gpu_double::fault::remote_error), hangs = lost || strikes(gpu_double::fault::kernel_hangs);
  if (lost) c.state = ncclRemoteError;
  gpu_double::enqueue(on, [&c, hangs, priority = gpu_double::priority_of(on), run = std::move(run)] {
    if (gpu_double::take_places(
            c.device, c.blocks, [&c] { return c.told_to_stop.load(); }, priority)) {
      hangs ? wait_in(c, [] { return false; }) : run();
      gpu_double::leave_places(c.device, c.blocks);
    }
    --running;
    --c.kernels;
  });
}

bool send(ncclComm& c, int to, char const* from, std::size_t bytes) {
  wire& w = c.at->ways[c.rank][to];
  for (std::size_t begin = 0; begin < bytes; begin += piece) {
    w.size = bytes;
    std::memcpy(w.data.data(), from + begin, std::min(piece, bytes - begin));
    ++w.filled;
    if (!wait_in(c, [&] { return w.taken == w.filled; })) return false;
  }
  return true;
}
bool receive(ncclComm& c, int from, char* into, std::size_t bytes) {
  wire& w = c.at->ways[from][c.rank];
  for (std::size_t begin = 0; begin < bytes; begin += piece) {
    // A receive of another size than the send is undefined in NCCL; here the receive waits.
    if (!wait_in(c, [&] { return w.filled > w.taken && w.size == bytes; })) return false;
    std::memcpy(into + begin, w.data.data(), std::min(piece, bytes - begin));
    ++w.taken;
  }
  return true;
}

bool barrier(ncclComm& c) {
  ++c.at->arrived;
  std::uint64_t const all = ++c.barriers * static_cast<std::uint64_t>(c.size);
  return wait_in(c, [&] { return c.at->arrived >= all; });
}

template <class T>
void add(char* into, char const* other, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes / sizeof(T); ++i) {
    T a, b;
    std::memcpy(&a, into + i * sizeof(T), sizeof(T));
    std::memcpy(&b, other + i * sizeof(T), sizeof(T));
    a = static_cast<T>(a + b);
    std::memcpy(into + i * sizeof(T), &a, sizeof(T));
  }
}
using sum_of_two = void (*)(char*, char const*, std::size_t);
std::pair<sum_of_two, std::size_t> sum_for(ncclDataType_t type) {
  switch (type) {
    case ncclFloat32:
      return {add<float>, 4};
    case ncclFloat64:
      return {add<double>, 8};
    case ncclFloat16:
      return {add<c10::Half>, 2};
    case ncclBfloat16:
      return {add<c10::BFloat16>, 2};
    default:
      return {add<std::uint8_t>, 1};
  }
}

/// In pieces: every rank lays out its own, and takes all of them, in the order of ranks.
template <class Take>
bool in_pieces(ncclComm& c, char const* mine, std::size_t bytes, Take const& take) {
  for (std::size_t begin = 0; begin < bytes; begin += piece) {
    std::size_t const n = std::min(piece, bytes - begin);
    std::memcpy(c.at->parts[c.rank].data(), mine + begin, n);
    if (!barrier(c)) return false;
    for (int r = 0; r < c.size; ++r) take(r, begin, c.at->parts[r].data(), n);
    if (!barrier(c)) return false;
  }
  return true;
}

// ---- Groups -----------------------------------------------------------------------------------------------------------------

struct asked {
  ncclComm* on;
  cudaStream_t stream;
  bool collective;
  int to = -1, from = -1;
  std::function<bool()> run;
};
struct group {
  int depth = 0;
  std::vector<asked> calls;
  std::vector<ncclComm*> aborts;
};
thread_local group here;

/// Makes the connections of a call at their first use; false if the communicator was aborted.
bool connect(ncclComm& c, asked const& a) {
  if (a.collective) {
    if (std::exchange(c.collectives_connected, true)) return true;
    ++c.at->connects;
    std::uint64_t const all = ++c.connects * static_cast<std::uint64_t>(c.size);
    return wait_in(c, [&] { return c.at->connects >= all; });
  }
  bool const sends = a.to >= 0;
  auto& known = sends ? c.sends[static_cast<std::size_t>(a.to)] : c.receives[static_cast<std::size_t>(a.from)];
  if (std::exchange(known, true)) return true;
  auto& ends = sends ? c.at->connected[c.rank][a.to] : c.at->connected[a.from][c.rank];
  ++ends;
  return wait_in(c, [&] { return ends >= 2; });
}

/// Starts a communicator's calls of one group: makes missing connections, then puts the kernel on the stream.
ncclResult_t start(ncclComm& c, std::vector<asked> calls) {
  auto const work = [&c, calls = std::move(calls)] {
    if (!std::all_of(calls.begin(), calls.end(), [&c](asked const& a) { return connect(c, a); })) return false;
    launch(c, calls.front().stream,
           [calls] { return std::all_of(calls.begin(), calls.end(), [](asked const& a) { return a.run(); }); });
    return true;
  };
  if (c.blocks_host) return work() ? ncclSuccess : ncclInternalError;
  in_background(c, [work] {
    thread_local std::minstd_rand chance(std::random_device{}());
    std::this_thread::sleep_for(std::chrono::microseconds(chance() % 500));  // NCCL's thread comes when it comes
    return work();
  });
  return ncclInProgress;
}

/// Frees the memory of an aborted communicator, after waiting for the device.
void reclaim(ncclComm& c) {
  if (c.background.joinable()) c.background.join();
  if (c.inside != 0)
    gpu_double::broken("a communicator is freed while another thread is in a call on it", "init.cc, commReclaim");
  gpu_double::drain_device(c.device);
  {
    std::lock_guard const hold(joined_ones::here().mutex);
    joined_ones::here().all.erase(&c);
  }
  c.gone = true;
  --alive;
}

}  // namespace

namespace gpu_double {
void arm(fault next) { armed = next; }
void fail_next(std::string const& function, int result, std::string const& text, int device) {
  failing_call& next = failing_call::here();
  std::lock_guard const hold(next.mutex);
  next.function = function;
  next.text = text;
  next.result = result;
  next.device = device;
}
int planned(std::string const& function) {
  failing_call& next = failing_call::here();
  std::lock_guard const hold(next.mutex);
  if (next.function != function) return 0;
  int device = 0;
  cudaGetDevice(&device);
  if (next.device >= 0 && next.device != device) return 0;
  next.function.clear();
  return next.result;
}
int communicators() { return alive; }
int kernels() { return running; }
std::vector<channel> channels() {
  std::lock_guard const hold(joined_ones::here().mutex);
  std::vector<channel> out;
  for (ncclComm const* const c : joined_ones::here().all) out.push_back({c->name, c->blocks});
  return out;
}
}  // namespace gpu_double

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* out) {
  if (auto const wrong = planned("ncclGetUniqueId"); wrong != ncclSuccess) return wrong;
  static std::atomic<int> made{0};
  std::memset(out, 0, sizeof *out);
  std::snprintf(out->internal, sizeof out->internal, "/nccl-double-%d-%d", static_cast<int>(::getpid()), ++made);
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* out, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (size < 1 || size > most_ranks || rank < 0 || rank >= size) return ncclInvalidArgument;
  if (auto const wrong = planned("ncclCommInitRankConfig"); wrong != ncclSuccess) return wrong;
  if (strikes(gpu_double::fault::system_error)) return ncclSystemError;
  int const file = ::shm_open(id.internal, O_CREAT | O_RDWR, 0600);
  if (file < 0 || ::ftruncate(file, sizeof(meeting)) != 0) return ncclSystemError;
  void* const memory = ::mmap(nullptr, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (memory == MAP_FAILED) return ncclSystemError;
  auto const given = [](int value, int else_value) { return value == NCCL_CONFIG_UNDEF_INT ? else_value : value; };
  auto* const c = new ncclComm;
  c->rank = rank;
  c->size = size;
  c->at = static_cast<meeting*>(memory);
  cudaGetDevice(&c->device);
  c->blocks = config == nullptr ? 32 : given(config->maxCTAs, 32);
  char const* const told = std::getenv("NCCL_COMM_BLOCKING");  // comes before the program's wish (init.cc, envConfigOverride)
  c->blocks_host = told != nullptr ? std::atoi(told) != 0 : config == nullptr || given(config->blocking, 1) == 1;
  if (config != nullptr && config->commName != nullptr) c->name = config->commName;
  ++alive;
  {
    std::lock_guard const hold(joined_ones::here().mutex);
    joined_ones::here().all.insert(c);
  }
  c->at->machines[rank] = machine();
  c->at->devices[rank] = c->device;
  c->at->processes[rank] = ::getpid();
  auto const join = [c, name = std::string(id.internal)] {
    ++c->at->joined;
    bool all = wait_in(*c, [&] { return c->at->joined >= c->size; });
    if (c->rank == 0) ::shm_unlink(name.c_str());
    meeting const& at = *c->at;
    for (int r = 0; r < c->size && all; ++r)
      all = at.processes[r] == ::getpid() || at.devices[r] != c->device || at.machines[r] != machine();
    return all;
  };
  if (!c->blocks_host) {
    in_background(*c, join);
    *out = c;
    return ncclInProgress;
  }
  c->state = ncclSuccess;
  call_on const one(*c, "ncclCommInitRankConfig");
  std::atomic_ref(*out).store(c);  // before it is done: so another thread can abort it
  return join() ? ncclSuccess : ncclInternalError;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t* out) {
  check_alive(*c, "ncclCommGetAsyncError");
  if (auto const wrong = planned("ncclCommGetAsyncError on " + c->name); wrong != ncclSuccess) c->state = wrong;
  if (c->blocks_host) {
    *out = c->state;
    return ncclSuccess;
  }
  call_on const one(*c, "ncclCommGetAsyncError");
  nap();  // so that two threads that may meet here do
  *out = c->state;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t c) {
  check_idle(*c, "ncclCommFinalize");
  call_on const one(*c, "ncclCommFinalize");
  c->finalized = true;
  auto const ended = [c] { return wait_in(*c, [&] { return c->kernels == 0; }); };
  if (c->blocks_host) return ended() ? ncclSuccess : ncclInternalError;
  in_background(*c, ended);
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t c) {
  check_idle(*c, "ncclCommDestroy");
  if (!c->finalized)
    gpu_double::broken("ncclCommDestroy without ncclCommFinalize, which would wait here",
                       std::string(guide) + ", ncclCommDestroy");
  reclaim(*c);
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t c) {
  check_alive(*c, "ncclCommAbort");
  c->told_to_stop = true;
  if (here.depth > 0) {
    here.aborts.push_back(c);
    return ncclSuccess;
  }
  reclaim(*c);
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++here.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (here.depth == 0) gpu_double::broken("ncclGroupEnd without ncclGroupStart", guide);
  if (--here.depth > 0) return ncclSuccess;
  auto const aborts = std::exchange(here.aborts, {});
  auto calls = std::exchange(here.calls, {});
  for (ncclComm* const c : aborts) reclaim(*c);
  if (calls.empty()) return ncclSuccess;
  if (strikes(gpu_double::fault::call_hangs)) {
    while (true) nap();
  }
  if (auto const wrong = planned("ncclGroupEnd"); wrong != ncclSuccess) return wrong;
  if (strikes(gpu_double::fault::system_error)) return ncclSystemError;
  ncclComm& c = *calls.front().on;
  for (asked const& a : calls) {
    if (a.on != &c || a.stream != calls.front().stream)
      gpu_double::broken("a group of several communicators or streams", "not in this double");
  }
  if (gpu_double::device_of(calls.front().stream) != c.device) return ncclUnhandledCudaError;
  if (gpu_double::is_captured(calls.front().stream))
    gpu_double::broken("a kernel of NCCL within a capture", "not in this double");
  call_on const one(c, "ncclGroupEnd");
  return start(c, std::move(calls));
}

ncclResult_t ncclSend(void const* from, std::size_t count, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t stream) {
  check_idle(*c, "ncclSend");
  if (auto const wrong = planned("ncclSend"); wrong != ncclSuccess) return wrong;
  if (here.depth == 0) gpu_double::broken("ncclSend outside of a group", "not in this double");
  std::size_t const bytes = count * sum_for(type).second;
  auto const* const begin = static_cast<char const*>(from);
  here.calls.push_back(
      {.on = c, .stream = stream, .collective = false, .to = peer, .run = [=] { return send(*c, peer, begin, bytes); }});
  return ncclSuccess;
}
ncclResult_t ncclRecv(void* into, std::size_t count, ncclDataType_t type, int peer, ncclComm_t c, cudaStream_t stream) {
  check_idle(*c, "ncclRecv");
  if (auto const wrong = planned("ncclRecv"); wrong != ncclSuccess) return wrong;
  if (here.depth == 0) gpu_double::broken("ncclRecv outside of a group", "not in this double");
  std::size_t const bytes = count * sum_for(type).second;
  auto* const begin = static_cast<char*>(into);
  here.calls.push_back(
      {.on = c, .stream = stream, .collective = false, .from = peer, .run = [=] { return receive(*c, peer, begin, bytes); }});
  return ncclSuccess;
}
ncclResult_t ncclAllReduce(void const* from, void* into, std::size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c,
                           cudaStream_t stream) {
  check_idle(*c, "ncclAllReduce");
  if (auto const wrong = planned("ncclAllReduce"); wrong != ncclSuccess) return wrong;
  if (op != ncclSum || here.depth == 0)
    gpu_double::broken("ncclAllReduce of another kind than sums in groups", "not in this double");
  auto const [sum, width] = sum_for(type);
  auto const* const mine = static_cast<char const*>(from);
  auto* const out = static_cast<char*>(into);
  here.calls.push_back({.on = c, .stream = stream, .collective = true, .run = [=, sum = sum, bytes = count * width] {
                          return in_pieces(*c, mine, bytes, [=](int r, std::size_t begin, char const* part, std::size_t n) {
                            r == 0 ? static_cast<void>(std::memcpy(out + begin, part, n)) : sum(out + begin, part, n);
                          });
                        }});
  return ncclSuccess;
}
ncclResult_t ncclReduce(void const* from, void* into, std::size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t c, cudaStream_t stream) {
  check_idle(*c, "ncclReduce");
  if (auto const wrong = planned("ncclReduce"); wrong != ncclSuccess) return wrong;
  if (op != ncclSum || here.depth == 0)
    gpu_double::broken("ncclReduce of another kind than sums in groups", "not in this double");
  auto const [sum, width] = sum_for(type);
  auto const* const mine = static_cast<char const*>(from);
  auto* const out = static_cast<char*>(into);
  here.calls.push_back({.on = c, .stream = stream, .collective = true, .run = [=, sum = sum, bytes = count * width] {
                          return in_pieces(*c, mine, bytes, [=](int r, std::size_t begin, char const* part, std::size_t n) {
                            if (c->rank != root) return;
                            r == 0 ? static_cast<void>(std::memcpy(out + begin, part, n)) : sum(out + begin, part, n);
                          });
                        }});
  return ncclSuccess;
}
ncclResult_t ncclBroadcast(void const* from, void* into, std::size_t count, ncclDataType_t type, int root, ncclComm_t c,
                           cudaStream_t stream) {
  check_idle(*c, "ncclBroadcast");
  if (auto const wrong = planned("ncclBroadcast"); wrong != ncclSuccess) return wrong;
  if (here.depth == 0) gpu_double::broken("ncclBroadcast outside of a group", "not in this double");
  std::size_t const bytes = count * sum_for(type).second;
  auto const* const mine = static_cast<char const*>(from);
  auto* const out = static_cast<char*>(into);
  here.calls.push_back({.on = c, .stream = stream, .collective = true, .run = [=] {
                          return in_pieces(*c, mine, bytes, [=](int r, std::size_t begin, char const* part, std::size_t n) {
                            if (r == root) std::memcpy(out + begin, part, n);
                          });
                        }});
  return ncclSuccess;
}
ncclResult_t ncclAllGather(void const* from, void* into, std::size_t count, ncclDataType_t type, ncclComm_t c,
                           cudaStream_t stream) {
  check_idle(*c, "ncclAllGather");
  if (auto const wrong = planned("ncclAllGather"); wrong != ncclSuccess) return wrong;
  if (here.depth == 0) gpu_double::broken("ncclAllGather outside of a group", "not in this double");
  std::size_t const bytes = count * sum_for(type).second;
  auto const* const mine = static_cast<char const*>(from);
  auto* const out = static_cast<char*>(into);
  here.calls.push_back({.on = c, .stream = stream, .collective = true, .run = [=] {
                          return in_pieces(*c, mine, bytes, [=](int r, std::size_t begin, char const* part, std::size_t n) {
                            std::memcpy(out + static_cast<std::size_t>(r) * bytes + begin, part, n);
                          });
                        }});
  return ncclSuccess;
}

char const* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error";
    case ncclInternalError:
      return "internal error";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    default:
      return "unhandled system error";
  }
}
// The last error of the process; the communicator is not used (user guide, ncclGetLastError).
char const* ncclGetLastError(ncclComm_t) {
  failing_call& next = failing_call::here();
  std::lock_guard const hold(next.mutex);
  thread_local std::string kept;
  kept = next.function.empty() ? next.text : "";
  return kept.c_str();
}
}
