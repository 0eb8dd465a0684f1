#pragma once

// One call of an operator: a kernel of the CPU on the device's memory. The operator's schema names the tensors that it reads and
// writes, which the clocks record; where operators run late the kernel runs a second time.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "accelerator/allocator.hpp"
#include "accelerator/device.hpp"
#include "accelerator/late.hpp"
#include "support/tensors_in.hpp"

namespace accelerator {

inline bool is_ours(at::Tensor const& t) { return t.defined() && t.is_privateuseone(); }

/// Kernels of the CPU are called without the modes that have had their turn on the device's operator.
struct below {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard draws{c10::DispatchKey::DeferredInit};
};

inline void note(int index, std::string_view name, std::span<touched const> parts) {
  std::vector<touched> real;
  std::copy_if(parts.begin(), parts.end(), std::back_inserter(real), [](touched const& p) { return p.block != nullptr; });
  detector::instance().run(current_stream(index), name, real);
}

inline void host_waits(int index) { host_waits_for(index, current_stream(index)); }

inline bool runs_late() { return late_streams::instance().on(); }
/// Asks the current stream of a device for something that is to run late.
inline void later(int index, late_streams::work does) {
  if (runs_late()) late_streams::instance().add(current_stream(index), std::move(does));
}
/// A tensor for an operator that runs late: a copy of a tensor in main memory, with its content of now.
inline at::Tensor for_later(at::Tensor const& t) { return t.defined() && t.is_cpu() ? t.clone() : late_alias(t); }

inline void copy_bytes(at::Tensor const& to, at::Tensor const& from) {
  std::int64_t last = 0;
  for (std::int64_t d = 0; d < to.dim(); ++d) last += (to.size(d) - 1) * to.stride(d);
  if (to.numel() > 0)
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), static_cast<std::size_t>(last + 1) * to.element_size());
}

/// One call of an operator.
struct operator_call {
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

  operator_call(c10::OperatorHandle const& of, torch::jit::Stack& on)
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
      if (writes) parts.push_back(part_of(t, false));  // in place: the old content is read, too
      parts.push_back(part_of(t, writes));
    }
    return in_main_memory;
  }

  void bring_arguments() {
    auto const& arguments = op.schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue& value = stack[first + i];
      auto const* const marks = arguments[i].alias_info();
      // Batch norm does not say in its schema that it changes these.
      std::string const& name = arguments[i].name();
      bool const writes = (marks != nullptr && marks->isWrite()) || name == "running_mean" || name == "running_var";
      if (!late.empty()) late[i] = tensors_in::replaced(value, for_later);
      if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
        value = tensors_in::replaced(value, [&](at::Tensor const& t) { return alias(t, writes); });
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

  /// The device's tensor for a result of the CPU kernel: in new memory, or in the memory of the tensor that the result views.
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

  /// Runs the kernel again when the stream reaches it, on the memory's content at that time.
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

}  // namespace accelerator
