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

/// \file
/// Calls of what takes and gives tensors, whatever number of them and in whatever form.

namespace chevron {

namespace detail {

inline constexpr std::size_t most_arguments = 8;

template <class T>
struct is_tuple : std::false_type {};
template <class... T>
struct is_tuple<std::tuple<T...>> : std::true_type {};
template <class A, class B>
struct is_tuple<std::pair<A, B>> : std::true_type {};

/// Appends the tensors of a result, depth first: a tensor, an optional, a tuple or a range of such. An empty optional is an
/// undefined tensor, so that what comes after it keeps its place.
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
        [&]<std::size_t... I>(std::index_sequence<I...>) { flatten(results, function(arguments[I]...)); }
        (std::make_index_sequence<Count>{});
        return;
      }
    }
    call_with<Function, Count + 1>(function, arguments, results, who);
  }
}

}  // namespace detail

}  // namespace chevron
