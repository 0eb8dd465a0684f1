#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>

/// \file
/// The kinds of modules of which a stage can be made, and functions for all kinds.

namespace chevron {

/// A `torch::nn` module, as a holder (`torch::nn::Linear`) or as a shared pointer to its implementation.
template <class Module>
concept module_pointer = requires(Module& module) {
  module->named_parameters(true);
  module->named_buffers(true);
  module->modules();
  module->train(true);
};

/// A TorchScript module, `torch::jit::Module`, recognized by its members: its headers take seconds to compile, so only files that
/// use such modules include them.
template <class Module>
concept script_module = requires(Module& module, std::vector<c10::IValue> values) {
  { module.forward(values) } -> std::same_as<c10::IValue>;
  module.named_parameters(true);
  module.named_buffers(true);
  module.modules();
  module.train(true);
  { module.is_training() } -> std::same_as<bool>;
};

/// A module: `module_pointer`, `script_module`, or a `torch::nn::AnyModule`.
template <class Module>
concept module_handle = module_pointer<Module> || script_module<Module> || requires(Module& module, at::Tensor& t) {
  module.forward(t);
  module.ptr()->named_parameters(true);
};

namespace detail {

/// Reads and sets the training modes of a module and of each sub-module, so that a sub-module that the user put into evaluation
/// is still in evaluation after the modes are restored.
struct module_mode {
  std::function<std::vector<bool>()> get;             ///< `is_training()` of the module and its sub-modules, parents first
  std::function<void(std::vector<bool> const&)> set;  ///< sets the modes that `get` returned
  std::function<void(bool)> set_all;
};

/// The module to which a pointer or a holder points; a TorchScript module or a `torch::nn::AnyModule` unchanged.
template <class Handle>
auto& module_behind(Handle& handle) {
  if constexpr (module_pointer<Handle>) {
    return *handle;
  } else {
    return handle;
  }
}

/// Returns functions that read and set a module's modes. \param module a pointer, a holder or a TorchScript module
template <class Module>
module_mode mode_of(Module module) {
  module_mode out;
  out.get = [module]() mutable {
    std::vector<bool> modes;
    for (auto&& each : module_behind(module).modules()) modes.push_back(module_behind(each).is_training());
    return modes;
  };
  out.set = [module](std::vector<bool> const& modes) mutable {
    // `train` also sets sub-modules: `modules()` lists parents first, so the mode of each child is set last.
    std::size_t i = 0;
    for (auto&& each : module_behind(module).modules()) {
      if (module_behind(each).is_training() != modes[i]) module_behind(each).train(modes[i]);
      ++i;
    }
  };
  out.set_all = [module](bool training) mutable { module_behind(module).train(training); };
  return out;
}

/// Appends a module's parameters and buffers, by name.
template <class Module>
void list_tensors(Module& module, std::vector<parameter>& parameters, std::vector<parameter>& buffers) {
  if constexpr (script_module<Module>) {
    for (auto const& item : module.named_parameters(true)) parameters.push_back({item.name, item.value});
    for (auto const& item : module.named_buffers(true)) buffers.push_back({item.name, item.value});
  } else {
    for (auto const& item : module->named_parameters(true)) parameters.push_back({item.key(), item.value()});
    for (auto const& item : module->named_buffers(true)) buffers.push_back({item.key(), item.value()});
  }
}

/// Converts tensors to arguments of a TorchScript module: None for an undefined tensor. Moves from `values`.
inline std::vector<c10::IValue> script_values(tensors& values) {
  std::vector<c10::IValue> out;
  for (at::Tensor& t : values) out.push_back(t.defined() ? c10::IValue(std::move(t)) : c10::IValue());
  return out;
}

/// Appends the tensors of a TorchScript value, depth first; an undefined tensor for None.
/// \throws usage_error for a value of another type
inline void flatten_value(tensors& out, c10::IValue const& value) {
  if (value.isTensor() || value.isNone()) {
    out.push_back(value.isTensor() ? value.toTensor() : at::Tensor());
  } else if (value.isTuple()) {
    for (c10::IValue const& each : value.toTupleRef().elements()) flatten_value(out, each);
  } else if (value.isList()) {
    for (c10::IValue const& each : value.toListRef()) flatten_value(out, each);
  } else {
    throw usage_error("the module's forward gives a value of TorchScript's type " + value.tagKind() +
                      ": a stage gives tensors, None, or tuples and lists of them");
  }
}

}  // namespace detail

}  // namespace chevron
