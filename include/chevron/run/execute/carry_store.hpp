#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/plan/action.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/own_versions.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Stores the carries of a rank's stages between one slice and the next slice.

namespace chevron::detail {

/// Stores the carries of each stage and microbatch from one slice's F to the next, and the carries' gradients from one slice's
/// B or I to the next. A plan's laws order a microbatch's slices, so one place for carries and one for gradients suffice.
///
/// F and B of a fused pair may use the store at the same time, since they use different places.
class carry_store {
 public:
  /// \param stages by number, stages of other ranks empty
  carry_store(plan_view const& plan, std::vector<stage> const& stages) : plan_(plan), of_stage_(stages.size()) {
    if (plan.size.slices == 1) return;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      std::vector<stage_carry> const carries = stages[s].carries();
      if (carries.empty()) continue;
      for (stage_carry const& one : carries) of_stage_[s].names.push_back(one.name);
      of_stage_[s].values.resize(static_cast<std::size_t>(plan.size.micro_batches));
      of_stage_[s].gradients.resize(of_stage_[s].values.size());
    }
  }

  /// The carries of the previous slice (for F), or the gradients of carries from the next slice (for B and I); the computation
  /// replaces these tensors by its own. Null for W and R, and if the stage has no carries.
  /// \throws usage_error if a carry was changed in place since the previous slice ended
  tensors* begin(action what) {
    place* const here = place_of(what);
    if (here == nullptr) return nullptr;
    if (step_graph(plan_).carries_from(what) == step_graph::none) here->held.clear();
    for (std::size_t k = 0; k < here->held.size(); ++k) {
      if (detail::version_of(here->held[k]) == here->versions[k]) continue;
      throw usage_error(
          "carry `" + of_stage_[what.stage].names[k] +
          "` was changed in place after the slice before had passed it on. Remedy: a clone, in a stage that returns the "
          "carry as an output, too, or changes the carry in place");
    }
    return &here->held;
  }
  /// Ends a computation. After F of the last slice, or B or I of the first, drops the tensors; otherwise records versions.
  void end(action what) {
    place* const here = place_of(what);
    if (here == nullptr) return;
    int const slice = static_cast<int>(what.micro_batch) % plan_.size.slices;
    if (slice == (what.kind == kind::forward ? plan_.size.slices - 1 : 0)) here->held.clear();
    here->versions.clear();
    for (at::Tensor const& t : here->held) here->versions.push_back(detail::version_of(t));
  }
  /// The tensors that `begin` would return; a caller that holds them prevents reuse of memory that another stream may read.
  tensors held(action what) {
    place* const here = place_of(what);
    return here == nullptr ? tensors() : here->held;
  }

  /// Drops all carries and gradients.
  void clear() {
    for (carries_of_stage& one : of_stage_) {
      for (std::vector<place>* const places : {&one.values, &one.gradients}) {
        for (place& each : *places) each = {};
      }
    }
  }

 private:
  struct place {
    tensors held;
    std::vector<std::uint32_t> versions;
  };
  struct carries_of_stage {
    std::vector<std::string> names;
    std::vector<place> values, gradients;  // by microbatch; empty without carries
  };

  place* place_of(action what) {
    carries_of_stage& of = of_stage_[what.stage];
    if (of.values.empty() || row_of(what.kind).carry == 0) return nullptr;
    auto const m = static_cast<std::size_t>(static_cast<int>(what.micro_batch) / plan_.size.slices);
    return what.kind == kind::forward ? &of.values[m] : &of.gradients[m];
  }

  plan_view plan_;
  std::vector<carries_of_stage> of_stage_;
};

}  // namespace chevron::detail
