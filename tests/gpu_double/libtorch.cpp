// Parts for CUDA devices that LibTorch's CPU build lacks: hooks, pinned memory, the profiler's events, names of pools.
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/MemPool.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/profiler/stubs/base.h>

#include "gpu_double/double.hpp"
#include "gpu_double/libtorch.hpp"

// libtorch_cuda's part of c10_cuda, which no header declares.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*ask)(DeviceIndex));
}

namespace {

/// Main memory that counts as pinned. Freed at once, even if a stream still reads it.
struct pinned_memory final : at::HostAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const memory = c10::GetCPUAllocator()->raw_allocate(bytes);
    if (memory != nullptr) gpu_double::pin(memory, bytes);
    return {memory, memory, raw_deleter(), at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void* memory) {
      if (memory == nullptr) return;
      gpu_double::unpin(memory);
      c10::GetCPUAllocator()->raw_deallocate(memory);
    };
  }
  void copy_data(void* to, void const* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  static pinned_memory& instance() {
    static pinned_memory one;
    return one;
  }
};

struct hooks final : at::CUDAHooksInterface {
  explicit hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return gpu_double::has_context(device); }
  c10::DeviceIndex deviceCount() const override { return c10::cuda::device_count(); }
  c10::DeviceIndex current_device() const override { return c10::cuda::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::cuda::current_device(); }
  bool isPinnedPtr(void const* data) const override { return gpu_double::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory::instance(); }
  at::Generator const& getDefaultGenerator(c10::DeviceIndex index) const override {
    static auto* const all = [] {
      auto* const made = new std::vector<at::Generator>;
      for (c10::DeviceIndex d = 0; d < 16; ++d) made->push_back(at::make_generator<gpu_double::generator>(d));
      return made;
    }();
    return all->at(static_cast<std::size_t>(index < 0 ? c10::cuda::current_device() : index));
  }
};

/// The profiler's events: CUDA's, on the current stream.
struct profiler final : torch::profiler::impl::ProfilerStubs {
  using handle = torch::profiler::impl::ProfilerVoidEventStub;
  void record(c10::DeviceIndex* device, handle* event, std::int64_t*) const override {
    cudaEvent_t made = nullptr;
    cudaEventCreateWithFlags(&made, cudaEventDefault);
    *event = std::shared_ptr<CUevent_st>(made, [](cudaEvent_t e) { cudaEventDestroy(e); });
    if (device != nullptr) *device = c10::cuda::current_device();
    cudaEventRecord(made, c10::cuda::getCurrentCUDAStream().stream());
  }
  float elapsed(handle const* from, handle const* to) const override {
    float out = 0;
    auto const a = static_cast<cudaEvent_t>(from->get()), b = static_cast<cudaEvent_t>(to->get());
    cudaEventSynchronize(a);
    cudaEventSynchronize(b);
    cudaEventElapsedTime(&out, a, b);
    return out * 1000;
  }
  void mark(char const*) const override {}
  void rangePush(char const*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> op) const override { op(0); }
  void synchronize() const override { gpu_double::drain_all(); }
};

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, hooks)  // the name that LibTorch asks for

cuda::MempoolId_t cuda::MemPool::graph_pool_handle(bool of_user) {
  static std::atomic<CaptureId_t> made{0};
  CaptureId_t const now = ++made;
  return of_user ? MempoolId_t{0, now} : MempoolId_t{now, 0};
}
}  // namespace at

void gpu_double::install() {
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex device) { return gpu_double::has_context(device); });
  at::setHostAllocator(at::kCUDA, &pinned_memory::instance());
  static profiler events;
  torch::profiler::impl::registerCUDAMethods(&events);
  register_operators();
}

std::optional<at::Generator> gpu_double::host_generator(at::Generator const& given, c10::DeviceIndex) {
  if (!given.defined()) return {};
  return static_cast<generator*>(given.unsafeGetGeneratorImpl())->inside;
}
