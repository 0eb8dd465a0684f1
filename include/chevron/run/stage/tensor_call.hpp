#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/module_kinds.hpp>

/// \file
/// Calls functions and modules whose arguments and results are tensors, in any number, also in tuples, optionals and ranges.

namespace chevron {

namespace detail {

inline constexpr std::size_t most_arguments = 8;

template <class Value>
concept tuple_like = requires {
  std::tuple_size<Value>::value;
};
template <class Value>
concept optional_like = requires(Value& value) {
  value.has_value();
  *value;
};
template <class Value>
concept range_like = requires(Value& value) {
  value.begin();
  value.end();
};

/// Appends the tensors of a result to `out`, depth first. A result is a tensor, or an optional, a tuple or a range of results.
/// For an empty optional, appends an undefined tensor, so that later tensors' indices do not change.
template <class Value>
void flatten(tensors& out, Value&& value) {
  using plain = std::remove_cvref_t<Value>;
  if constexpr (std::is_convertible_v<Value, at::Tensor>) {
    out.push_back(std::forward<Value>(value));
  } else if constexpr (tuple_like<plain>) {
    std::apply([&](auto&&... each) { (flatten(out, std::forward<decltype(each)>(each)), ...); }, std::forward<Value>(value));
  } else if constexpr (optional_like<plain>) {
    value.has_value() ? flatten(out, *value) : out.push_back(at::Tensor());
  } else {
    for (auto&& each : value) flatten(out, each);
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

/// A callable with the arguments of a module's forward; not callable if the module has no forward.
template <module_handle Module>
class module_forward {
 public:
  explicit module_forward(Module module) : module_(std::move(module)) {}

  template <class... Tensor, class Handle = Module>
  requires(!script_module<Handle>) auto operator()(Tensor&&... each)
      -> decltype(module_behind(std::declval<Handle&>()).forward(std::forward<Tensor>(each)...)) {
    return module_behind(module_).forward(std::forward<Tensor>(each)...);
  }
  tensors operator()(std::span<at::Tensor const> all) requires script_module<Module> {
    tensors given(all.begin(), all.end()), out;
    flatten_value(out, module_.forward(detail::script_values(given)));
    return out;
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

/// Whether `see(std::make_index_sequence<n>())` is true for an n from 0 to `most_arguments`.
template <class See>
constexpr bool any_count(See const& see) {
  return [&]<std::size_t... Count>(std::index_sequence<Count...>) { return (see(std::make_index_sequence<Count>{}) || ...); }
  (std::make_index_sequence<most_arguments + 1>{});
}
template <class Function>
constexpr bool takes_any_count() {
  return any_count([](auto indices) { return takes<Function>(indices); });
}

/// Whether a function takes a span. Evaluated last: for a generic lambda, the compiler must instantiate the body with a span.
template <class Function>
constexpr bool takes_a_span() {
  if constexpr (takes_any_count<Function>()) {
    return false;
  } else {
    return std::is_invocable_v<Function&, std::span<at::Tensor const>>;
  }
}

/// Whether `flatten` accepts a result. \tparam Result type of the result
template <class Result>
constexpr bool is_of_tensors() {
  using plain = std::remove_cvref_t<Result>;
  if constexpr (std::is_convertible_v<Result, at::Tensor>) {
    return true;
  } else if constexpr (tuple_like<plain>) {
    return []<std::size_t... I>(std::index_sequence<I...>) { return (is_of_tensors<std::tuple_element_t<I, plain>>() && ...); }
    (std::make_index_sequence<std::tuple_size_v<plain>>{});
  } else if constexpr (optional_like<plain>) {
    return is_of_tensors<decltype(*std::declval<plain&>())>();
  } else if constexpr (range_like<plain>) {
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
    // Calls a separate function, since in a lambda clang 16 instantiates `if constexpr` branches that are not taken.
    return !any_count([](auto count) { return !gives_tensors<Function>(count); });
  }
}

/// The callable of a stage or a loss: `callable` itself or, if it is a module, the module's forward.
template <class Callable>
auto callee_of(Callable callable) {
  if constexpr (module_handle<Callable>) {
    return module_forward<Callable>(std::move(callable));
  } else {
    return callable;
  }
}

/// Whether a callable or module can be a stage or a loss. If not, a static_assert states the reason, before LibTorch or the
/// standard library report errors.
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

/// A function of tensors that is called with a count of arguments known at run time only.
template <class Function>
class tensor_call {
 public:
  explicit tensor_call(Function function) : function_(std::move(function)) {}

  /// Calls the function with the tensors of `arguments`; appends the tensors of its result to `results`.
  /// \returns whether the function takes so many tensors; if not, it was not called
  bool operator()(tensors& arguments, tensors& results) {
    if constexpr (takes_a_span<Function>()) {
      flatten(results, function_(std::span<at::Tensor const>(arguments)));
      return true;
    } else {
      return [&]<std::size_t... Count>(std::index_sequence<Count...>) {
        return (call(arguments, results, std::make_index_sequence<Count>{}) || ...);
      }
      (std::make_index_sequence<most_arguments + 1>{});
    }
  }

 private:
  /// Calls the function if there are as many arguments as indices `I`, and if the function takes so many.
  template <std::size_t... I>
  bool call(tensors& arguments, tensors& results, std::index_sequence<I...>) {
    if constexpr (takes<Function>(std::index_sequence<I...>{})) {
      if (arguments.size() != sizeof...(I)) return false;
      flatten(results, function_(arguments[I]...));
      return true;
    } else {
      return false;
    }
  }

  Function function_;
};

/// The counts of tensors that a function takes, in words: `2 tensors`, `1 or 2 tensors`.
template <class Function>
std::string counts_taken() {
  std::string out;
  any_count([&]<std::size_t... I>(std::index_sequence<I...>) {
    if constexpr (takes<Function>(std::index_sequence<I...>{})) {
      out += (out.empty() ? "" : " or ") + std::to_string(sizeof...(I));
    }
    return false;
  });
  return out + (out == "1" ? " tensor" : " tensors");
}

/// A count of arguments in words: `1 input`, `2 inputs`.
inline std::string counted(std::size_t count, std::string const& one) {
  return std::to_string(count) + " " + one + (count == 1 ? "" : "s");
}
/// Names in words, after a noun for one or for several: `the side inputs `a`, `b``.
inline std::string named_ones(std::vector<std::string> const& names, std::string const& one, std::string const& several) {
  std::string out = "the " + (names.size() == 1 ? one : several);
  for (std::size_t i = 0; i < names.size(); ++i) out += (i == 0 ? " `" : ", `") + names[i] + "`";
  return out;
}
/// The beginning of an error about a count of arguments: `the callee takes 1 tensor, and 2 were passed: `.
inline std::string wrong_count(std::string const& who, std::string const& takes, std::size_t passed) {
  return who + " takes " + takes + ", and " + std::to_string(passed) + (passed == 1 ? " was passed: " : " were passed: ");
}

/// Finds a side input by name. \param who name of the callee, for the error
/// \throws usage_error if the batch has no side input of this name
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
