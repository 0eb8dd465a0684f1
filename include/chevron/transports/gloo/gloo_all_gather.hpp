#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <chevron/run/comm/gather.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/transports/gloo/bounded_wait.hpp>
#include <chevron/transports/gloo/process_group.hpp>
#include <chevron/transports/shared_memory/shared_memory.hpp>

/// \file
/// Gathers over the world for `gloo_transport`.

namespace chevron::detail {

/// Gathers over Gloo, or in shared memory if all ranks are on one machine. Gloo ends the process if ranks gather different
/// sizes. So the first gather has a block of fixed size from each rank, which mostly suffices; longer parts follow in a second
/// gather, if the headers in the blocks show that all ranks gather the same size.
class gloo_all_gather {
 public:
  gloo_all_gather(topology const& where, bounded_wait& waits) : where_(where), waits_(waits) {}

  /// Set the connections, and the shared memory, that gathers use; both must outlive the last gather.
  void connect(c10d::ProcessGroupGloo& world) { world_ = &world; }
  void share(shared_memory& memory) {
    std::vector<int> all(static_cast<std::size_t>(where_.world()));
    std::iota(all.begin(), all.end(), 0);
    if (memory.are_near(all)) memory_ = &memory;
  }

  void start(gather_slot slot, std::span<std::byte const> mine, awaited const& about) {
    round& now = rounds_[static_cast<std::size_t>(slot)];
    now.shown = memory_ != nullptr && mine.size() <= shared_memory::largest_gather;
    if (now.shown) return memory_->show(slot, mine.data(), mine.size());
    now.mine = mine;
    std::array<std::byte, block_bytes> block{};
    std::copy_n(mine.begin(), std::min(mine.size(), block.size()), block.begin());
    gather(now, block, about);
  }

  void finish(gather_slot slot, awaited const& about, std::vector<std::span<std::byte const>>& parts) {
    round& now = rounds_[static_cast<std::size_t>(slot)];
    auto const world = static_cast<std::size_t>(where_.world());
    parts.resize(world);
    if (now.shown) {
      waits_.memory(*memory_, about, [&] { return memory_->all_shown(slot); });
      for (std::size_t r = 0; r < world; ++r) parts[r] = memory_->shown_by(static_cast<int>(r), slot);
      return;
    }
    wait_for(now, about, parts);
    auto const bytes = [](std::span<std::byte const> part) { return header_of(part).bytes; };
    bool const alike = std::all_of(parts.begin(), parts.end(), [&](auto const& part) { return bytes(part) == bytes(parts[0]); });
    if (!alike || now.mine.size() <= block_bytes) return;
    gather(now, now.mine, about);
    wait_for(now, about, parts);
  }

 private:
  struct round {
    bool shown = false;
    std::span<std::byte const> mine;
    at::Tensor all;
    bounded_wait::work_ptr work;
  };

  static constexpr std::size_t block_bytes = 1024;

  void gather(round& now, std::span<std::byte const> mine, awaited const& about) {
    // Gloo keeps references to both tensors while it works on them: longer than this rank's wait, if the wait fails.
    auto const size = static_cast<std::int64_t>(mine.size());
    at::Tensor own = at::empty({size}, at::kByte);
    std::memcpy(own.mutable_data_ptr(), mine.data(), mine.size());
    now.all = at::empty({where_.world() * size}, at::kByte);
    now.work = waits_.posting(about, [&] { return world_->_allgather_base(now.all, own); });
  }
  void wait_for(round& now, awaited const& about, std::vector<std::span<std::byte const>>& parts) {
    waits_.collective(std::exchange(now.work, {}), about);
    std::size_t const size = now.all.nbytes() / parts.size();
    auto const* const all = static_cast<std::byte const*>(now.all.const_data_ptr());
    for (std::size_t r = 0; r < parts.size(); ++r) parts[r] = {all + r * size, size};
  }

  topology where_;
  bounded_wait& waits_;
  c10d::ProcessGroupGloo* world_ = nullptr;
  shared_memory* memory_ = nullptr;  // null: not all ranks share memory
  std::array<round, 2> rounds_;      // indexed by gather_slot
};

}  // namespace chevron::detail
