#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

/// \file
/// Maps a model's names of tensors to those of a folder of weights.

namespace chevron {

/// Maps a model's name of a tensor to the folder's; by default both are equal.
///
/// - Pairs: a name of the model, or its beginning up to a dot, and its replacement. The longest matching beginning is used; ""
///   matches all names. `{{"block_3", "model.layers.3"}}` maps `block_3.mlp.weight` to `model.layers.3.mlp.weight`.
/// - A function of the name, or, if names repeat from stage to stage, of the stage's number and the name. An empty result means
///   that the folder lacks this tensor: it is neither loaded nor saved.
class weight_names {
 public:
  using pairs = std::vector<std::pair<std::string, std::string>>;

  weight_names() : weight_names(pairs{}) {}
  weight_names(std::initializer_list<std::pair<std::string, std::string>> all) : weight_names(pairs(all)) {}  // NOLINT
  weight_names(pairs all)                                                                                     // NOLINT
      : name_([all = std::move(all)](std::size_t, std::string const& name) { return replaced(all, name); }) {}
  template <std::invocable<std::string const&> Function>
  weight_names(Function of_name)  // NOLINT
      : name_([of_name = std::move(of_name)](std::size_t, std::string const& name) -> std::string { return of_name(name); }) {}
  template <std::invocable<std::size_t, std::string const&> Function>
  weight_names(Function of_stage_and_name) : name_(std::move(of_stage_and_name)) {}  // NOLINT

  /// The folder's name of a tensor. \param stage the stage's number; 0 for a module that is no stage \param name the model's name
  std::string operator()(std::size_t stage, std::string const& name) const { return name_(stage, name); }

 private:
  static std::string replaced(pairs const& all, std::string const& name) {
    std::pair<std::string, std::string> const* best = nullptr;
    for (auto const& one : all) {
      bool const fits = one.first.empty() || name == one.first || name.starts_with(one.first + ".");
      if (fits && (best == nullptr || one.first.size() > best->first.size())) best = &one;
    }
    if (best == nullptr) return name;
    std::string rest = name.substr(best->first.size());
    if (rest.starts_with(".")) rest.erase(0, 1);
    return best->second.empty() || rest.empty() ? best->second + rest : best->second + "." + rest;
  }

  std::function<std::string(std::size_t, std::string const&)> name_;
};

}  // namespace chevron
