// What LibTorch's CPU build lacks for tensors on CUDA devices: hooks, and operators.
//
// An operator computes at once, on the host, when all that was put on the device's current stream before it is done: as if each
// kernel were awaited. Order between streams is what tests/accelerator looks after; here it is NCCL's calls.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/profiler/stubs/base.h>
#include <torch/library.h>

#include "gpu_double/double.hpp"
#include "support/cpu_operators.hpp"
#include "support/tensors_in.hpp"

// libtorch_cuda's part of c10_cuda, which no header declares.
namespace c10::cuda::_internal {
void setHasPrimaryContext(bool (*ask)(DeviceIndex));
}

namespace {

/// Main memory that counts as pinned. Nothing is kept for later: what streams still read is not followed.
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

/// The CPU's generator under a device's name.
struct generator final : c10::GeneratorImpl {
  explicit generator(c10::DeviceIndex index)
      : GeneratorImpl({at::kCUDA, index}, c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        inside(at::make_generator<at::CPUGeneratorImpl>()) {}
  void set_current_seed(std::uint64_t seed) override { inside.set_current_seed(seed); }
  void set_offset(std::uint64_t) override {}
  std::uint64_t get_offset() const override { return 0; }
  std::uint64_t current_seed() const override { return inside.current_seed(); }
  std::uint64_t seed() override { return inside.seed(); }
  void set_state(c10::TensorImpl const& state) override {
    at::Tensor of_inside = inside.get_state();
    std::memcpy(of_inside.mutable_data_ptr(), state.data(), of_inside.nbytes());
    inside.set_state(of_inside);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inside.get_state().getIntrusivePtr(); }
  generator* clone_impl() const override { return new generator(device().index()); }
  static c10::DeviceType device_type() { return at::kCUDA; }

  at::Generator inside;
};

struct hooks final : at::CUDAHooksInterface {
  explicit hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::cuda::device_count(); }
  c10::DeviceIndex current_device() const override { return c10::cuda::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::cuda::current_device(); }
  bool isPinnedPtr(void const* data) const override { return gpu_double::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory::instance(); }
  at::Generator const& getDefaultGenerator(c10::DeviceIndex index) const override {
    static auto* const all = [] {
      auto* const made = new std::vector<at::Generator>;
      for (c10::DeviceIndex d = 0; d < 16; ++d) made->push_back(at::make_generator<generator>(d));
      return made;
    }();
    return all->at(static_cast<std::size_t>(index < 0 ? c10::cuda::current_device() : index));
  }
};

/// LibTorch's own allocator, over memory of the double. Not before ranks have been forked: it asks CUDA.
c10::Allocator* device_memory() {
  static bool const once = [] {
    c10::cuda::CUDACachingAllocator::init(c10::cuda::device_count());
    return true;
  }();
  static_cast<void>(once);
  return c10::cuda::CUDACachingAllocator::get();
}

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

at::Tensor on_cpu(at::Tensor const& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU).requires_grad(false));
}
/// In memory of the device, which is given out again only as record_stream allows: kernels may still read it when it is freed.
at::Tensor on_device(at::Tensor const& t, at::Device where) {
  at::Tensor const out = at::empty_strided(t.sizes(), t.strides(), t.options().device(where));
  if (t.numel() > 0) on_cpu(out).copy_(t);
  return out;
}

void await_current_stream() { gpu_double::drain(c10::cuda::getCurrentCUDAStream().stream()); }

void compute_on_cpu(c10::OperatorHandle const& op, torch::jit::Stack* stack) {
  await_current_stream();
  std::size_t const first = stack->size() - op.schema().arguments().size();
  std::vector<std::pair<at::Tensor, at::Tensor>> seen;  // of the device, in main memory
  at::Device where(at::kCUDA, c10::cuda::current_device());
  for (std::size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    value = tensors_in::replaced(value, [&](at::Tensor const& t) {
      at::Tensor const here = on_cpu(t);
      if (t.defined() && t.is_cuda()) {
        where = t.device();
        seen.emplace_back(t, here);
      }
      return here;
    });
    if (value.isDevice() && value.toDevice().is_cuda()) {
      where = value.toDevice();
      value = at::Device(at::kCPU);
    }
    if (value.isGenerator() && value.toGenerator().device().is_cuda())
      value = static_cast<generator*>(value.toGenerator().unsafeGetGeneratorImpl())->inside;
  }
  {
    at::AutoDispatchBelowADInplaceOrView const below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (std::size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    (*stack)[i] = tensors_in::replaced((*stack)[i], [&](at::Tensor const& t) {
      if (!t.defined()) return t;
      for (auto const& [of_device, alias] : seen) {
        if (!alias.is_same(t) && alias.storage().is_alias_of(t.storage()))
          return of_device.as_strided(t.sizes(), t.strides(), of_device.storage_offset() + t.storage_offset());
        if (!alias.is_same(t)) continue;
        if (of_device.sizes() != alias.sizes())
          of_device.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
        return of_device;
      }
      return on_device(t, where);
    });
  }
}

at::Tensor copy_between(at::Tensor const& from, at::Tensor const& to, bool) {
  await_current_stream();
  at::AutoDispatchBelowADInplaceOrView const below;
  on_cpu(to).copy_(on_cpu(from));
  return to;
}
at::Tensor& copy(at::Tensor& to, at::Tensor const& from, bool non_blocking) {
  copy_between(from, to, non_blocking);
  return to;
}
at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device> where, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard const on(where);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_memory(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(type), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device> where, std::optional<bool>) {
  c10::OptionalDeviceGuard const on(where);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(type));
}
void record_stream(at::Tensor& t, c10::Stream stream) {
  c10::cuda::CUDACachingAllocator::recordStream(t.storage().data_ptr(), c10::cuda::CUDAStream(stream));
}

constexpr std::string_view own[] = {"aten::empty.memory_format", "aten::empty_strided", "aten::as_strided",   "aten::view",
                                    "aten::_copy_from",          "aten::copy_",         "aten::record_stream"};

}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, hooks)  // the name that LibTorch asks for
}  // namespace at

void gpu_double::install() {
  c10::cuda::_internal::setHasPrimaryContext([](c10::DeviceIndex) { return true; });
  at::setHostAllocator(at::kCUDA, &pinned_memory::instance());
  static profiler events;
  torch::profiler::impl::registerCUDAMethods(&events);
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("as_strided", &cpu_operators::as_strided);
  aten.impl("view", &cpu_operators::view);
  aten.impl("copy_", &copy);
  aten.impl("_copy_from", &copy_between);
  aten.impl("record_stream", &record_stream);
  cpu_operators::register_all<&compute_on_cpu>(aten, own);
}
