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
/// Tensors of an accelerator, handed from thread to thread of one process.

namespace chevron::detail {

/// Orders one thread's use of tensors after another thread's computation, by an event between their streams. Nothing is done for
/// tensors in main memory. Tensors for another device are copied, directly if the devices can access each other's memory.
///
/// Events are reused after their handoffs are destroyed.
class stream_handoff {
 public:
  /// Records the computation of the values. Called by the computing thread, on its current stream.
  void record(std::span<at::Tensor const> values) {
    ready_.reset();
    for (at::Tensor const& value : values) {
      if (!value.defined() || value.is_cpu()) continue;
      ready_ = spare_event(value.device());
      ready_->record(c10::impl::VirtualGuardImpl(value.device().type()).getStream(value.device()));
      return;
    }
  }

  /// Makes values usable on the current stream of the current device, and copies those of other devices to it. Called by the
  /// receiving thread.
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

  /// Makes the current stream of the current device wait for the computation; tensors stay where they are.
  void wait_for() const {
    if (ready_) wait_for(c10::impl::VirtualGuardImpl(ready_->device_type()).getDevice());
  }
  /// Makes the current stream of another device wait.
  void wait_for(at::Device where) const {
    if (ready_) ready_->block(c10::impl::VirtualGuardImpl(ready_->device_type()).getStream(where));
  }

 private:
  struct event_pool {
    std::mutex mutex;
    std::unordered_map<at::Device, std::vector<std::unique_ptr<c10::Event>>> spare;
  };

  /// The spare events of this process; never destroyed, since events cannot be released after the driver has ended.
  static event_pool& pool() {
    static event_pool& one = *new event_pool;
    return one;
  }
  /// An event of a device, without waiters; returned to the pool when all handoffs have released it.
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
