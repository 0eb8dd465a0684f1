#pragma once

#include <string>
#include <string_view>

#include <ATen/record_function.h>

#include <chevron/plan/action.hpp>

/// \file
/// Actions under their names in PyTorch's profilers.

namespace chevron {

/// As long as it lives, a range of PyTorch's profilers (Kineto, NVTX), named as PyTorch's own pipeline runtime names it: `PP:0F1`.
/// Without a profiler that listens it costs some nanoseconds, and no name is made.
class profiler_label {
 public:
  explicit profiler_label(action what) : range_(at::RecordScope::USER_SCOPE) {
    if (!range_.isActive()) return;
    name_ = "PP:" + to_text(what).str();
    range_.before(std::string_view(name_));
  }

 private:
  std::string name_;  // outlives the range
  at::RecordFunction range_;
};

}  // namespace chevron
