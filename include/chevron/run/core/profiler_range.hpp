#pragma once

#include <string>
#include <string_view>

#include <ATen/record_function.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <chevron/plan/action.hpp>

/// \file
/// Marks actions as ranges in PyTorch's profilers.

namespace chevron::detail {

/// Opens a range in PyTorch's profilers while the object lives, named as in PyTorch's own pipeline runtime: `PP:0F1`. On a GPU
/// also opens an NVTX range, for Nsight Systems. On the CPU, without an active profiler, it takes some nanoseconds and
/// makes no name.
class profiler_range {
 public:
  profiler_range(action what, int slices, bool on_gpu) : range_(at::RecordScope::USER_SCOPE), on_gpu_(on_gpu) {
    if (!range_.isActive() && !on_gpu_) return;
    name_ = "PP:" + to_text(what, slices).str();
    if (range_.isActive()) range_.before(std::string_view(name_));
    if (on_gpu_) torch::profiler::impl::cudaStubs()->rangePush(name_.c_str());
  }
  ~profiler_range() {
    if (on_gpu_) torch::profiler::impl::cudaStubs()->rangePop();
  }
  profiler_range(profiler_range const&) = delete;
  profiler_range& operator=(profiler_range const&) = delete;

 private:
  std::string name_;  // must outlive the range
  at::RecordFunction range_;
  bool on_gpu_;
};

}  // namespace chevron::detail
