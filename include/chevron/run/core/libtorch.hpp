#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/version.h>

/// \file
/// The differences between supported versions of LibTorch. 2.9 is the oldest: earlier versions cannot change a Gloo group's
/// timeout (no `Backend::setTimeout`) and lack a common interface of devices' allocators (`c10::DeviceAllocator`). Each
/// difference is detected from LibTorch's declarations, so builds between two releases also work.

#if TORCH_VERSION_MAJOR < 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9)
#error "Chevron needs LibTorch 2.9 or later: pass CMake -DCHEVRON_TORCH_DIR=<folder of a newer one>"
#endif

namespace chevron::detail {

/// Whether `std::shared_ptr` owns the nodes of autograd's graph (LibTorch up to 2.12) or `c10::intrusive_ptr` does (from 2.13).
inline constexpr bool shares_nodes =
    std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<torch::autograd::Node>>;
template <class Node = torch::autograd::Node>
using node_ptr = std::conditional_t<shares_nodes, std::shared_ptr<Node>, c10::intrusive_ptr<Node>>;

template <class Node, class... Args>
node_ptr<Node> make_node(Args&&... args) {
  if constexpr (shares_nodes) {
    return std::make_shared<Node>(std::forward<Args>(args)...);
  } else {
    return c10::make_intrusive<Node>(std::forward<Args>(args)...);
  }
}

/// Free and total bytes of a device; zeros with LibTorch 2.9, whose allocators lack `getMemoryInfo` (new in 2.10).
struct device_memory {
  std::int64_t free = 0, total = 0;
};
template <class Allocator>
device_memory memory_of(Allocator& from, c10::DeviceIndex index) {
  if constexpr (requires { from.getMemoryInfo(index); }) {
    auto const [free, total] = from.getMemoryInfo(index);
    return {static_cast<std::int64_t>(free), static_cast<std::int64_t>(total)};
  } else {
    return {};
  }
}

}  // namespace chevron::detail
