#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

/// \file
/// Passes tensors of an accelerator between threads of a process.

namespace chevron::detail {

/// Makes one thread's stream wait, by an event, until another thread's stream has computed tensors. Does nothing for tensors in
/// main memory. Copies tensors to the receiving thread's device, directly if the devices can access each other's memory.
///
/// An event is reused once all handoffs that refer to it are destroyed.
class stream_handoff {
 public:
  /// Records an event after the computation of the values, on the current stream. Called by the computing thread.
  void record(std::span<at::Tensor const> values) {
    ready_.reset();
    for (at::Tensor const& value : values) {
      if (!value.defined() || value.is_cpu()) continue;
      ready_ = spare_event(value.device());
      ready_->record(c10::impl::VirtualGuardImpl(value.device().type()).getStream(value.device()));
      return;
    }
  }

  /// Makes the current stream of the current device wait for the values, and copies values of other devices to the current
  /// device. Called by the receiving thread.
  void acquire(std::span<at::Tensor> values) {
    if (!ready_) return;
    c10::impl::VirtualGuardImpl const device(ready_->device_type());
    at::Device const here = device.getDevice();
    c10::Stream const stream = device.getStream(here);
    ready_->block(stream);
    for (at::Tensor& value : values) {
      if (!value.defined() || value.is_cpu()) continue;
      if (value.device() == here) {
        value.record_stream(stream);
        continue;
      }
      // The copy runs on the current stream of the source's device, whose allocator must not reuse that memory before the copy.
      at::Tensor const source = value;
      value = source.to(here, /*non_blocking=*/true);
      source.record_stream(device.getStream(source.device()));
      value.record_stream(stream);
    }
    ready_.reset();
  }

  /// Makes the current stream of the current device wait for the computation; copies nothing.
  void wait_for() const {
    if (ready_) wait_for(c10::impl::VirtualGuardImpl(ready_->device_type()).getDevice());
  }
  /// Makes the current stream of device `where` wait for the computation.
  void wait_for(at::Device where) const {
    if (ready_) ready_->block(c10::impl::VirtualGuardImpl(ready_->device_type()).getStream(where));
  }

 private:
  struct event_pool {
    std::mutex mutex;
    std::unordered_map<at::Device, std::vector<std::unique_ptr<c10::Event>>> spare;
  };

  /// The unused events of this process; never destroyed, since events cannot be released after the driver has ended.
  static event_pool& pool() {
    static event_pool& one = *new event_pool;
    return one;
  }
  /// Returns an unused event of a device; the event returns to the pool when no handoff refers to it any more.
  static std::shared_ptr<c10::Event> spare_event(at::Device where) {
    std::unique_ptr<c10::Event> taken;
    {
      std::lock_guard const hold(pool().mutex);
      if (auto& spare = pool().spare[where]; !spare.empty()) {
        taken = std::move(spare.back());
        spare.pop_back();
      }
    }
    if (!taken) taken = std::make_unique<c10::Event>(where.type());
    return {taken.release(), [where](c10::Event* e) {
              std::lock_guard const hold(pool().mutex);
              pool().spare[where].emplace_back(e);
            }};
  }

  std::shared_ptr<c10::Event> ready_;
};

}  // namespace chevron::detail
