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
#include <chevron/run/model/graph/stage_graph.hpp>
#include <chevron/run/model/stage.hpp>

/// \file
/// Finds parameters that a stage uses without listing them.

namespace chevron::detail {

/// Finds parameters that a stage's callable uses and the stage does not list, so that no optimizer would train them. A leaf
/// that requires a gradient and occurs in the graphs of two forwards was created by neither forward: it must be a parameter.
class unlisted_leaves {
 public:
  /// Whether two graphs were examined, which suffices.
  bool is_done() const { return examined_ == 2; }
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
        throw usage_error("it uses a parameter of sizes " + sizes.str() +
                          " that it does not list, and that would not be trained: give the stage its module, too, "
                          "chevron::stage(module, callable), or let it need no gradient");
      }
      if (examined_ == 1) seen_.emplace_back(leaf.getIntrusivePtr());
    }
  }

 private:
  int examined_ = 0;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> seen_;
};

}  // namespace chevron::detail
