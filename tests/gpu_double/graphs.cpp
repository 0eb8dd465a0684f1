// CUDA's graphs: captures, their rules, and launches. Rules by the programming guide, "CUDA graphs", "Creating a graph using
// stream capture", and the runtime's reference.
#include "gpu_double/double.hpp"
#include "gpu_double/stream.hpp"

#include <algorithm>
#include <atomic>
#include <random>
#include <utility>

using gpu_double::capture, gpu_double::captures, gpu_double::fails, gpu_double::graph, gpu_double::node, gpu_double::stream_of,
    gpu_double::used;

struct CUgraph_st {
  graph nodes;
};
struct CUgraphExec_st {
  int device;
  std::shared_ptr<graph const> nodes;
  std::shared_ptr<std::mutex> running;  // launches of one graph run one after the other
};

namespace {

/// Captures under way.
std::vector<std::shared_ptr<capture>>& under_way() {
  static auto* const all = new std::vector<std::shared_ptr<capture>>;
  return *all;
}
thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

/// Runs nodes in a random order in which each node comes after the nodes that it waits for: a program that relies on the order
/// of the capture fails.
void run(graph const& nodes, unsigned seed) {
  std::mt19937 chance(seed);
  std::vector<std::size_t> waits(nodes.size()), ready;
  std::vector<std::vector<std::size_t>> next(nodes.size());
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    waits[i] = nodes[i].after.size();
    for (std::size_t const before : nodes[i].after) next[before].push_back(i);
    if (waits[i] == 0) ready.push_back(i);
  }
  while (!ready.empty()) {
    std::swap(ready[chance() % ready.size()], ready.back());
    std::size_t const now = ready.back();
    ready.pop_back();
    nodes[now].work();
    for (std::size_t const after : next[now]) {
      if (--waits[after] == 0) ready.push_back(after);
    }
  }
}

/// Whether all nodes that come last on a stream lead to one of those that come last on the origin.
bool leads_to(graph const& nodes, std::vector<std::size_t> const& last, std::vector<std::size_t> const& origin) {
  std::vector<bool> before(nodes.size());
  std::vector<std::size_t> left = origin;
  while (!left.empty()) {
    std::size_t const now = left.back();
    left.pop_back();
    if (before[now]) continue;
    before[now] = true;
    left.insert(left.end(), nodes[now].after.begin(), nodes[now].after.end());
  }
  return std::all_of(last.begin(), last.end(), [&](std::size_t each) { return before[each]; });
}

}  // namespace

namespace gpu_double {

std::mutex& captures() {
  static auto* const one = new std::mutex;
  return *one;
}

cudaError_t unsafe() {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  std::lock_guard const hold(captures());
  cudaError_t out = cudaSuccess;
  for (auto const& each : under_way()) {
    bool const mine = each->owner == std::this_thread::get_id() && each->mode != cudaStreamCaptureModeRelaxed;
    bool const of_all = mode_of_thread == cudaStreamCaptureModeGlobal && each->mode == cudaStreamCaptureModeGlobal;
    if (!mine && !of_all) continue;
    each->invalid = true;
    out = cudaErrorStreamCaptureUnsupported;
  }
  return out == cudaSuccess ? out : fails(out);
}

std::shared_ptr<capture> capture_of(cudaStream_t stream) {
  CUstream_st const& s = stream_of(stream);
  std::lock_guard const hold(captures());
  return s.part_of;
}
bool is_captured(cudaStream_t stream) { return capture_of(stream) != nullptr; }
cudaError_t waits_for_captured(cudaStream_t stream) {
  auto const of = capture_of(stream);
  std::lock_guard const hold(captures());
  if (of != nullptr) of->invalid = true;
  return fails(cudaErrorStreamCaptureUnsupported);
}

}  // namespace gpu_double

extern "C" {

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  if (stream == nullptr || stream == cudaStreamLegacy) return fails(cudaErrorStreamCaptureUnsupported);
  static std::atomic<unsigned long long> made{0};
  CUstream_st& s = stream_of(stream);
  std::lock_guard const hold(captures());
  if (s.part_of != nullptr) return fails(cudaErrorIllegalState);
  auto const now = std::make_shared<capture>();
  now->id = ++made;
  now->origin = &s;
  now->owner = std::this_thread::get_id();
  now->mode = mode;
  s.part_of = now;
  s.last.clear();
  under_way().push_back(now);
  return used();
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* out) {
  *out = nullptr;
  CUstream_st& s = stream_of(stream);
  std::lock_guard const hold(captures());
  auto const now = s.part_of;
  if (now == nullptr) return fails(cudaErrorIllegalState);
  if (now->origin != &s) return fails(cudaErrorStreamCaptureUnmatched);
  if (now->mode != cudaStreamCaptureModeRelaxed && now->owner != std::this_thread::get_id())
    return fails(cudaErrorStreamCaptureWrongThread);
  bool joined = true;
  for (cudaStream_t const each : now->joined) {
    joined = joined && leads_to(now->nodes, each->last, s.last);
    each->part_of = nullptr;
    each->last.clear();
  }
  now->ended = true;
  s.part_of = nullptr;
  s.last.clear();
  std::erase(under_way(), now);
  if (now->invalid) return fails(cudaErrorStreamCaptureInvalidated);
  if (!joined) return fails(cudaErrorStreamCaptureUnjoined);
  *out = new CUgraph_st{std::move(now->nodes)};
  return used();
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* out) {
  auto const of = gpu_double::capture_of(stream);
  std::lock_guard const hold(captures());
  *out = of == nullptr ? cudaStreamCaptureStatusNone
         : of->invalid ? cudaStreamCaptureStatusInvalidated
                       : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* out, unsigned long long* id, cudaGraph_t*,
                                     cudaGraphNode_t const**, cudaGraphEdgeData const**, std::size_t*) {
  auto const of = gpu_double::capture_of(stream);
  if (id != nullptr) *id = of == nullptr ? 0 : of->id;
  return cudaStreamIsCapturing(stream, out);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t from, unsigned long long) {
  *out = new CUgraphExec_st{gpu_double::current_device(), std::make_shared<graph const>(from->nodes),
                            std::make_shared<std::mutex>()};
  return used();
}
cudaError_t cudaGraphDestroy(cudaGraph_t one) {
  delete one;
  return used();
}
cudaError_t cudaGraphUpload(cudaGraphExec_t one, cudaStream_t stream) {
  return gpu_double::device_of(stream) == one->device ? used() : fails(cudaErrorInvalidResourceHandle);
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t one, cudaStream_t stream) {
  if (gpu_double::device_of(stream) != one->device) return fails(cudaErrorInvalidResourceHandle);
  if (gpu_double::is_captured(stream)) gpu_double::broken("a graph is launched within a capture", "not in this double");
  static std::atomic<unsigned> launches{0};
  gpu_double::enqueue(stream, [nodes = one->nodes, running = one->running, seed = ++launches] {
    std::lock_guard const hold(*running);
    run(*nodes, seed);
  });
  return used();
}
// "If graphExec is in-flight …, it will be destroyed asynchronously on completion."
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t one) {
  delete one;
  return used();
}
}
