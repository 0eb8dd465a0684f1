#pragma once

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

/// \file
/// The threads of this process that compute on an accelerator.

namespace chevron::detail {

/// Registers the calling thread as a user of a device while the object lives. A process has one allocator and one default
/// random generator per device: ranks that are threads check here whether they share a device.
class device_thread {
 public:
  explicit device_thread(at::Device where) : mine_{where, std::this_thread::get_id()} {
    auto& [mutex, all] = of_process();
    std::lock_guard const hold(mutex);
    all.push_back(mine_);
  }
  ~device_thread() {
    auto& [mutex, all] = of_process();
    std::lock_guard const hold(mutex);
    all.erase(std::find(all.begin(), all.end(), mine_));
  }
  device_thread(device_thread const&) = delete;
  device_thread& operator=(device_thread const&) = delete;

  /// Whether several threads compute on this device.
  static bool share(at::Device where) {
    return differ([&](use const& one) { return one.first == where; });
  }
  /// Whether several threads compute on accelerators of this type.
  static bool share(at::DeviceType kind) {
    return differ([&](use const& one) { return one.first.type() == kind; });
  }

 private:
  using use = std::pair<at::Device, std::thread::id>;
  struct uses {
    std::mutex mutex;
    std::vector<use> all;
  };

  static uses& of_process() {
    static uses one;
    return one;
  }
  template <class Counts>
  static bool differ(Counts const& counts) {
    auto& [mutex, all] = of_process();
    std::lock_guard const hold(mutex);
    auto const first = std::find_if(all.begin(), all.end(), counts);
    return std::any_of(first, all.end(), [&](use const& one) { return counts(one) && one.second != first->second; });
  }

  use mine_;
};

}  // namespace chevron::detail
