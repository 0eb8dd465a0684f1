#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

/// \file
/// What a model's tensors are called in a folder that others wrote, or will read.

namespace chevron {

/// Gives a tensor of a model its name in a folder. Without anything said they are the same.
///
/// - Pairs: a name of the model, or the beginning of one up to a dot, and what stands in its place; the longest that fits counts,
///   and "" fits all. `{{"block_3", "model.layers.3"}}` makes `model.layers.3.mlp.weight` of `block_3.mlp.weight`.
/// - A function of the name, or of the stage's number and the name, where names repeat from stage to stage. An empty result says
///   that the folder does not have this tensor: it stays as it is, and is not saved.
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

  /// \param stage its number; 0 for a module that is no stage
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
