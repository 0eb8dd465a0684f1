#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <chevron/run/error.hpp>
#include <chevron/run/failure.hpp>
#include <chevron/run/gloo_group.hpp>
#include <chevron/run/shared_memory.hpp>
#include <chevron/run/transport.hpp>
#include <chevron/run/waits.hpp>

/// \file
/// What every rank gives to all.

namespace chevron::detail {

/// Gathers of two kinds, one of each under way at a time, in two halves: a rank's bytes at the start are everybody's at the end.
/// Over Gloo, or if all ranks are on one machine in the memory they share.
class gathers {
 public:
  using board = shared_memory::board;

  gathers(layout const& where, bounded_waits& waits) : where_(where), waits_(waits) {}

  /// Both must outlive the last gather.
  void connect(c10d::ProcessGroupGloo& world) { world_ = &world; }
  void share(shared_memory& memory) {
    std::vector<int> all(static_cast<std::size_t>(where_.world()));
    std::iota(all.begin(), all.end(), 0);
    if (memory.are_near(all)) memory_ = &memory;
  }

  void start(board which, void const* mine, std::size_t bytes, awaited const& about) {
    round& now = rounds_[static_cast<std::size_t>(which)];
    now.bytes = bytes;
    if (bytes == 0) return;
    now.shown = memory_ != nullptr && bytes <= shared_memory::largest_gather;
    if (now.shown) return memory_->show(which, mine, bytes);
    auto const size = static_cast<std::int64_t>(bytes);
    if (!now.mine.defined() || now.mine.numel() != size) {
      now.mine = at::empty({size}, at::kByte);
      now.all = at::empty({where_.world() * size}, at::kByte);
    }
    std::memcpy(now.mine.data_ptr(), mine, bytes);
    if (where_.world() == 1) {
      std::memcpy(now.all.data_ptr(), mine, bytes);
    } else {
      now.work = waits_.posting(about, [&] { return world_->_allgather_base(now.all, now.mine); });
    }
  }

  /// \param all room for the bytes of all ranks, in their order
  void finish(board which, void* all, awaited const& about) {
    round& now = rounds_[static_cast<std::size_t>(which)];
    if (now.bytes == 0) return;
    if (now.shown) return read_all(which, now.bytes, static_cast<std::byte*>(all), about);
    if (now.work) waits_.collective(std::exchange(now.work, {}), about);
    std::memcpy(all, now.all.data_ptr(), now.all.nbytes());
  }

 private:
  struct round {
    std::size_t bytes = 0;
    bool shown = false;
    at::Tensor mine, all;
    bounded_waits::work_ptr work;
  };

  void read_all(board which, std::size_t bytes, std::byte* to, awaited const& about) {
    waits_.memory(*memory_, about, [&] { return memory_->all_shown(which); });
    for (int r = 0; r < where_.world(); ++r, to += bytes) {
      auto const [from, count] = memory_->shown_by(r, which);
      if (count != bytes) {
        throw preflight_error("rank " + std::to_string(r) + " gathers " + std::to_string(count) + " bytes where rank " +
                                  std::to_string(where_.global_rank) + " gathers " + std::to_string(bytes),
                              {.rank = where_.global_rank, .peer = r, .step = about.step, .action = about.action_text()});
      }
      std::memcpy(to, from, bytes);
    }
  }

  layout where_;
  bounded_waits& waits_;
  c10d::ProcessGroupGloo* world_ = nullptr;
  shared_memory* memory_ = nullptr;  // null: a rank is elsewhere
  std::array<round, 2> rounds_;      // by board
};

}  // namespace chevron::detail
