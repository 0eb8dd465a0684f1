#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/random_scope.hpp>

/// \file
/// Refuses operators that would silently make a stage differ from the un-pipelined model.

namespace chevron::detail {

/// Checks the operators that a stage's forward runs in this thread during the object's lifetime. Refused are:
///
/// - running statistics (of batch and instance norm) that are no buffers of the stage: the stage's callable runs a module that
///   the stage was not given, so evaluation would change them, and no checkpoint would contain them;
/// - dropout in evaluation by a callable without a module, which cannot know that the stage is in evaluation;
/// - statistics over a batch that is a slice of sequences: they differ from those of whole sequences;
/// - sparse gradients: they would become dense, and be added in another order.
class operator_guard {
 public:
  operator_guard(bool has_module, std::vector<parameter> const& buffers, bool evaluation, bool sliced = false)
      : has_module_(has_module),
        buffers_(buffers),
        evaluation_(evaluation),
        sliced_(sliced),
        outer_(current()),
        include_((install(), random_key)) {
    current() = this;
  }
  ~operator_guard() { current() = outer_; }
  operator_guard(operator_guard const&) = delete;
  operator_guard& operator=(operator_guard const&) = delete;

 private:
  static operator_guard const*& current() {
    static thread_local operator_guard const* watch = nullptr;
    return watch;
  }

  void see_statistics(at::Tensor const& running) const {
    auto const same = [&](parameter const& b) { return b.value.is_same(running); };
    if (!running.defined() || std::any_of(buffers_.begin(), buffers_.end(), same)) return;
    throw usage_error(
        "the stage changes running statistics that are none of its buffers: its callable runs a module that the stage was not "
        "given, so evaluation would change these statistics, and checkpoints would lack them. Remedy: chevron::stage(module, "
        "callable)");
  }
  /// Checks a flag that is set in a call of an operator. \param name the flag's name
  /// \param tensor the operator's running mean, or else its weight \param share the probability of dropout
  void see(std::string const& name, at::Tensor const& tensor, double share) const {
    if (name == "training" && sliced_) {
      throw usage_error(
          "the stage normalizes by the mean and variance of its batch (BatchNorm in training), and the plan cuts sequences into "
          "slices: the statistics of a slice are not those of the sequences. Remedy: module->eval() for that layer, a norm of "
          "each token (LayerNorm), or a plan with slices = 1");
    }
    if (name == "training" || name == "use_input_stats") see_statistics(tensor);
    if (name == "train" && share > 0 && evaluation_ && !has_module_) {
      throw usage_error(
          "the stage drops units in evaluation: a callable without its module cannot see the mode. Remedy: "
          "chevron::stage(module, callable), and module->is_training() wherever dropout is called by hand");
    }
    if (name == "sparse" && !evaluation_ && tensor.requires_grad()) {
      throw usage_error(
          "the stage asks for sparse gradients, which would become dense here and be added in another order. Remedy: "
          "sparse(false) in the embedding's options");
    }
  }

  static void look(c10::OperatorHandle const& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    // Operators called by operators are not checked: instance norm calls batch norm with running means that are no buffers.
    static thread_local int depth = 0;
    if (operator_guard const* const watch = current(); watch != nullptr && depth == 0) {
      auto const& arguments = op.schema().arguments();
      std::size_t const first = stack->size() - arguments.size();
      at::Tensor tensor;  // the argument `running_mean`, or else `weight`
      double share = 0;   // probability of dropout
      for (std::size_t i = 0; i < arguments.size(); ++i) {
        c10::IValue const& value = (*stack)[first + i];
        std::string const& name = arguments[i].name();
        if ((name == "weight" || name == "running_mean") && (value.isTensor() || value.isNone())) {
          tensor = value.isTensor() ? value.toTensor() : at::Tensor();
        }
        if (name == "p" && value.isDouble()) share = value.toDouble();
        if (value.isBool() && value.toBool()) watch->see(name, tensor, share);
      }
    }
    struct deeper {
      deeper() { ++depth; }
      ~deeper() { --depth; }
    } const inside;
    op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, random_key), stack);
  }

  /// Registers `look` for these operators, under the dispatch key of draws (random_scope.hpp), once in a process.
  static void install() {
    intercept_draws();
    static bool const done = [] {
      static torch::Library watched(torch::Library::IMPL, "aten", random_key, __FILE__, __LINE__);
      for (char const* const name : {"batch_norm", "instance_norm", "dropout", "dropout_", "feature_dropout", "feature_dropout_",
                                     "alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_",
                                     "embedding", "embedding_bag", "embedding_bag.padding_idx"}) {
        watched.impl(name, torch::CppFunction::makeFromBoxedFunction<&look>());
      }
      return true;
    }();
    static_cast<void>(done);
  }

  bool has_module_;
  std::vector<parameter> const& buffers_;
  bool evaluation_;
  bool sliced_;
  operator_guard const* outer_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

}  // namespace chevron::detail
