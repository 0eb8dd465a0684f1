#pragma once

// LibTorch's operators for the devices of tests, computed by LibTorch's kernels of the CPU.

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace cpu_operators {

inline at::Tensor as_strided(at::Tensor const& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                             std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional(offset->expect_int()) : std::nullopt);
}
inline at::Tensor view(at::Tensor const& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}

/// Registers `Compute` for every operator that has a CPU kernel. LibTorch would compose some of these for an unknown device
/// from other operators, with other bits. Also for every operator that LibTorch composes on the CPU and, where libtorch_cuda is
/// loaded, computes by a kernel of CUDA (`_foreach_add_`).
/// \param own names of operators that the device computes itself
template <void (*Compute)(c10::OperatorHandle const&, torch::jit::Stack*)>
void register_all(torch::Library& aten, std::span<std::string_view const> own) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (c10::OperatorName const& name : dispatcher.getAllOpNames()) {
    std::string const full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    auto const op = dispatcher.findSchema(name);
    if (!op || !name.name.starts_with("aten::") || std::find(own.begin(), own.end(), full) != own.end()) continue;
    bool const composed = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    bool const of_cuda = op->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
    if (of_cuda && name.name == "aten::set_") continue;  // exchanges storages, and launches nothing
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU) || (composed && of_cuda))
      aten.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<Compute>());
  }
}

}  // namespace cpu_operators
