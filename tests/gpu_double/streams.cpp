// CUDA's streams, events and copies, also within a capture. A stream is a thread.
#include "gpu_double/double.hpp"
#include "gpu_double/stream.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

namespace {

using gpu_double::capture, gpu_double::mark;

/// Of the process. Never destroyed: streams may run until the very end.
struct state {
  std::mutex mutex;
  std::condition_variable passed;  // of marks
  std::vector<CUstream_st*> streams;
  std::array<CUstream_st*, 16> legacy{};
  std::array<std::mutex, 16> launches;  // by device: held by calls that keep other threads from it
};
state& all() {
  static auto* const one = new state;
  return *one;
}

/// Does the copies of one kind that a process asks of a device in the order of the calls, whatever their streams: a copy whose
/// stream waits holds up the copies of other streams. CUDA promises no more. Whether GPUs do so is not known; two rank threads on
/// an H200 (driver 580) waited for each other where this model does (docs/reference/gpu-runs.md).
class copy_queue {
 public:
  static copy_queue& of(int device, cudaMemcpyKind kind) {
    static auto& all = *new std::array<copy_queue, 16 * 5>;
    return all.at(static_cast<std::size_t>(device) * 5 + static_cast<std::size_t>(kind));
  }
  std::size_t ask() {
    std::lock_guard const hold(mutex_);
    return asked_++;
  }
  void take(std::size_t number, auto const& copy) {
    std::unique_lock hold(mutex_);
    changed_.wait(hold, [&] { return done_ == number; });
    copy();
    ++done_;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t asked_ = 0, done_ = 0;
};

std::shared_ptr<mark> last_of(cudaEvent_t event) {
  std::lock_guard const hold(event->mutex);
  return event->last;
}

/// The error of a query of an event that was recorded in a capture: only streams of that capture may wait for the event.
cudaError_t state_of(mark const* asked) {
  if (asked != nullptr && asked->within != nullptr) return cudaErrorCapturedEvent;
  if (cudaError_t const wrong = gpu_double::used(); wrong != cudaSuccess) return wrong;
  std::lock_guard const hold(all().mutex);
  return asked == nullptr || asked->passed ? cudaSuccess : cudaErrorNotReady;
}

void add_once(std::vector<std::size_t>& to, std::vector<std::size_t> const& more) {
  for (std::size_t const each : more) {
    if (std::find(to.begin(), to.end(), each) == to.end()) to.push_back(each);
  }
}

}  // namespace

void CUstream_st::run() {
  std::unique_lock hold(mutex);
  while (true) {
    changed.wait(hold, [&] { return !asked.empty(); });
    auto const work = std::move(asked.front());
    asked.pop_front();
    busy = true;
    hold.unlock();
    work();
    hold.lock();
    busy = false;
    changed.notify_all();
  }
}

namespace gpu_double {

CUstream_st& stream_of(cudaStream_t stream) {
  if (stream != nullptr && stream != cudaStreamLegacy && stream != cudaStreamPerThread) return *stream;
  std::lock_guard const hold(all().mutex);
  CUstream_st*& of_device = all().legacy[static_cast<std::size_t>(current_device())];
  if (of_device == nullptr) of_device = new CUstream_st(current_device());
  return *of_device;
}

int device_of(cudaStream_t stream) { return stream_of(stream).device; }
int priority_of(cudaStream_t stream) { return stream_of(stream).priority; }
cudaError_t may_launch(cudaStream_t stream) {
  return device_of(stream) == current_device() ? cudaSuccess : fails(cudaErrorInvalidResourceHandle);
}

/// Operations that a stream takes; the call that asks for one more waits until the stream has come on (seen on an H200, driver
/// 580: bench/gpu/calls_that_wait.py).
constexpr std::size_t queue_length = 1020;

void enqueue(cudaStream_t stream, std::function<void()> work) {
  CUstream_st& s = stream_of(stream);
  {
    std::lock_guard const hold(captures());
    if (s.part_of != nullptr) {
      graph& nodes = s.part_of->nodes;
      nodes.push_back({std::move(work), std::exchange(s.last, {nodes.size()})});
      return;
    }
  }
  { std::lock_guard const of_process(all().launches[static_cast<std::size_t>(s.device)]); }
  std::unique_lock hold(s.mutex);
  s.changed.wait(hold, [&] { return s.asked.size() < queue_length; });
  if (!std::exchange(s.has_thread, true)) {
    {
      std::lock_guard const list(all().mutex);
      all().streams.push_back(&s);
    }
    std::thread([&s] { s.run(); }).detach();
  }
  s.asked.push_back(std::move(work));
  s.changed.notify_all();
}

void drain(cudaStream_t stream) {
  CUstream_st& s = stream_of(stream);
  std::unique_lock hold(s.mutex);
  s.changed.wait(hold, [&] { return s.asked.empty() && !s.busy; });
}
void drain_within_call(cudaStream_t stream) {
  std::lock_guard const of_process(all().launches[static_cast<std::size_t>(stream_of(stream).device)]);
  drain(stream);
}

namespace {
void drain_those(auto const& wanted) {
  std::vector<CUstream_st*> streams;
  {
    std::lock_guard const list(all().mutex);
    streams = all().streams;
  }
  for (CUstream_st* const s : streams) {
    if (wanted(*s)) drain(s);
  }
}
}  // namespace
void drain_device(int device) {
  drain_those([device](CUstream_st const& s) { return s.device == device; });
}
void drain_all() {
  drain_those([](CUstream_st const&) { return true; });
}

}  // namespace gpu_double

using gpu_double::captures, gpu_double::capture_of, gpu_double::enqueue, gpu_double::fails, gpu_double::stream_of,
    gpu_double::unsafe, gpu_double::used;

extern "C" {

// ---- Copies -----------------------------------------------------------------------------------------------------------------

cudaError_t cudaMemcpyAsync(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  bool const reads_host = kind == cudaMemcpyHostToDevice, writes_host = kind == cudaMemcpyDeviceToHost;
  // Memory that is not pinned goes through a buffer: the call comes back when the copy no longer needs it ("API synchronization
  // behavior" of the runtime's reference).
  if (reads_host && !gpu_double::is_pinned(from)) {
    auto const kept = std::make_shared<std::vector<char>>(static_cast<char const*>(from), static_cast<char const*>(from) + bytes);
    enqueue(stream, [to, kept] { std::memcpy(to, kept->data(), kept->size()); });
    return used();
  }
  bool const waits = writes_host && !gpu_double::is_pinned(to);
  if (waits && gpu_double::is_captured(stream)) return gpu_double::waits_for_captured(stream);
  if (gpu_double::is_captured(stream)) {
    enqueue(stream, [to, from, bytes] { std::memcpy(to, from, bytes); });
    return used();
  }
  copy_queue& queue = copy_queue::of(gpu_double::device_of(stream), kind);
  enqueue(stream, [&queue, number = queue.ask(), to, from, bytes] { queue.take(number, [&] { std::memcpy(to, from, bytes); }); });
  if (waits) gpu_double::drain_within_call(stream);
  return used();
}
cudaError_t cudaMemcpy(void* to, void const* from, std::size_t bytes, cudaMemcpyKind kind) {
  if (cudaError_t const wrong = unsafe(); wrong != cudaSuccess) return wrong;
  cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  gpu_double::drain(nullptr);
  return cudaSuccess;
}

// ---- Streams ----------------------------------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned, int priority) {
  *out = new CUstream_st(gpu_double::current_device(), priority);
  return used();
}
// "The function will return immediately and the resources associated with stream will be released automatically once the device
// has completed all work": here they stay.
cudaError_t cudaStreamDestroy(cudaStream_t) { return used(); }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (gpu_double::is_captured(stream)) return gpu_double::waits_for_captured(stream);
  if (cudaError_t const wrong = unsafe(); wrong != cudaSuccess) return wrong;
  CUstream_st& s = stream_of(stream);
  std::lock_guard const hold(s.mutex);
  return s.asked.empty() && !s.busy ? cudaSuccess : fails(cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (gpu_double::is_captured(stream)) return gpu_double::waits_for_captured(stream);
  if (cudaError_t const wrong = unsafe(); wrong != cudaSuccess) return wrong;
  gpu_double::drain(stream);
  return used();
}

// ---- Events -----------------------------------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  *out = new CUevent_st(gpu_double::current_device());
  return used();
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return used();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  CUstream_st& on = stream_of(stream);
  // "Event and stream must be on the same device."
  if (on.device != event->device) return fails(cudaErrorInvalidResourceHandle);
  auto const now = std::make_shared<mark>();
  bool captured = false;
  {
    std::lock_guard const hold(captures());
    captured = on.part_of != nullptr;
    if (captured) {
      now->within = on.part_of;
      now->after = on.last;
    }
  }
  {
    std::lock_guard const hold(event->mutex);
    event->last = now;
  }
  if (captured) return used();
  enqueue(stream, [now] {
    std::lock_guard const hold(all().mutex);
    now->passed = true;
    now->when = std::chrono::steady_clock::now();
    all().passed.notify_all();
  });
  return used();
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }

// A stream that waits for an event of a capture becomes part of that capture; one that is captured waits for nothing else
// (runtime reference, cudaStreamWaitEvent; programming guide, "Cross-stream dependencies and events").
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  auto const asked = last_of(event);
  CUstream_st& on = stream_of(stream);
  {
    std::lock_guard const hold(captures());
    auto const from = asked == nullptr ? nullptr : asked->within;
    if (on.part_of != nullptr && asked != nullptr && from != on.part_of) {
      on.part_of->invalid = true;
      if (from != nullptr && !from->ended) from->invalid = true;
      return fails(from != nullptr ? cudaErrorStreamCaptureMerge : cudaErrorStreamCaptureIsolation);
    }
    if (from != nullptr) {
      if (from->ended) return fails(cudaErrorCapturedEvent);
      if (on.part_of == nullptr) {
        on.part_of = from;
        from->joined.push_back(&on);
      }
      add_once(on.last, asked->after);
      return used();
    }
  }
  if (asked == nullptr) return used();  // never recorded: done
  enqueue(stream, [asked] {
    std::unique_lock hold(all().mutex);
    all().passed.wait(hold, [&] { return asked->passed; });
  });
  return used();
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (cudaError_t const wrong = unsafe(); wrong != cudaSuccess) return wrong;
  cudaError_t const now = state_of(last_of(event).get());
  return now == cudaSuccess ? now : fails(now);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (cudaError_t const wrong = unsafe(); wrong != cudaSuccess) return wrong;
  auto const asked = last_of(event);
  if (state_of(asked.get()) == cudaErrorCapturedEvent) return fails(cudaErrorCapturedEvent);
  std::unique_lock hold(all().mutex);
  all().passed.wait(hold, [&] { return asked == nullptr || asked->passed; });
  return used();
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  if (from->device != to->device) return fails(cudaErrorInvalidResourceHandle);
  auto const a = last_of(from), b = last_of(to);
  if (a == nullptr || b == nullptr) return fails(cudaErrorInvalidResourceHandle);
  for (mark const* const each : {a.get(), b.get()}) {
    if (cudaError_t const now = state_of(each); now != cudaSuccess) return fails(now);
  }
  *milliseconds = std::chrono::duration<float, std::milli>(b->when - a->when).count();
  return cudaSuccess;
}
}
