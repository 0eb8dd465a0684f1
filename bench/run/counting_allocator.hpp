#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

/// \file
/// Bytes of tensors on the CPU by the rank, a thread, that made them.

namespace bench {

inline constexpr int most_ranks = 64;

/// Of this thread; `most_ranks`: it is none's.
inline thread_local int this_rank = most_ranks;

/// Counts the bytes of tensors alive, by the rank that made them.
class counting_allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* const block = static_cast<char*>(std::aligned_alloc(64, (bytes + 127) / 64 * 64));
    header const mine{static_cast<std::int64_t>(bytes), this_rank};
    std::memcpy(block, &mine, sizeof mine);
    std::int64_t const now = live[this_rank] += mine.bytes;
    for (std::int64_t most = peak[this_rank]; now > most && !peak[this_rank].compare_exchange_weak(most, now);) {
    }
    return {block + 64, block + 64, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, void const* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }

  static inline std::atomic<std::int64_t> live[most_ranks + 1], peak[most_ranks + 1];

 private:
  struct header {
    std::int64_t bytes;
    int rank;
  };
  static void release(void* memory) {
    char* const block = static_cast<char*>(memory) - 64;
    header mine{};
    std::memcpy(&mine, block, sizeof mine);
    live[mine.rank] -= mine.bytes;
    std::free(block);
  }
};

}  // namespace bench
