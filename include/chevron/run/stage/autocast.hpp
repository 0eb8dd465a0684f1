#pragma once

#include <optional>
#include <span>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>

/// \file
/// Mixed precision by PyTorch's autocast: parameters' dtypes are unchanged; operators run in half precision if autocast allows.

namespace chevron::detail {

/// During the object's lifetime, runs this thread's operators under autocast to `dtype`, on the device type of the first
/// defined tensor of `near`. Casts of parameters are not cached: each microbatch has its own graph. No effect without `dtype`.
class autocast_scope {
 public:
  autocast_scope(std::optional<at::ScalarType> dtype, std::span<at::Tensor const> near) {
    if (!dtype) return;
    on_ = true;
    for (at::Tensor const& t : near) {
      if (!t.defined()) continue;
      device_ = t.device().type();
      break;
    }
    enabled_ = at::autocast::is_autocast_enabled(device_);
    dtype_ = at::autocast::get_autocast_dtype(device_);
    cache_ = at::autocast::is_autocast_cache_enabled();
    at::autocast::set_autocast_enabled(device_, true);
    at::autocast::set_autocast_dtype(device_, *dtype);
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~autocast_scope() {
    if (!on_) return;
    at::autocast::set_autocast_enabled(device_, enabled_);
    at::autocast::set_autocast_dtype(device_, dtype_);
    at::autocast::set_autocast_cache_enabled(cache_);
  }
  autocast_scope(autocast_scope const&) = delete;
  autocast_scope& operator=(autocast_scope const&) = delete;

 private:
  bool on_ = false;
  at::DeviceType device_ = at::kCPU;
  bool enabled_ = false, cache_ = false;
  at::ScalarType dtype_ = at::kFloat;
};

}  // namespace chevron::detail
