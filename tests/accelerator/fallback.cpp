// The operators of the simulated device, which are LibTorch's kernels of the CPU (operator_call.hpp).

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/set_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "accelerator/allocator.hpp"
#include "accelerator/device.hpp"
#include "accelerator/fallback.hpp"
#include "accelerator/late.hpp"
#include "accelerator/operator_call.hpp"
#include "support/cpu_operators.hpp"

namespace accelerator {

namespace {

/// A kernel of the CPU in place of the device's.
void compute_on_cpu(c10::OperatorHandle const& op, torch::jit::Stack* stack) {
  operator_call now(op, *stack);
  now.bring_arguments();
  {
    below const quietly;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  now.bring_results();
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<c10::Device> where, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard const on(where);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator::instance(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<c10::Device> where, std::optional<bool>) {
  c10::OptionalDeviceGuard const on(where);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           &device_allocator::instance(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
void copy_late(at::Tensor const& to, at::Tensor const& from) {
  below const quietly;
  at::Tensor(to).copy_(from);
}

/// Between devices it is put on the current stream of the one that is read, behind both current streams, as LibTorch does on
/// GPUs.
at::Tensor copy_from(at::Tensor const& from, at::Tensor const& to, bool non_blocking) {
  {
    below const quietly;
    alias_on_cpu(to).copy_(alias_on_cpu(from));
  }
  auto& known = detector::instance();
  std::vector<touched> parts;
  if (is_ours(from)) parts.push_back(part_of(from, false));
  if (is_ours(to)) parts.push_back(part_of(to, true));
  if (is_ours(from) && is_ours(to) && from.device() != to.device()) {
    int const source = current_stream(from.device().index()), target = current_stream(to.device().index());
    auto& late = late_streams::instance();
    known.wait(source, known.now(target));
    late.wait(source, late.now(target));
    note(from.device().index(), "copy to another device", parts);
    later(from.device().index(), [a = late_alias(to), b = late_alias(from)] { copy_late(a, b); });
    known.wait(target, known.now(source));
    late.wait(target, late.now(source));
    return to;
  }
  int const index = (is_ours(from) ? from : to).device().index();
  note(index, is_ours(from) && is_ours(to) ? "copy_" : is_ours(to) ? "copy from main memory" : "copy to main memory", parts);
  if (is_ours(to))
    later(index, [a = late_alias(to), b = for_later(from)] { copy_late(a, b); });
  else
    later(index, [a = to, b = late_alias(from)] { copy_late(a, b); });
  // Without pinned memory a copy to the host waits in any case.
  if (!is_ours(from) ? !non_blocking : !is_ours(to)) host_waits(index);
  return to;
}

at::Tensor const& resize(at::Tensor const& t, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto const size = C10_AS_INTARRAYREF_SLOW(sizes);
  auto* const impl = t.unsafeGetTensorImpl();
  std::size_t const bytes = static_cast<std::size_t>(c10::multiply_integers(size)) * t.element_size();
  auto& storage = *impl->unsafe_storage().unsafeGetStorageImpl();
  if (bytes > storage.nbytes()) {
    c10::DeviceGuard const on(t.device());
    c10::DataPtr fresh = device_allocator::instance().allocate(bytes);
    TORCH_CHECK(!runs_late() || storage.nbytes() == 0, "resize_ of a tensor with contents does not run late");
    if (storage.nbytes() > 0) std::memcpy(fresh.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
  impl->set_sizes_contiguous(size);
  return t;
}
at::Tensor copy_from_and_resize(at::Tensor const& from, at::Tensor const& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// Lets modules move here: LibTorch thinks of its own devices only.
bool compatible(at::Tensor const&, at::Tensor const&) { return true; }

void record_stream(at::Tensor& t, c10::Stream stream) {
  device_allocator::instance().recordStream(t.storage().data_ptr(), stream);
}

// A device drops units in one operator, the CPU in three: here with the CPU's arithmetic, so that results are equal bit for bit.
std::tuple<at::Tensor, at::Tensor> native_dropout(at::Tensor const& input, double share, std::optional<bool> train) {
  if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, at::kBool)};
  at::Tensor const noise = at::empty_like(input).bernoulli_(1 - share);
  at::Tensor const kept = noise.to(at::kBool);
  return {input * noise.div_(1 - share), kept};
}
at::Tensor native_dropout_backward(at::Tensor const& gradient, at::Tensor const& kept, double scale) {
  return gradient * kept.to(gradient.scalar_type()).div_(1 / scale);
}

constexpr std::string_view own[] = {"aten::empty.memory_format",
                                    "aten::empty_strided",
                                    "aten::as_strided",
                                    "aten::view",
                                    "aten::resize_",
                                    "aten::_copy_from",
                                    "aten::record_stream",
                                    "aten::native_dropout",
                                    "aten::native_dropout_backward",
                                    "aten::_copy_from_and_resize",
                                    "aten::copy_",
                                    "aten::_reshape_alias"};

}  // namespace

void install_operators() {
  static bool const done = [] {
    static torch::Library rest(torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    rest.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
    static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    aten.impl("empty.memory_format", &empty);
    aten.impl("empty_strided", &empty_strided);
    aten.impl("as_strided", &cpu_operators::as_strided);
    aten.impl("view", &cpu_operators::view);
    aten.impl("resize_", &resize);
    aten.impl("_copy_from", &copy_from);
    aten.impl("_copy_from_and_resize", &copy_from_and_resize);
    aten.impl("record_stream", &record_stream);
    aten.impl("_has_compatible_shallow_copy_type", &compatible);
    aten.impl("native_dropout", &native_dropout);
    aten.impl("native_dropout_backward", &native_dropout_backward);
    cpu_operators::register_all<&compute_on_cpu>(aten, own);
    return true;
  }();
  static_cast<void>(done);
}

// Under autocast the CPU's lists, as far as tests need them.
using at::autocast::CastPolicy;
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

}  // namespace accelerator
