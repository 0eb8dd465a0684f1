#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/data/stage_loss.hpp>
#include <chevron/run/model/module_kinds.hpp>
#include <chevron/run/model/random_scope.hpp>

/// \file
/// The parts of a stage, the context of its forward, and the description of a chunk.

namespace chevron {

class loss_function;
class stage;
class storage_set;

/// A tensor that a stage hands from one slice of a sequence to the next: keys and values of attention, the state of a recurrent
/// layer. Floating-point ones get a gradient from the next slice, unless detached.
struct stage_carry {
  std::string name;
  bool detached = false;  ///< no gradient flows from a slice to the one before: truncated backpropagation

  stage_carry(char const* of_name) : name(of_name) {}             // NOLINT: a name is a carry
  stage_carry(std::string of_name) : name(std::move(of_name)) {}  // NOLINT: a name is a carry
};

/// A carry without a gradient, for truncated backpropagation through time:
///
///     chevron::stage(block).carries({chevron::detached_carry("state")})
inline stage_carry detached_carry(std::string name) {
  stage_carry out(std::move(name));
  out.detached = true;
  return out;
}

/// The inputs of a forward besides the tensors that go through the pipeline.
struct forward_context {
  std::span<side_input const> side_inputs = {};  ///< of this microbatch
  std::optional<rng_key> draws = std::nullopt;   ///< where random numbers come from; nullopt: ATen's default generator
  bool* drew = nullptr;                          ///< if given: set to true where one was drawn
  node_places* places = nullptr;                 ///< if given, and `draws` is: notes the nodes that are made (backward_scope.hpp)
  bool evaluation = false;                       ///< dropout of a callable that has no module is an error then
  tensors const* targets = nullptr;              ///< of this microbatch
  std::vector<collected_losses::given>* losses =
      nullptr;  ///< if given: gets the losses of `add_loss`; else they are the caller's
  /// Carries of the slice before, as many as the stage declares; the forward leaves its own in their place. If not given, the
  /// forward takes undefined ones, and its own are dropped.
  tensors* carried = nullptr;
  bool sliced = false;  ///< inputs are a slice of their sequences: statistics over a batch are an error then
};

/// Which tensors at the end of a stage's messages belong to skip connections (skip.hpp).
struct skip_marks {
  std::vector<bool> arriving;   ///< by tensor that arrives: it ends here (else it passes by)
  std::vector<bool> departing;  ///< by tensor that departs: it begins here (else it passes by)
};

/// The description of a chunk, the same for its F and its backward, which may have to run the forward again.
struct stage_call {
  stage* owner = nullptr;
  forward_context around = {};
  bool training = false;          ///< a backward will follow
  bool differentiable = false;    ///< a stage before it is trained, and wants the gradients of its inputs
  bool untrained = false;         ///< neither it nor a stage before it is trained: its backward does nothing
  loss_function* loss = nullptr;  ///< the last stage's, or null
  std::optional<at::ScalarType> autocast = {};
  tensors const* targets = nullptr;  ///< of the loss
  tensors loss_seeds = {};  ///< in B and I: of the stage's declared losses, the gradients of their values, one number each;
                            ///< undefined where the microbatch counts nothing
  /// Of the stage's carries, all or none of them. F takes those of the slice before and leaves its own; B and I take the
  /// gradients of what F left, and leave those of what F took. Null: no slice comes before or after.
  tensors* carried = nullptr;
  storage_set* built = nullptr;  ///< gets what graphs hold that B, I or W builds; null: nobody asks
};

namespace detail {

/// Something to be called, with what it takes from the batch.
struct stage_part {
  std::function<void(tensors&, tensors&)> forward;
  std::optional<module_mode> mode;  ///< of its module; none for a callable alone
  std::vector<std::string> side_inputs;
  bool targets = false;
  std::vector<stage_carry> carries;
  bool recompute = false;
  std::size_t parameters = 0;  ///< so many of the stage's are its
};

/// A parameter or a buffer of a stage.
/// \param to_be for the message
/// \throws usage_error for a name that the stage has not
inline parameter& named_tensor(std::vector<parameter>& parameters, std::vector<parameter>& buffers, std::string const& name,
                               std::string const& to_be) {
  std::string known;
  for (parameter& p : parameters) {
    if (p.name == name) return p;
    known += (known.empty() ? "" : ", ") + p.name;
  }
  for (parameter& b : buffers) {
    if (b.name == name) return b;
  }
  throw usage_error("a stage has no parameter `" + name + "` to be " + to_be + "; it has " + (known.empty() ? "none" : known));
}

/// A tie that names one of the two names of a parameter registered twice holds for the parameter.
inline void tie_by_both_names(parameter& known, parameter const& again) {
  if (again.tied_as.empty()) return;
  if (!known.tied_as.empty() && known.tied_as != again.tied_as) {
    throw usage_error(known.name + " and " + again.name + " are one parameter, but tied as `" + known.tied_as + "` and as `" +
                      again.tied_as + "`: use one group");
  }
  known.tied_as = again.tied_as;
}

/// Says that ranks of a group hold pieces of a parameter.
/// \throws usage_error for a dimension that the parameter has not
inline void declare_cut(parameter& p, std::int64_t dimension, rank_group over) {
  std::int64_t const from_front = dimension < 0 ? dimension + p.value.dim() : dimension;
  if (from_front < 0 || from_front >= p.value.dim()) {
    throw usage_error("`" + p.name + "` has " + std::to_string(p.value.dim()) + " dimensions, and none " +
                      std::to_string(dimension));
  }
  p.held = over_shards::cut;
  p.cut_along = from_front;
  p.cut_over = over;
}

/// Adds a microbatch's targets to a forward's arguments.
/// \throws usage_error where this rank was given none
inline void add_targets(tensors& values, forward_context const& around) {
  if (around.targets == nullptr || around.targets->empty()) {
    throw usage_error(
        "it takes the batch's targets, and this rank was given none. Remedy: give them to every rank whose stages call "
        "targets()");
  }
  values.insert(values.end(), around.targets->begin(), around.targets->end());
}

/// \throws usage_error for a carry without a name, and for two of one name
inline void check_carries(std::vector<stage_carry> const& declared) {
  for (stage_carry const& one : declared) {
    auto const same = [&](stage_carry const& other) { return other.name == one.name; };
    bool const twice = std::count_if(declared.begin(), declared.end(), same) > 1;
    if (!twice && !one.name.empty()) continue;
    throw usage_error("a stage declares " + (twice ? "two carries `" + one.name + "`" : "a carry without a name") +
                      ". Remedy: a name of its own for each");
  }
}

/// Takes a part's carries off the end of its results.
/// \param into where carries stand; null: they are dropped
/// \throws usage_error for too few results
inline void take_carries(std::vector<stage_carry> const& declared, tensors& results, at::Tensor* into) {
  if (results.size() <= declared.size()) {
    std::string names;
    for (stage_carry const& one : declared) names += (names.empty() ? "`" : ", `") + one.name + "`";
    throw usage_error(
        "it declares the carries " + names + " and gives " + std::to_string(results.size()) +
        (results.size() == 1 ? " result" : " results") +
        ". Remedy: the forward gives its outputs and then, as its last results, the carries in the order of carries()");
  }
  std::size_t const outputs = results.size() - declared.size();
  for (std::size_t k = 0; into != nullptr && k < declared.size(); ++k) into[k] = std::move(results[outputs + k]);
  results.resize(outputs);
}

}  // namespace detail
}  // namespace chevron
