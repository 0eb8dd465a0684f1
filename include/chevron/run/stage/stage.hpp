#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/module_kinds.hpp>
#include <chevron/run/stage/operator_guard.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/stage_loss.hpp>
#include <chevron/run/stage/stage_parts.hpp>
#include <chevron/run/stage/tensor_call.hpp>

/// \file
/// A stage: a piece of the model, made of a module or a callable.

namespace chevron {

/// A piece of the model, which takes tensors, returns tensors and has parameters. A stage is constructed from
///
/// - any `torch::nn` module whose `forward` takes tensors and returns a tensor, a tuple or a vector of them: as a holder, a
///   shared pointer or a `torch::nn::AnyModule`;
/// - a module and a callable of that form: the callable is called; parameters, buffers and mode are the module's. Several
///   modules must be registered in a `torch::nn::ModuleDict` or in a module of your own;
/// - a TorchScript module (`torch::jit::Module`), alone or with a callable that is called in its place;
/// - a callable alone, with its parameters. An unlisted parameter, and a running mean of a module that the stage was not given,
///   are errors.
///
/// A stage is a handle: copies share the module and its parameters. Stage 0 takes the microbatch's inputs, every other stage
/// the previous stage's outputs. All outputs are passed, also undefined tensors; every floating-point tensor gets a gradient
/// back. An empty optional arrives as an undefined tensor.
///
/// Tensors may have any shape, with two exceptions: dimension 0 of the batch's tensors counts samples, which are divided into
/// microbatches, and the last stage's outputs must fit the loss function. Between stages, shapes may differ by microbatch.
///
/// Training does not change modules' modes: a module in evaluation (`eval()`, a frozen BatchNorm) trains in evaluation mode.
class stage {
 public:
  /// An empty stage: in `trainer::stages()`, the stages of other ranks are empty.
  stage() = default;

  /// \param module a module whose `forward` takes as many tensors as arrive; TorchScript modules get None for undefined tensors
  template <module_handle Module>
  stage(Module module) {  // NOLINT: a module is a stage
    if constexpr (detail::can_be_called<Module>()) {
      declare(detail::module_of(module));
      call(detail::callee_of(std::move(module)), "the module's forward");
    }
  }

  /// \param forward called in place of the module's forward; must own the module if `forward` calls the module
  ///
  ///     chevron::stage(block, [block](at::Tensor x, at::Tensor mask) mutable { return block->forward(mask, x); })
  template <module_handle Module, class Callable>
  stage(Module module, Callable forward) {
    static_assert(!module_handle<Callable>,
                  "a stage is one module, and one callable that runs in place of its forward: register several modules in one, "
                  "or give each to a "
                  "stage of its own, in_sequence");
    if constexpr (!module_handle<Callable> && detail::can_be_called<Callable>()) {
      declare(detail::module_of(module));
      call(std::move(forward));
    }
  }

  /// \param parameters all trained parameters that `forward` uses, with different names
  template <class Callable>
  requires(!std::same_as<std::remove_cvref_t<Callable>, stage> && !module_handle<Callable>)
      stage(Callable forward, std::vector<parameter> parameters = {})
      : parameters_(std::move(parameters)) {  // NOLINT
    if constexpr (detail::can_be_called<Callable>()) {
      parts_.emplace_back().parameters = parameters_.size();
      call(std::move(forward));
    }
  }

  /// \returns a stage that runs `parts` in sequence: each part takes the previous part's outputs. Names of parameters are
  /// unchanged; to a name that two parts use, the part's number is prepended: `1.weight`. The parts' `recompute`,
  /// `side_inputs`, `targets` and `carries` still apply to each part.
  /// \throws usage_error for an empty part
  friend stage in_sequence(std::vector<stage> parts) {
    stage whole;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i]) throw usage_error("part " + std::to_string(i) + " of a stage is empty");
      for (auto const list : {&stage::parameters_, &stage::buffers_}) {
        for (parameter& p : parts[i].*list) {
          auto const uses = std::count_if(parts.begin(), parts.end(), [&](stage const& part) { return part.names(p.name); });
          parameter& named = (whole.*list).emplace_back(p);
          if (uses > 1) named.name = std::to_string(i) + "." + p.name;
        }
      }
    }
    for (stage& part : parts) {
      whole.losses(std::move(part.losses_));
      for (detail::stage_part& p : part.parts_) whole.parts_.push_back(std::move(p));
    }
    return whole;
  }

  /// Turns activation checkpointing `on` (Chen et al., arXiv 1604.06174): F stores only the stage's inputs, and B or I runs the
  /// forward again, once. In a stage made by `in_sequence`, each part stores its inputs and is run again before its own
  /// backward: only one part's activations exist at a time, besides the tensors that I stores for W.
  ///
  /// Both forwards must compute the same results. Random numbers repeat (random_scope.hpp), unless drawn from your own
  /// generator; buffers of modules (BatchNorm's running mean) change in the first only. Inputs must not be changed in place.
  stage& recompute(bool on = true) {
    for (detail::stage_part& part : parts_) part.recompute = on;
    return *this;
  }

  /// Names tensors of the batch that the forward takes after its inputs, in this order; in a stage made of parts, only the
  /// first part's forward. A name that a step's batch lacks is an error of that step, with exit code 2.
  stage& side_inputs(std::vector<std::string> names) {
    if (!parts_.empty()) parts_.front().side_inputs = std::move(names);
    return *this;
  }

  /// Passes the batch's targets to the forward, after its side inputs; in a stage made of parts, to the first part's forward. For
  /// losses of the stage (`losses`); the trainer's loss function always gets targets.
  stage& targets() {
    if (!parts_.empty()) parts_.front().targets = true;
    return *this;
  }
  /// Whether a part takes targets.
  bool takes_targets() const {
    return std::any_of(parts_.begin(), parts_.end(), [](detail::stage_part const& part) { return part.targets; });
  }

  /// Declares losses that the stage's forward computes and passes to `add_loss`; repeated calls add declarations.
  ///
  ///     chevron::stage(block).losses({{.name = "balance", .factor = 0.01}})
  ///
  /// \throws usage_error for an empty name, a factor that is not finite, and one name with two factors
  stage& losses(std::vector<stage_loss> declared) {
    detail::add_declared(losses_, std::move(declared));
    return *this;
  }
  std::vector<stage_loss> const& losses() const { return losses_; }  ///< all declared losses

  /// Names tensors that the stage passes from slice to slice of a sequence. The forward takes the carries after inputs, side
  /// inputs and targets, and returns them as its last results, in this order; for the first slice they are undefined. In a
  /// stage of parts, sets the carries of the first part; to give other parts carries, declare them before `in_sequence`.
  ///
  ///     chevron::stage(attention).carries({"keys", "values"})
  ///
  /// \throws usage_error for a name that is empty or given twice
  stage& carries(std::vector<stage_carry> declared) {
    detail::check_carries(declared);
    if (!parts_.empty()) parts_.front().carries = std::move(declared);
    return *this;
  }
  /// The carries of all parts of the stage, in their order.
  std::vector<stage_carry> carries() const {
    std::vector<stage_carry> all;
    for (detail::stage_part const& part : parts_) all.insert(all.end(), part.carries.begin(), part.carries.end());
    return all;
  }
  /// Declares that a slice is a sequence of its own: the stage's outputs for a slice may differ from its outputs for the whole
  /// sequence, and the first step of a plan with slices does not compare both (slice_agreement.hpp). For documents that end
  /// where slices end, experts of limited capacity, and the like.
  /// \param on false: compared again \returns this stage
  stage& independent_slices(bool on = true) {
    for (detail::stage_part& part : parts_) part.independent_slices = on;
    return *this;
  }
  /// Whether any part of the stage declares `independent_slices`.
  bool has_independent_slices() const {
    return std::any_of(parts_.begin(), parts_.end(), [](detail::stage_part const& part) { return part.independent_slices; });
  }
  /// The number of carries that the parts before `part` declare; `carries_before(parts())` counts all carries.
  std::size_t carries_before(std::size_t part) const {
    std::size_t sum = 0;
    for (std::size_t p = 0; p < part; ++p) sum += parts_[p].carries.size();
    return sum;
  }
  /// The carries of one part.
  std::vector<stage_carry> const& carries_of(std::size_t part) const { return parts_[part].carries; }

  /// The names of side inputs of all parts, in their order.
  std::vector<std::string> side_input_names() const {
    std::vector<std::string> names;
    for (detail::stage_part const& part : parts_) names.insert(names.end(), part.side_inputs.begin(), part.side_inputs.end());
    return names;
  }

  /// Ties a parameter: all parameters that stages tie under one group name are one parameter (tied_parameters.hpp).
  /// \throws usage_error for an unknown name, and for a parameter that is tied as another group
  stage& tie(std::string const& parameter_name, std::string group) {
    parameter& p = named(parameter_name, "tied as `" + group + "`");
    if (!p.tied_as.empty() && p.tied_as != group)
      throw usage_error("`" + parameter_name + "` is tied as `" + p.tied_as + "` and cannot be tied as `" + group + "`, too");
    p.tied_as = std::move(group);
    return *this;
  }

  /// Declares that each shard holds a piece of this parameter or buffer, along a dimension: a column-parallel weight is cut
  /// along 0, a row-parallel weight along 1. Checkpoints contain the whole tensor; the gradient norm sums over all pieces.
  ///
  ///     chevron::stage(module).cut("gate_up", 0, {.blocks = 2})  // a piece has rows of gate, then rows of up
  ///
  /// \param dimension from 0, or from the end if negative
  /// \param how the blocks of a fused weight, each of which is cut; without, the pieces in a row are the whole tensor
  /// \returns this stage
  /// \throws usage_error for a name or a dimension that does not exist, for blocks that do not add up to this rank's piece, and
  /// for a tensor that is declared `cut` or `partial` already
  stage& cut(std::string const& name, std::int64_t dimension, cut_options const& how = {}) {
    detail::declare_cut(named(name, "cut"), dimension, rank_group::shards, how);
    return *this;
  }
  /// Declares that each rank of the expert group has a piece of this parameter or buffer of a mixture's experts, along a
  /// dimension. The group consists of the shards of `topology::expert_replicas` neighbouring replicas. Gradients are summed, and
  /// buffers copied, over the ranks that have the same experts; each microbatch's loss is weighed by its share of the whole
  /// step, so the sum needs no divisor.
  /// \param dimension from 0, or from the end if negative
  /// \param how without, the ranks' experts in a row are all experts. If experts are dealt round robin, expert e to rank e mod
  /// n, each expert of this rank is a block of its own: `{.blocks = experts of this rank}`
  /// \returns this stage \throws usage_error as `cut`
  stage& experts(std::string const& name, std::int64_t dimension = 0, cut_options const& how = {}) {
    detail::declare_cut(named(name, "cut"), dimension, rank_group::experts, how);
    return *this;
  }
  /// Declares that each shard computes only a summand of these parameters' gradients, as for a norm whose input is cut along
  /// the sequence; summands are summed over the shards once a step. A wrong declaration is refused (shard_agreement.hpp).
  /// \param names names of parameters \returns this stage
  /// \throws usage_error for an unknown name, and for a parameter that is declared `cut` or `partial` already
  stage& partial(std::vector<std::string> const& names) {
    for (std::string const& name : names) {
      parameter& p = named(name, "partial");
      detail::check_undeclared(p, "partial");
      p.held = over_shards::partial;
    }
    return *this;
  }

  /// Declares buffers to which forwards add, such as the number of tokens of each expert: at the end of a step every replica gets
  /// the sum of all replicas' changes, in place of replica 0's values (`trainer_options::broadcast_buffers`). A step that is
  /// skipped changes no such buffer; a forward that is computed again counts once.
  ///
  ///     chevron::stage(moe).summed({"counts"})
  ///
  /// Sums are exact for whole numbers up to 2^53, in float32 buffers up to 2^24. All shards must count alike, unless each has a
  /// piece of the buffer (`cut`); pieces of `experts` are summed over the copies of the experts.
  /// \param names names of buffers \returns this stage
  /// \throws usage_error for an unknown buffer, and for a buffer that is not of whole or floating-point numbers
  stage& summed(std::vector<std::string> const& names) {
    for (std::string const& name : names) detail::declare_summed(buffers_, name);
    return *this;
  }

  explicit operator bool() const { return !parts_.empty(); }  ///< false for an empty stage

  /// Runs the forward of all parts. \param inputs moved from: a part may reassign inputs taken by reference
  void forward(tensors& inputs, tensors& outputs, forward_context const& around = {}) {
    outputs = std::move(inputs);
    forward_parts(0, parts_.size(), outputs, around);
  }

  /// Runs the parts [first, last). \param values inputs of part `first`, replaced by the outputs of the last part
  void forward_parts(std::size_t first, std::size_t last, tensors& values, forward_context const& around) {
    tensors results;  // local: both halves of a fused pair may run the same stage
    if (around.draws && around.places != nullptr) around.places->add_leaves(*around.draws, parameters_);
    at::Tensor* carried = around.carried == nullptr ? nullptr : around.carried->data() + carries_before(first);
    for (std::size_t p = first; p < last; ++p) {
      std::size_t const inputs = values.size();
      for (std::string const& name : parts_[p].side_inputs)
        values.push_back(detail::side_input_named(name, around.side_inputs, "it"));
      if (parts_[p].targets) detail::add_targets(values, around);
      std::vector<stage_carry> const& carries = parts_[p].carries;
      for (std::size_t k = 0; k < carries.size(); ++k) values.push_back(carried != nullptr ? carried[k] : at::Tensor());
      std::optional<random_scope> scope;
      if (around.draws) {
        rng_key place = *around.draws;
        place.part = static_cast<int>(p);
        scope.emplace(place, values, around.places);
      }
      detail::operator_guard const watch(parts_[p].mode.has_value(), buffers_, around.evaluation, around.sliced);
      {
        std::optional<collected_losses> given;
        if (around.losses != nullptr) given.emplace();
        detail::call(parts_[p], inputs, values, results, around);
        if (given) around.losses->insert(around.losses->end(), given->all().begin(), given->all().end());
      }
      if (scope && around.drew != nullptr && scope->drew()) *around.drew = true;
      if (!carries.empty()) {
        detail::take_carries(carries, results, carried);
        if (carried != nullptr) carried += carries.size();
      }
      std::swap(values, results);
      results.clear();
    }
  }

  skip_marks const& skips() const { return skips_; }                          ///< set by `with_skips`
  void skips(skip_marks marks) { skips_ = std::move(marks); }                 ///< `marks` of `with_skips`
  std::size_t parts() const { return parts_.size(); }                         ///< number of parts
  bool recomputes(std::size_t part) const { return parts_[part].recompute; }  ///< whether a part recomputes
  /// Whether any part recomputes.
  bool recomputes() const {
    return std::any_of(parts_.begin(), parts_.end(), [](detail::stage_part const& part) { return part.recompute; });
  }
  /// The first part with a parameter that needs a gradient; `parts()` if no part has one.
  std::size_t lowest_trained_part() const {
    auto next = parameters_.begin();
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      for (auto const end = next + static_cast<std::ptrdiff_t>(parts_[p].parameters); next != end; ++next) {
        if (next->value.requires_grad()) return p;
      }
    }
    return parts_.size();
  }

  /// All parameters in the order of registration, frozen ones included.
  std::vector<parameter> const& parameters() const { return parameters_; }

  /// The name of the first parameter that a module has registered, removed or replaced since the stage was made; empty: none.
  std::string changed_parameter() const {
    auto known = parameters_.begin();
    for (detail::stage_part const& part : parts_) {
      auto const end = known + static_cast<std::ptrdiff_t>(part.parameters);
      if (part.registered) {
        for (parameter const& now : part.registered()) {
          if (known == end || !known->value.is_same(now.value)) return now.name;
          ++known;
        }
        if (known != end) return known->name;
      }
      known = end;
    }
    return "";
  }

  /// The buffers of modules, which forwards may change (running means …); a callable alone has none.
  std::vector<parameter> const& buffers() const { return buffers_; }

  /// Sets the mode of all modules, on which dropout and the like depend; no effect on a callable alone.
  void training(bool on) {
    for (detail::stage_part& part : parts_) {
      if (part.mode) part.mode->set_all(on);
    }
  }

  /// The modes of all modules (true: training), by part; within a part, parent modules first. For `set_modes`.
  std::vector<std::vector<bool>> modes() const {
    std::vector<std::vector<bool>> out;
    for (detail::stage_part const& part : parts_) out.push_back(part.mode ? part.mode->get() : std::vector<bool>{});
    return out;
  }
  /// Sets the modes that `modes()` returned.
  void set_modes(std::vector<std::vector<bool>> const& modes) {
    for (std::size_t p = 0; p < parts_.size(); ++p) {
      if (parts_[p].mode) parts_[p].mode->set(modes[p]);
    }
  }

 private:
  parameter& named(std::string const& name, std::string const& to_be) {
    return detail::named_tensor(parameters_, buffers_, name, to_be);
  }

  /// Appends a part with this module; `call` then sets the part's forward.
  template <class Module>
  void declare(Module module) {
    detail::list_tensors(module, parameters_, buffers_);
    parts_.emplace_back().mode = detail::mode_of(module);
    parts_.back().parameters = parameters_.size();
    parts_.back().registered = [module = std::move(module)]() mutable {
      std::vector<parameter> parameters, buffers;
      detail::list_tensors(module, parameters, buffers);
      return parameters;
    };
  }
  template <class Callable>
  void call(Callable forward, char const* who = "the stage's callable") {
    parts_.back().callee = who;
    parts_.back().takes = detail::counts_taken<Callable>();
    parts_.back().forward = detail::tensor_call(std::move(forward));
  }

  bool names(std::string const& parameter_or_buffer) const {
    auto const same = [&](parameter const& p) { return p.name == parameter_or_buffer; };
    return std::any_of(parameters_.begin(), parameters_.end(), same) || std::any_of(buffers_.begin(), buffers_.end(), same);
  }

  std::vector<detail::stage_part> parts_;
  std::vector<parameter> parameters_;
  std::vector<parameter> buffers_;
  std::vector<stage_loss> losses_;
  skip_marks skips_;
};

stage in_sequence(std::vector<stage> parts);

namespace detail {

/// Whether a rank uses the batch's targets: a stage asks for targets, or the rank has the last stage, and so the loss.
/// \param stages by number; empty for stages of other ranks
inline bool takes_targets(std::vector<stage> const& stages) {
  return stages.back() || std::any_of(stages.begin(), stages.end(), [](stage const& s) { return s.takes_targets(); });
}

/// A stage's result, detached from its graph; copied if it shares memory with a buffer or parameter of the stage, which a later
/// forward may change before the receiver reads the result.
inline at::Tensor apart(stage const& owner, at::Tensor const& result) {
  if (!result.defined()) return result;
  auto const same_memory = [&](parameter const& p) {
    return p.value.defined() && p.value.has_storage() && p.value.storage().is_alias_of(result.storage());
  };
  bool const shared = result.has_storage() &&
                      (std::any_of(owner.buffers().begin(), owner.buffers().end(), same_memory) ||
                       std::any_of(owner.parameters().begin(), owner.parameters().end(), same_memory));
  return shared ? result.detach().clone() : result.detach();
}

}  // namespace detail
}  // namespace chevron
