#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

/// Counts the bytes of tensors that are alive, and the most there were.
class counting_allocator final : public c10::Allocator {
 public:
  static counting_allocator& installed() {
    static counting_allocator one;
    static bool const set = (c10::SetCPUAllocator(&one, 1), true);
    static_cast<void>(set);
    return one;
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    // The size stands in front; a vector register needs 64 bytes of alignment.
    auto* const block = static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64));
    std::memcpy(block, &bytes, sizeof bytes);
    std::int64_t const now = live += static_cast<std::int64_t>(bytes);
    for (std::int64_t most = peak; now > most && !peak.compare_exchange_weak(most, now);) {
    }
    return {block + 64, block + 64, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, void const* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  std::atomic<std::int64_t> live = 0, peak = 0;

 private:
  static void release(void* memory) {
    char* const block = static_cast<char*>(memory) - 64;
    std::size_t bytes = 0;
    std::memcpy(&bytes, block, sizeof bytes);
    installed().live -= static_cast<std::int64_t>(bytes);
    std::free(block);
  }
};
