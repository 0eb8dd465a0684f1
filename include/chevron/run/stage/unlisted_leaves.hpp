#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/graph/stage_graph.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Finds parameters that a stage uses without listing them.

namespace chevron::detail {

/// Finds parameters that a stage's callable uses and the stage does not list, so that no optimizer would train them. A leaf
/// that requires a gradient and occurs in the graphs of two forwards was created by neither forward: it must be a parameter.
/// The first two graphs are examined, and then two of every hundred, since a tensor may later be assigned to a module's member.
class unlisted_leaves {
 public:
  /// Counts a forward. \returns whether its graph is to be examined
  bool is_due() {
    bool const due = forwards_ < 2;
    if (forwards_ == 0) examined_ = 0;
    if (++forwards_ == 100) forwards_ = 0;
    return due;
  }
  /// Examines the graph of a forward. \throws usage_error for an unlisted parameter
  void examine(stage const& owner, stage_graph const& graph) {
    auto const before = std::exchange(seen_, {});
    ++examined_;
    for (at::Tensor const& leaf : graph.leaves()) {
      auto const same = [&](parameter const& p) { return p.value.is_same(leaf); };
      if (std::any_of(owner.parameters().begin(), owner.parameters().end(), same)) continue;
      auto const again = [&](auto const& earlier) { return earlier.lock().get() == leaf.unsafeGetTensorImpl(); };
      if (std::any_of(before.begin(), before.end(), again)) {
        std::ostringstream sizes;
        sizes << leaf.sizes();
        throw usage_error("the stage uses a parameter of sizes " + sizes.str() +
                          " that it does not list, and that would not be trained. Remedy: give the stage its module, too, "
                          "chevron::stage(module, callable), or freeze the parameter; for a tensor that was assigned to a "
                          "module's member after the trainer was made, a new trainer");
      }
      if (examined_ == 1) seen_.emplace_back(leaf.getIntrusivePtr());
    }
  }

 private:
  int forwards_ = 0, examined_ = 0;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> seen_;
};

}  // namespace chevron::detail
