#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/error.hpp>

/// \file
/// A stage: a piece of the model, whatever it is made of.

namespace chevron {

using tensors = std::vector<at::Tensor>;

/// One parameter (a leaf tensor), with its name within its stage.
struct parameter {
  std::string name;
  at::Tensor value;
};

namespace detail {

inline constexpr std::size_t most_arguments = 8;

template <class T>
struct is_tuple : std::false_type {};
template <class... T>
struct is_tuple<std::tuple<T...>> : std::true_type {};
template <class A, class B>
struct is_tuple<std::pair<A, B>> : std::true_type {};

/// Appends the tensors of a result, depth first: a tensor, an optional, a tuple or a range of such.
template <class Value>
void flatten(tensors& out, Value&& value) {
  using plain = std::remove_cvref_t<Value>;
  if constexpr (std::is_convertible_v<Value, at::Tensor>) {
    out.push_back(std::forward<Value>(value));
  } else if constexpr (is_tuple<plain>::value) {
    std::apply([&](auto&&... each) { (flatten(out, std::forward<decltype(each)>(each)), ...); }, std::forward<Value>(value));
  } else if constexpr (requires { value.has_value(); *value; }) {
    if (value.has_value()) flatten(out, *value);
  } else if constexpr (requires { value.begin(); value.end(); }) {
    for (auto&& each : value) flatten(out, each);
  } else {
    static_assert(is_tuple<plain>::value, "a stage gives a tensor, or tuples, optionals or vectors of tensors");
  }
}

template <std::size_t>
using tensor_reference = at::Tensor&;

template <class Function, std::size_t... I>
constexpr bool takes(std::index_sequence<I...>) {
  return std::is_invocable_v<Function&, tensor_reference<I>...>;
}
template <class Function, std::size_t Count = 0>
constexpr bool takes_any_count() {
  if constexpr (Count > most_arguments) {
    return false;
  } else {
    return takes<Function>(std::make_index_sequence<Count>{}) || takes_any_count<Function, Count + 1>();
  }
}

/// Asked last: whether a generic lambda takes a span can only be found out by compiling its body with one.
template <class Function>
constexpr bool takes_a_span() {
  if constexpr (takes_any_count<Function>()) {
    return false;
  } else {
    return std::is_invocable_v<Function&, std::span<at::Tensor const>>;
  }
}

/// Calls `function` with as many tensors as there are; the count is known only now.
template <class Function, std::size_t Count = 0>
void call_with(Function& function, tensors& arguments, tensors& results, std::string const& who) {
  if constexpr (takes_a_span<Function>()) {
    flatten(results, function(std::span<at::Tensor const>(arguments)));
  } else if constexpr (Count > most_arguments) {
    throw usage_error(who + " does not take " + std::to_string(arguments.size()) +
                      " tensors; take that many, or one std::span<at::Tensor const>");
  } else {
    if constexpr (takes<Function>(std::make_index_sequence<Count>{})) {
      if (arguments.size() == Count) {
        [&]<std::size_t... I>(std::index_sequence<I...>) {
          flatten(results, function(arguments[I]...));
        }(std::make_index_sequence<Count>{});
        return;
      }
    }
    call_with<Function, Count + 1>(function, arguments, results, who);
  }
}

}  // namespace detail

/// A `torch::nn` module, as a holder (`torch::nn::Linear`) or as a shared pointer to its implementation.
template <class Module>
concept module_pointer = requires(Module& module) {
  module->named_parameters(true);
  module->train(true);
};

/// A piece of the model as the executor sees it: tensors in, tensors out, parameters. Made of
///
/// - any `torch::nn` module whose `forward` takes tensors and gives a tensor, a tuple or a vector of them;
/// - any callable of that form, with the parameters it uses.
///
/// A stage is a handle: copies share the module and its parameters. Stage 0 takes the microbatch's inputs, every other stage
/// what its predecessor gives; all tensors cross, and every floating-point one gets a gradient back.
class stage {
 public:
  stage() = default;

  template <class Module>
    requires module_pointer<Module>
  stage(Module module) {  // NOLINT: a module is a stage
    for (auto const& item : module->named_parameters(true)) parameters_.push_back({item.key(), item.value()});
    for (auto const& item : module->named_buffers(true)) buffers_.push_back({item.key(), item.value()});
    forward_ = [module](tensors& inputs, tensors& outputs) mutable {
      auto run = [&module](auto&... each) -> decltype(module->forward(each...)) { return module->forward(each...); };
      static_assert(detail::takes_any_count<decltype(run)>() || detail::takes_a_span<decltype(run)>(),
                    "the module's forward takes something other than tensors: wrap it in a callable that takes tensors");
      detail::call_with(run, inputs, outputs, "the module's forward");
    };
    set_training_ = [module](bool training) mutable { module->train(training); };
  }

  template <class Callable>
    requires(!module_pointer<Callable> && !std::same_as<std::remove_cvref_t<Callable>, stage> &&
             (detail::takes_any_count<Callable>() || detail::takes_a_span<Callable>()))
  stage(Callable forward, std::vector<parameter> parameters = {}) : parameters_(std::move(parameters)) {  // NOLINT
    forward_ = [forward = std::move(forward)](tensors& inputs, tensors& outputs) mutable {
      detail::call_with(forward, inputs, outputs, "the stage's callable");
    };
  }

  explicit operator bool() const { return static_cast<bool>(forward_); }

  /// Runs it. `inputs` are handed over: the callable may take them as references and assign to them.
  void forward(tensors& inputs, tensors& outputs) {
    outputs.clear();
    forward_(inputs, outputs);
  }

  /// All parameters, in the order of registration, those that need no gradient included.
  std::vector<parameter> const& parameters() const { return parameters_; }

  /// What forwards may change besides their outputs (running means …), of a module; nothing for a callable.
  std::vector<parameter> const& buffers() const { return buffers_; }

  /// Switches what behaves differently in training (dropout …). Nothing for a callable.
  void training(bool on) {
    if (set_training_) set_training_(on);
  }

 private:
  std::function<void(tensors&, tensors&)> forward_;
  std::function<void(bool)> set_training_;
  std::vector<parameter> parameters_;
  std::vector<parameter> buffers_;
};

/// Adds the parameters of a module used inside a callable stage.
template <module_pointer Module>
void append_parameters(std::vector<parameter>& parameters, std::string const& prefix, Module module) {
  for (auto const& item : module->named_parameters(true)) parameters.push_back({prefix + item.key(), item.value()});
}

}  // namespace chevron
