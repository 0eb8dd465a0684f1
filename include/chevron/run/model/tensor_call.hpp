#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/model/module_kinds.hpp>

/// \file
/// Calls of functions and modules whose arguments and results are tensors, in any number and form.

namespace chevron {

/// A module: `module_pointer`, `script_module`, or a `torch::nn::AnyModule`.
template <class Module>
concept module_handle = module_pointer<Module> || script_module<Module> || requires(Module& module, at::Tensor& t) {
  module.forward(t);
  module.ptr()->named_parameters(true);
};

namespace detail {

inline constexpr std::size_t most_arguments = 8;

template <class T>
struct is_tuple : std::false_type {};
template <class... T>
struct is_tuple<std::tuple<T...>> : std::true_type {};
template <class A, class B>
struct is_tuple<std::pair<A, B>> : std::true_type {};

/// Appends the tensors of a result, depth first: a tensor, an optional, a tuple or a range of these. An empty optional is an
/// undefined tensor, so that later tensors keep their index.
template <class Value>
void flatten(tensors& out, Value&& value) {
  using plain = std::remove_cvref_t<Value>;
  if constexpr (std::is_convertible_v<Value, at::Tensor>) {
    out.push_back(std::forward<Value>(value));
  } else if constexpr (is_tuple<plain>::value) {
    std::apply([&](auto&&... each) { (flatten(out, std::forward<decltype(each)>(each)), ...); }, std::forward<Value>(value));
  } else if constexpr (requires {
                         value.has_value();
                         *value;
                       }) {
    if (value.has_value()) {
      flatten(out, *value);
    } else {
      out.emplace_back();
    }
  } else if constexpr (requires {
                         value.begin();
                         value.end();
                       }) {
    for (auto&& each : value) flatten(out, each);
  } else {
    static_assert(is_tuple<plain>::value, "stages and losses give a tensor, or tuples, optionals or vectors of tensors");
  }
}

template <module_handle Module>
auto module_of(Module const& handle) {
  if constexpr (module_pointer<Module> || script_module<Module>) {
    return handle;
  } else {
    return handle.ptr();
  }
}

/// A module's forward as a callable with the same arguments; not callable if the module has no forward.
template <module_handle Module>
class module_forward {
 public:
  explicit module_forward(Module module) : module_(std::move(module)) {}

  template <class... Tensor, module_pointer Pointer = Module>
  auto operator()(Tensor&&... each) -> decltype(std::declval<Pointer&>()->forward(std::forward<Tensor>(each)...)) {
    return module_->forward(std::forward<Tensor>(each)...);
  }
  tensors operator()(std::span<at::Tensor const> all) requires script_module<Module> {
    tensors given(all.begin(), all.end()), out;
    flatten_value(out, module_.forward(script_values(given)));
    return out;
  }
  template <class... Tensor, class Any = Module>
  requires(!module_pointer<Any> && !script_module<Any>) auto operator()(Tensor&&... each)
      -> decltype(std::declval<Any&>().forward(std::forward<Tensor>(each)...)) {
    return module_.forward(std::forward<Tensor>(each)...);
  }

 private:
  Module module_;
};

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

/// Whether a function takes a span. Evaluated last: only compiling its body with a span shows that of a generic lambda.
template <class Function>
constexpr bool takes_a_span() {
  if constexpr (takes_any_count<Function>()) {
    return false;
  } else {
    return std::is_invocable_v<Function&, std::span<at::Tensor const>>;
  }
}

/// Whether `flatten` takes a result. \tparam Result of a call
template <class Result>
constexpr bool is_of_tensors() {
  using plain = std::remove_cvref_t<Result>;
  if constexpr (std::is_convertible_v<Result, at::Tensor>) {
    return true;
  } else if constexpr (is_tuple<plain>::value) {
    return []<std::size_t... I>(std::index_sequence<I...>) { return (is_of_tensors<std::tuple_element_t<I, plain>>() && ...); }
    (std::make_index_sequence<std::tuple_size_v<plain>>{});
  } else if constexpr (requires(plain & value) { value.has_value(), *value; }) {
    return is_of_tensors<decltype(*std::declval<plain&>())>();
  } else if constexpr (requires(plain & value) { value.begin(), value.end(); }) {
    return is_of_tensors<decltype(*std::declval<plain&>().begin())>();
  } else {
    return false;
  }
}
template <class Function, std::size_t... I>
constexpr bool gives_tensors(std::index_sequence<I...>) {
  if constexpr (takes<Function>(std::index_sequence<I...>{})) {
    return is_of_tensors<std::invoke_result_t<Function&, tensor_reference<I>...>>();
  } else {
    return true;
  }
}
/// Whether a function of tensors returns tensors, for each number of arguments that it takes.
template <class Function>
constexpr bool gives_tensors() {
  if constexpr (takes_a_span<Function>()) {
    return is_of_tensors<std::invoke_result_t<Function&, std::span<at::Tensor const>>>();
  } else {
    return []<std::size_t... Count>(std::index_sequence<Count...>) {
      return (gives_tensors<Function>(std::make_index_sequence<Count>{}) && ...);
    }
    (std::make_index_sequence<most_arguments + 1>{});
  }
}

/// The callable of a stage or a loss: the argument, or a module's forward.
template <class Callable>
auto callee_of(Callable callable) {
  if constexpr (module_handle<Callable>) {
    return module_forward<Callable>(std::move(callable));
  } else {
    return callable;
  }
}

/// Whether a callable or module can be a stage or a loss. If not, a static_assert says why, before errors of LibTorch or the
/// standard library.
template <class Callable>
constexpr bool can_be_called() {
  using callee = decltype(callee_of(std::declval<Callable>()));
  constexpr bool takes_them = takes_any_count<callee>() || takes_a_span<callee>();
  static_assert(
      takes_them || !module_handle<Callable>,
      "this module's forward takes something other than tensors, or is not known (torch::nn::Module itself has none): use "
      "the holder or std::shared_ptr of the module's own type, torch::nn::AnyModule, or a callable that takes tensors, for a "
      "stage with the module: chevron::stage(module, callable)");
  static_assert(takes_them || module_handle<Callable>,
                "a stage or a loss is a torch::nn module, or a callable that takes up to eight at::Tensor, or all of them as one "
                "std::span<at::Tensor const>");
  if constexpr (takes_them) {
    static_assert(gives_tensors<callee>(),
                  "a stage or a loss gives a tensor, or tuples, optionals or vectors of tensors: a plain number has no graph");
    return gives_tensors<callee>();
  } else {
    return false;
  }
}

/// Calls `function` with the tensors of `arguments`, whose count is known at run time only, and appends its results.
/// \param who the callee, in the error \throws usage_error for a count that `function` does not take
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
        [&]<std::size_t... I>(std::index_sequence<I...>) { flatten(results, function(arguments[I]...)); }
        (std::make_index_sequence<Count>{});
        return;
      }
    }
    call_with<Function, Count + 1>(function, arguments, results, who);
  }
}

/// Finds a side input by name. \param who the callee, in the error
/// \throws usage_error where the batch has no tensor of this name
inline at::Tensor const& side_input_named(std::string const& name, std::span<side_input const> side_inputs,
                                          std::string const& who) {
  std::string known;
  for (side_input const& e : side_inputs) {
    if (e.name == name) return e.value;
    known += (known.empty() ? "" : ", ") + e.name;
  }
  throw usage_error(who + " takes `" + name + "` from the batch, which has " +
                    (known.empty() ? "no such tensors" : "only " + known) + ": give it to step() as a side input");
}

}  // namespace detail

}  // namespace chevron
