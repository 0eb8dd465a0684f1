#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/module_kinds.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/stage_loss.hpp>
#include <chevron/run/stage/tensor_call.hpp>

/// \file
/// The parts of a stage, the context of a forward, and the description of a chunk's computations.

namespace chevron {

class loss_function;
class stage;
namespace detail {
class storage_set;
class shard_watch;
}

/// Declares a carry: a tensor that a stage passes from one slice of a sequence to the next slice, such as keys and values of
/// attention or the state of a recurrent layer. A floating-point carry gets a gradient from the next slice, unless `detached`.
struct stage_carry {
  std::string name;
  bool detached = false;  ///< the previous slice gets no gradient: truncated backpropagation

  stage_carry(char const* of_name) : name(of_name) {}             // NOLINT: a name is a carry
  stage_carry(std::string of_name) : name(std::move(of_name)) {}  // NOLINT: a name is a carry
};

/// A carry without a gradient, for truncated backpropagation through time.
///
///     chevron::stage(block).carries({chevron::detached_carry("state")})
inline stage_carry detached_carry(std::string name) {
  stage_carry out(std::move(name));
  out.detached = true;
  return out;
}

/// The arguments of a forward besides the tensors that pass between stages.
struct forward_context {
  std::span<side_input const> side_inputs = {};  ///< the microbatch's side inputs
  std::optional<rng_key> draws = std::nullopt;   ///< stream of random numbers; nullopt: ATen's default generator
  bool* drew = nullptr;                          ///< if not null: set to true by a draw
  node_places* places = nullptr;                 ///< if not null, with `draws`: records the graph's nodes (backward_scope.hpp)
  bool evaluation = false;                       ///< true: dropout of a callable without a module is an error
  tensors const* targets = nullptr;              ///< the microbatch's targets; null: none
  std::vector<collected_losses::given>* losses =
      nullptr;  ///< if not null: gets the losses passed to `add_loss`; null: the caller must collect them
  /// Carries of the previous slice, as many as the stage declares; replaced by the carries that the forward returns. Null: the
  /// forward gets undefined tensors, and the carries that it returns are dropped.
  tensors* carried = nullptr;
  bool sliced = false;  ///< true: inputs are a slice of sequences, so statistics over a batch are an error
};

/// Describes the last tensors of a stage's messages, which belong to skip connections (skip.hpp).
struct skip_marks {
  std::vector<bool> arriving;   ///< by arriving tensor: the connection ends here (false: the tensor bypasses the stage)
  std::vector<bool> departing;  ///< by departing tensor: the connection begins here (false: the tensor bypasses the stage)
};

/// The arguments with which a stage computes one microbatch: equal for F and the backward, which may run the forward again.
struct stage_call {
  stage* owner = nullptr;
  forward_context around = {};
  bool training = false;          ///< a backward will follow
  bool differentiable = false;    ///< an earlier stage is trained, and gets the gradients of the inputs
  bool joint = false;             ///< ranks with other batches call collectives in this computation, too (joint_calls.hpp)
  bool untrained = false;         ///< neither the stage nor any earlier stage is trained: the backward does nothing
  loss_function* loss = nullptr;  ///< the last stage's loss; else null
  std::optional<at::ScalarType> autocast = {};
  tensors const* targets = nullptr;  ///< arguments of the loss
  tensors loss_seeds = {};           ///< in B and I: gradients of the values of the stage's declared losses, one number each;
                                     ///< undefined where the microbatch counts nothing
  tensors* losses = nullptr;         ///< F: gets the values that the forward passed to `add_loss`, in the order of the stage's
                                     ///< declared losses, undefined for a loss not passed; null: values are dropped
  /// The stage's carries, or an empty list. F replaces the previous slice's carries by its own; B and I replace the gradients
  /// of the carries that F returned by the gradients of the carries that F received. Null: a microbatch has one slice.
  tensors* carried = nullptr;
  tensors* seen = nullptr;               ///< gets copies of the inputs of F, for the comparison of slices; null: not copied
  detail::shard_watch* watch = nullptr;  ///< gets the parameters that are added over shards; null: not recorded
  detail::storage_set* built = nullptr;  ///< gets the storages of graphs that R, B, I or W build; null: not collected
};

namespace detail {

/// A part of a stage: a callable, and what it gets from the batch and from other slices.
struct stage_part {
  std::function<bool(tensors&, tensors&)> forward;  ///< false, without a call, for a count of tensors that it does not take
  std::string callee, takes;                        ///< in words: the callable, and the counts of tensors that it takes
  std::optional<module_mode> mode;  ///< of the part's module; empty for a callable alone
  std::function<std::vector<parameter>()> registered;  ///< lists the parameters that the module has now; empty for a callable
  std::vector<std::string> side_inputs;
  bool targets = false;
  std::vector<stage_carry> carries;
  bool recompute = false;
  bool independent_slices = false;
  std::size_t parameters = 0;  ///< the number of the stage's parameters that belong to this part
};

/// Finds a parameter or a buffer of a stage by name.
/// \param to_be for the error: what the tensor is declared to be, such as `cut`
/// \throws usage_error for an unknown name
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

/// For a parameter that is registered under two names: copies the tie declared for the second name to the first.
/// \param known the first name's entry \param again the second's
/// \throws usage_error if the two names are tied as different groups
inline void tie_by_both_names(parameter& known, parameter const& again) {
  if (again.tied_as.empty()) return;
  if (!known.tied_as.empty() && known.tied_as != again.tied_as) {
    throw usage_error(known.name + " and " + again.name + " are one parameter, but tied as `" + known.tied_as + "` and as `" +
                      again.tied_as + "`: use one group");
  }
  known.tied_as = again.tied_as;
}

/// Checks that a parameter is not yet declared `cut` or `partial`: a second declaration would replace the first.
/// \param to_be the new declaration \throws usage_error for a parameter that is declared already
inline void check_undeclared(parameter const& p, std::string const& to_be) {
  if (p.held == over_shards::replicated) return;
  throw usage_error("`" + p.name + "` is declared " + (p.held == over_shards::cut ? "cut" : "partial") +
                    " already, and cannot be declared " + to_be +
                    ", too. Remedy: one declaration for each tensor: `cut` if each shard holds a piece, `partial` if each holds "
                    "the whole and computes a part of its gradient");
}

/// The sizes of the blocks' parts in a rank's piece. \param size of the piece along the dimension in which it is cut
/// \throws usage_error if the blocks do not add up to the piece
inline std::vector<std::int64_t> blocks_of_piece(std::string const& name, std::int64_t size, cut_options const& how) {
  std::string const of_piece = "`" + name + "` has " + std::to_string(size) + " elements where it is cut, ";
  if (how.sizes.empty()) {
    if (how.blocks < 1 || size % how.blocks != 0)
      throw usage_error(of_piece + "which are not " + std::to_string(how.blocks) +
                        " blocks of one size. Remedy: cut_options::sizes, the sizes of all blocks' parts in this rank's piece");
    return std::vector<std::int64_t>(static_cast<std::size_t>(how.blocks), size / how.blocks);
  }
  std::int64_t sum = 0;
  std::string words;
  for (std::int64_t const one : how.sizes) {
    sum += one;
    words += (words.empty() ? "" : " + ") + std::to_string(one);
    if (one < 0) sum = -1;
    if (sum < 0) break;
  }
  if (sum != size)
    throw usage_error(of_piece + "and blocks of " + words + " do not add up to them. Remedy: the sizes in this rank's piece");
  return how.sizes;
}

/// Declares that each rank of a group has a piece of a parameter. \param dimension from 0, or from the end if negative
/// \throws usage_error for a dimension that the parameter lacks, for a second declaration, and as `blocks_of_piece`
inline void declare_cut(parameter& p, std::int64_t dimension, rank_group over, cut_options const& how) {
  check_undeclared(p, "cut");
  std::int64_t const from_front = dimension < 0 ? dimension + p.value.dim() : dimension;
  if (from_front < 0 || from_front >= p.value.dim()) {
    throw usage_error("`" + p.name + "` has " + std::to_string(p.value.dim()) + " dimensions, and none " +
                      std::to_string(dimension));
  }
  p.held = over_shards::cut;
  p.cut_along = from_front;
  p.cut_over = over;
  p.cut_blocks = blocks_of_piece(p.name, p.value.size(from_front), how);
  p.cut_whole = how.whole;
}

/// Declares that a buffer's changes in a step are summed over the replicas (summed_buffers.hpp).
/// \throws usage_error for an unknown buffer, and for one whose elements are not real numbers with places of their own in memory
inline void declare_summed(std::vector<parameter>& buffers, std::string const& name) {
  std::string known;
  for (parameter& b : buffers) {
    known += (known.empty() ? "" : ", ") + b.name;
    if (b.name != name) continue;
    at::Tensor const& t = b.value;
    bool const real =
        t.defined() && t.layout() == at::kStrided && !t.is_quantized() && !t.is_complex() && t.scalar_type() != at::kBool;
    if (!real) {
      throw usage_error("buffer `" + name + "` cannot be summed over the replicas: " +
                        (t.defined() ? "it is " + std::string(c10::toString(t.scalar_type())) : "it is undefined") +
                        ". Remedy: a dense buffer of whole or floating-point numbers, such as at::zeros({experts})");
    }
    b.summed = true;
    return;
  }
  throw usage_error("a stage has no buffer `" + name + "` to be summed; it has " + (known.empty() ? "none" : known) +
                    ". Remedy: register_buffer in the stage's module");
}

/// Appends a microbatch's targets to a forward's arguments.
/// \throws usage_error if this rank was given no targets
inline void add_targets(tensors& values, forward_context const& around) {
  if (around.targets == nullptr || around.targets->empty()) {
    throw usage_error(
        "the stage takes the batch's targets, and this rank was given none. Remedy: the targets on every rank whose stages call "
        "targets()");
  }
  values.insert(values.end(), around.targets->begin(), around.targets->end());
}

/// Calls a part's forward.
/// \param inputs the number of tensors among `values` that the batch, or the part or stage before, gave
/// \throws usage_error, with the tensors that were passed, if the forward does not take their number
inline void call(stage_part const& part, std::size_t inputs, tensors& values, tensors& results, forward_context const& around) {
  std::size_t const passed = values.size();
  bool const no_batch = inputs == 0 && around.draws && around.draws->stage == 0;
  char const* const without_batch =
      "the rank of stage 0 was given no inputs (an evaluator's outputs are on the rank of its own last stage). Remedy: the "
      "step's inputs on the rank of stage 0";
  try {
    if (part.forward(values, results)) return;
  } catch (c10::Error& e) {  // nn::Sequential and AnyModule count their arguments themselves
    if (no_batch && passed == 0) e.add_context(without_batch);
    throw;
  }
  std::string words = wrong_count(part.callee, part.takes, passed) + (inputs == 0 ? "no inputs" : counted(inputs, "input"));
  if (!part.side_inputs.empty()) words += ", " + named_ones(part.side_inputs, "side input", "side inputs");
  if (part.targets) words += ", " + counted(around.targets == nullptr ? 0 : around.targets->size(), "target");
  std::vector<std::string> carries;
  for (stage_carry const& one : part.carries) carries.push_back(one.name);
  if (!carries.empty()) words += ", " + named_ones(carries, "carry", "carries");
  throw usage_error(words + (no_batch ? std::string("; ") + without_batch + "; or " : ". Remedy: ") +
                    "a forward that takes the inputs and then the tensors that are declared, in this order: stage.side_inputs, "
                    "targets, carries");
}

/// Checks names of carries.
/// \throws usage_error for a carry without a name, and for two carries with equal names
inline void check_carries(std::vector<stage_carry> const& declared) {
  for (stage_carry const& one : declared) {
    auto const same = [&](stage_carry const& other) { return other.name == one.name; };
    bool const twice = std::count_if(declared.begin(), declared.end(), same) > 1;
    if (!twice && !one.name.empty()) continue;
    throw usage_error("a stage declares " + (twice ? "two carries `" + one.name + "`" : "a carry without a name") +
                      ". Remedy: a name of its own for each");
  }
}

/// Moves a part's carries from the end of its results to `into`; drops the carries if `into` is null.
/// \throws usage_error if `results` has no tensor besides the carries
inline void take_carries(std::vector<stage_carry> const& declared, tensors& results, at::Tensor* into) {
  if (results.size() <= declared.size()) {
    std::string names;
    for (stage_carry const& one : declared) names += (names.empty() ? "`" : ", `") + one.name + "`";
    throw usage_error(
        "the stage declares the carries " + names + " and gives " + std::to_string(results.size()) +
        (results.size() == 1 ? " result" : " results") +
        ". Remedy: the forward gives its outputs and then, as its last results, the carries in the order of carries()");
  }
  std::size_t const outputs = results.size() - declared.size();
  for (std::size_t k = 0; into != nullptr && k < declared.size(); ++k) into[k] = std::move(results[outputs + k]);
  results.resize(outputs);
}

}  // namespace detail
}  // namespace chevron
