#pragma once

// The memory of the simulated device, with the rules of CUDA's caching allocator: freed memory returns at once to the stream on
// which it was allocated, which may reuse it; memory that was recorded for other streams returns only when that stream or the
// host knows that they have passed the point at which it was freed.
//
// Prefers the memory that shows a missing order: memory that another stream has used and that the stream does not follow yet.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>

#include "accelerator/clocks.hpp"

namespace accelerator {

/// Memory that is given out as a whole.
struct block {
  char* memory = nullptr;
  char* late = nullptr;  // its contents as streams see it that run late (late.hpp)
  std::size_t size = 0;
  int device = 0;
  int stream = 0;  // on which it was allocated
  bool given_out = false;
  std::vector<int> recorded;                                // streams that also use it
  std::vector<std::pair<int, std::uint32_t>> comes_before;  // freed: how far those streams were
  block_history history;
};

class device_allocator final : public c10::DeviceAllocator {
 public:
  static device_allocator& instance();

  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, void const* from, std::size_t bytes) const override;

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override;
  void recordStream(c10::DataPtr const& of, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override;

  /// Limits the memory of a device. If the memory is full, the allocator waits for the device if that runs late (late.hpp),
  /// frees its cached memory and tries again, as CUDA's does.
  void limit(std::int64_t bytes);
  static constexpr std::int64_t usual_limit = std::int64_t{1} << 30;

  /// The block that holds this address of a device; null for an address that is none.
  block* find(void const* address);
  /// How many blocks are given out.
  int in_use();
  /// Frees all memory, which must not be used any more, and forgets the streams.
  void reset();

 private:
  struct use {
    std::int64_t now = 0, peak = 0, reserved = 0, retries = 0;
  };
  struct freed {
    std::vector<block*> free, recorded;  // to be given out; still waiting for the streams they were recorded for
  };

  void free(block& b);
  block* take(freed& from, int stream);
  /// Gives cached memory back. It stays mapped, and is not reused, until `reset`: work of the device may be under way there.
  void give_back(int device);
  static void spoil(block& b);
  static void release(void* context);

  std::mutex mutex_;
  std::map<char const*, std::unique_ptr<block>> blocks_;  // by address
  std::map<std::pair<int, std::size_t>, freed> freed_;    // by stream and size
  std::map<int, use> uses_;                               // by device
  std::int64_t limit_ = usual_limit;
};

}  // namespace accelerator
