// The operators of the simulated device: LibTorch's kernels of the CPU, on the device's memory. What each reads and writes is in
// its schema, and goes to the clocks.

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
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "accelerator/allocator.hpp"
#include "accelerator/device.hpp"
#include "accelerator/fallback.hpp"
#include "accelerator/late.hpp"

namespace accelerator {

namespace {

bool is_ours(at::Tensor const& t) { return t.defined() && t.is_privateuseone(); }

/// Kernels of the CPU are called without the modes that have had their turn on the device's operator.
struct below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard draws{c10::DispatchKey::DeferredInit};
};

void note(int index, std::string_view name, std::span<touched const> parts) {
  std::vector<touched> real;
  std::copy_if(parts.begin(), parts.end(), std::back_inserter(real), [](touched const& p) { return p.block != nullptr; });
  detector::instance().run(current_stream(index), name, real);
}

void host_waits(int index) { host_waits_for(index, current_stream(index)); }

bool runs_late() { return late_streams::instance().on(); }
/// Asks the current stream of a device for something that is to run late.
void later(int index, late_streams::work does) {
  if (runs_late()) late_streams::instance().add(current_stream(index), std::move(does));
}
/// As an operator sees it that runs late: what is in main memory it takes as it is now.
at::Tensor for_later(at::Tensor const& t) { return t.defined() && t.is_cpu() ? t.clone() : late_alias(t); }

void copy_bytes(at::Tensor const& to, at::Tensor const& from) {
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < to.dim(); ++d) last += (to.size(d) - 1) * to.stride(d);
  if (to.numel() > 0)
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), static_cast<std::size_t>(last + 1) * to.element_size());
}

/// One call of an operator.
struct call {
  c10::OperatorHandle const& op;
  torch::jit::Stack& stack;
  std::size_t first;                                       // its arguments, on the stack
  int index = -1;                                          // of its device
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases;  // of the device, in main memory
  std::vector<touched> parts;
  std::vector<c10::IValue> given;  // as it was called
  std::vector<c10::IValue> late;   // as it is called late
  std::vector<at::Tensor> made;    // by it, on the device
  bool gives_view = false;

  call(c10::OperatorHandle const& of, torch::jit::Stack& on)
      : op(of),
        stack(on),
        first(on.size() - of.schema().arguments().size()),
        given(on.begin() + static_cast<std::ptrdiff_t>(first), on.end()) {
    if (runs_late()) late = given;
    for (auto const& r : op.schema().returns())
      gives_view = gives_view || (r.alias_info() != nullptr && !r.alias_info()->isWrite());
  }

  at::Tensor alias(at::Tensor const& t, bool writes) {
    if (!is_ours(t)) return t;
    if (index < 0) index = t.device().index();
    at::Tensor const in_main_memory = alias_on_cpu(t);
    aliases.emplace_back(t, in_main_memory);
    if (!gives_view) {
      if (writes) parts.push_back(part_of(t, false));  // in place: what was there is read, too
      parts.push_back(part_of(t, writes));
    }
    return in_main_memory;
  }

  /// The same argument with other tensors.
  template <class Other>
  static c10::IValue each(c10::IValue const& value, Other const& other) {
    if (value.isTensor()) return other(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (at::Tensor const& t : value.toTensorVector()) list.push_back(other(t));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (std::optional<at::Tensor> const& t : value.toOptionalTensorVector()) list.push_back(t ? std::optional(other(*t)) : t);
      return list;
    }
    return value;
  }

  void bring_arguments() {
    auto const& arguments = op.schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = stack[first + i];
      auto const* const marks = arguments[i].alias_info();
      // Batch norm does not say in its schema that it changes these.
      std::string const& name = arguments[i].name();
      bool const writes = (marks != nullptr && marks->isWrite()) || name == "running_mean" || name == "running_var";
      if (!late.empty()) late[i] = each(value, for_later);
      if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
        value = each(value, [&](at::Tensor const& t) { return alias(t, writes); });
      } else if (value.isDevice() && value.toDevice().is_privateuseone()) {
        if (index < 0) index = value.toDevice().has_index() ? value.toDevice().index() : current_device();
        value = c10::Device(at::kCPU);
        if (!late.empty()) late[i] = value;
      }
    }
    if (index < 0) index = current_device();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = stack[first + i];
      if (arguments[i].name() != "generator") continue;
      if (value.isNone())
        value = draw_from(generator_of(index));
      else if (value.toGenerator().device().is_privateuseone())
        value = draw_from(value.toGenerator());
      if (!late.empty()) late[i] = value.toGenerator().clone();
    }
  }

  /// What a kernel of the CPU made, on the device: in memory of its own, or in that of what it is a view of.
  at::Tensor bring_back(at::Tensor const& t) {
    if (!t.defined()) return t;
    for (auto const& [ours, in_main_memory] : aliases) {
      if (t.unsafeGetTensorImpl() == in_main_memory.unsafeGetTensorImpl()) return ours;
      if (t.numel() == 0 || !t.storage().is_alias_of(in_main_memory.storage())) continue;
      TORCH_CHECK(t.dtype() == ours.dtype(), op.schema().name(), " gives a view of another dtype");
      return at::native::as_strided_tensorimpl(ours, t.sizes(), t.strides(), ours.storage_offset() + t.storage_offset());
    }
    c10::DeviceGuard const on(device(index));
    at::Tensor fresh = at::detail::empty_strided_generic(t.sizes(), t.strides(), &device_allocator::instance(),
                                                         c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), t.scalar_type());
    if (t.numel() > 0) {
      touched const part = part_of(fresh, true);
      std::memcpy(fresh.data_ptr(), t.const_data_ptr(), part.end - part.begin);
      parts.push_back(part);
    }
    made.push_back(fresh);
    return fresh;
  }

  void bring_results() {
    auto const& returns = op.schema().returns();
    auto const& arguments = op.schema().arguments();
    std::size_t const begin = stack.size() - returns.size();
    bool numbers = false;
    for (std::size_t i = 0; i < returns.size(); ++i) {
      c10::IValue& value = stack[begin + i];
      if (auto const* const marks = returns[i].alias_info(); marks != nullptr && marks->isWrite()) {
        for (std::size_t a = 0; a < arguments.size(); ++a) {
          if (arguments[a].alias_info() != nullptr && *arguments[a].alias_info() == *marks) value = given[a];
        }
      } else if (value.isTensor()) {
        value = bring_back(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (at::Tensor const& t : value.toTensorVector()) list.push_back(bring_back(t));
        value = list;
      } else {
        numbers = true;
      }
    }
    if (gives_view) return;
    note(index, op.schema().name().substr(6), parts);
    auto const told = std::make_shared<torch::jit::Stack>();
    if (runs_late()) run_later(numbers ? told : nullptr);
    if (!numbers) return;
    host_waits(index);
    for (std::size_t i = 0; i < told->size(); ++i) {
      if (!(*told)[i].isTensor()) stack[begin + i] = (*told)[i];
    }
  }

  /// Once more, when the stream comes to it, on what is in memory then.
  void run_later(std::shared_ptr<torch::jit::Stack> const& told) {
    std::vector<at::Tensor> into;
    for (at::Tensor const& t : made) into.push_back(late_alias(t));
    later(index, [which = op, what = std::move(late), into = std::move(into), told] {
      torch::jit::Stack values(what.begin(), what.end());
      {
        below const quietly;
        which.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
      }
      std::size_t next = 0;
      auto const keep = [&](at::Tensor const& t) {
        if (t.defined() && next < into.size()) copy_bytes(into[next++], t);
      };
      for (std::size_t i = 0; i < values.size(); ++i) {
        auto const* const marks = which.schema().returns()[i].alias_info();
        if (marks != nullptr && marks->isWrite()) continue;
        if (values[i].isTensor()) keep(values[i].toTensor());
        if (!values[i].isTensorList()) continue;
        for (at::Tensor const& t : values[i].toTensorVector()) keep(t);
      }
      if (told) *told = std::move(values);
    });
  }
};

/// A kernel of the CPU in place of the device's.
void compute_on_cpu(c10::OperatorHandle const& op, torch::jit::Stack* stack) {
  call now(op, *stack);
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
at::Tensor as_strided(at::Tensor const& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional(offset->expect_int()) : std::nullopt);
}
at::Tensor view(at::Tensor const& t, c10::SymIntArrayRef size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }

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
    aten.impl("as_strided", &as_strided);
    aten.impl("view", &view);
    aten.impl("resize_", &resize);
    aten.impl("_copy_from", &copy_from);
    aten.impl("_copy_from_and_resize", &copy_from_and_resize);
    aten.impl("record_stream", &record_stream);
    aten.impl("_has_compatible_shallow_copy_type", &compatible);
    aten.impl("native_dropout", &native_dropout);
    aten.impl("native_dropout_backward", &native_dropout_backward);
    // What has a kernel of the CPU takes it, and not what LibTorch would compose for an unknown device: for the sake of equal
    // bits.
    auto& dispatcher = c10::Dispatcher::singleton();
    for (c10::OperatorName const& name : dispatcher.getAllOpNames()) {
      std::string const full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
      auto const op = dispatcher.findSchema(name);
      if (!op || !name.name.starts_with("aten::") || std::find(std::begin(own), std::end(own), full) != std::end(own)) continue;
      if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
        aten.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&compute_on_cpu>());
    }
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
