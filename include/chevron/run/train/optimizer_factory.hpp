#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <chevron/run/core/tensors.hpp>

/// \file
/// The function that makes a rank's optimizer.

namespace chevron {

/// A parameter that this rank trains.
struct named_parameter {
  int stage = 0;
  std::string name;  ///< within its stage
  at::Tensor value;
  /// Whether `value` is this rank's piece of a parameter that is cut over several ranks. Code that needs the whole tensor, such
  /// as its norm, combines the pieces by `shard_group(comm, cut_over)`.
  bool is_piece = false;
  std::int64_t cut_along = 0;                ///< of a piece: the dimension in which the parameter is cut
  rank_group cut_over = rank_group::shards;  ///< of a piece: the ranks that have the pieces
};

namespace detail {

template <class Make, class Each>
concept makes_optimizer_of = std::is_invocable_r_v<std::unique_ptr<torch::optim::Optimizer>, Make const&, std::vector<Each>>;

}  // namespace detail

/// Makes the optimizer of one rank: wraps any function that takes the rank's trained parameters as a
/// `std::vector<named_parameter>` or a `std::vector<at::Tensor>`, in the order of stages and registration. A parameter that
/// several stages of the rank share is in the list once, with the first stage.
///
/// An optimizer of a class of your own may need whole tensors, as Muon, LAMB and Adafactor do. It is refused on a rank that has
/// pieces of cut parameters, unless `element_wise` declares that it steps each element by itself or combines pieces.
class optimizer_factory {
 public:
  /// \param make a function that returns a `std::unique_ptr` to an optimizer
  template <class Make>
  requires(!std::same_as<Make, optimizer_factory> &&
           (detail::makes_optimizer_of<Make, at::Tensor> || detail::makes_optimizer_of<Make, named_parameter>))
      optimizer_factory(Make make) {  // NOLINT
    if constexpr (detail::makes_optimizer_of<Make, at::Tensor>) {
      make_ = [make = std::move(make)](std::vector<named_parameter> const& all) -> std::unique_ptr<torch::optim::Optimizer> {
        std::vector<at::Tensor> values;
        for (named_parameter const& p : all) values.push_back(p.value);
        return make(std::move(values));
      };
    } else {
      make_ = std::move(make);
    }
  }

  /// Whether the optimizer may be given pieces of parameters, by `element_wise`.
  bool steps_pieces() const { return steps_pieces_; }
  friend optimizer_factory element_wise(optimizer_factory make);

  /// Makes the optimizer for these parameters.
  std::unique_ptr<torch::optim::Optimizer> operator()(std::vector<named_parameter> const& all) const { return make_(all); }
  /// Makes the optimizer for tensors without names, such as those of an unpipelined model: passes each with stage 0 and an
  /// empty name.
  std::unique_ptr<torch::optim::Optimizer> operator()(std::vector<at::Tensor> const& all) const {
    std::vector<named_parameter> nameless;
    for (at::Tensor const& value : all) nameless.push_back({0, "", value});
    return make_(nameless);
  }

 private:
  std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<named_parameter> const&)> make_;
  bool steps_pieces_ = false;
};

/// Declares that an optimizer of a class of your own may be given pieces of parameters, over shards and with
/// `trainer_options::shard` over replicas: it steps each element by itself, or combines pieces (`named_parameter::is_piece`). The
/// optimizers of torch::optim that checkpoints know, and Chevron's fused ones, need no declaration.
///
///     .optimizer = chevron::element_wise(chevron::optimizer<sign_descent>(0.01))
///
/// \param make the factory \returns the factory with the declaration
inline optimizer_factory element_wise(optimizer_factory make) {
  make.steps_pieces_ = true;
  return make;
}

/// Returns a factory that puts all parameters into one group:
/// `optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(3e-4))`.
/// \param options options of the group
template <class Optimizer, class Options>
optimizer_factory optimizer(Options options) {
  return [options](std::vector<at::Tensor> parameters) { return std::make_unique<Optimizer>(std::move(parameters), options); };
}

}  // namespace chevron
