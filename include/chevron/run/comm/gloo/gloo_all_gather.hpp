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

#include <chevron/run/comm/gloo/bounded_wait.hpp>
#include <chevron/run/comm/gloo/process_group.hpp>
#include <chevron/run/comm/shared_memory/shared_memory.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/failure/failure.hpp>

/// \file
/// What every rank gives to all.

namespace chevron::detail {

/// Gathers of two kinds, one of each under way at a time, in two halves: a rank's bytes at the start are everybody's at the end.
/// Over Gloo, or if all ranks are on one machine in the memory they share.
class gloo_all_gather {
 public:
  using exchange_buffer = shared_memory::exchange_buffer;

  gloo_all_gather(topology const& where, bounded_wait& waits) : where_(where), waits_(waits) {}

  /// Both must outlive the last gather.
  void connect(c10d::ProcessGroupGloo& world) { world_ = &world; }
  void share(shared_memory& memory) {
    std::vector<int> all(static_cast<std::size_t>(where_.world()));
    std::iota(all.begin(), all.end(), 0);
    if (memory.are_near(all)) memory_ = &memory;
  }

  void start(exchange_buffer which, void const* mine, std::size_t bytes, awaited const& about) {
    round& now = rounds_[static_cast<std::size_t>(which)];
    now.bytes = bytes;
    if (bytes == 0) return;
    auto const size = static_cast<std::int64_t>(sizeof(header) + bytes);
    if (!now.mine.defined() || now.mine.numel() != size) now.mine = at::empty({size}, at::kByte);
    header first{.bytes = bytes, .step = about.step};
    std::strncpy(first.words, about.words, sizeof first.words - 1);
    auto* const to = static_cast<std::byte*>(now.mine.data_ptr());
    std::memcpy(to, &first, sizeof first);
    std::memcpy(to + sizeof first, mine, bytes);
    now.shown = memory_ != nullptr && now.mine.nbytes() <= shared_memory::largest_gather;
    if (now.shown) return memory_->show(which, now.mine.data_ptr(), now.mine.nbytes());
    if (!now.all.defined() || now.all.numel() != where_.world() * size) now.all = at::empty({where_.world() * size}, at::kByte);
    if (where_.world() == 1) {
      now.all.copy_(now.mine);
    } else {
      now.work = waits_.posting(about, [&] { return world_->_allgather_base(now.all, now.mine); });
    }
  }

  /// \param all room for the bytes of all ranks, in their order
  void finish(exchange_buffer which, void* all, awaited const& about) {
    round& now = rounds_[static_cast<std::size_t>(which)];
    if (now.bytes == 0) return;
    if (now.shown) waits_.memory(*memory_, about, [&] { return memory_->all_shown(which); });
    if (now.work) waits_.collective(std::exchange(now.work, {}), about);
    auto* to = static_cast<std::byte*>(all);
    for (int r = 0; r < where_.world(); ++r, to += now.bytes) {
      std::byte const* const from =
          now.shown ? memory_->shown_by(r, which).first
                    : static_cast<std::byte const*>(now.all.const_data_ptr()) + static_cast<std::size_t>(r) * now.mine.nbytes();
      check(from, r, now.bytes, about);
      std::memcpy(to, from + sizeof(header), now.bytes);
    }
  }

 private:
  /// What stands before a rank's bytes: ranks that mean different gathers would take each other's numbers for theirs.
  struct header {
    std::uint64_t bytes;
    std::int64_t step;
    char words[32] = {};
  };
  struct round {
    std::size_t bytes = 0;
    bool shown = false;
    at::Tensor mine, all;
    bounded_wait::work_ptr work;
  };

  void check(std::byte const* from, int r, std::size_t bytes, awaited const& about) const {
    header theirs;
    std::memcpy(&theirs, from, sizeof theirs);
    theirs.words[sizeof theirs.words - 1] = 0;
    error_context const here{.rank = where_.global_rank, .peer = r, .step = about.step, .action = about.action_text()};
    if (std::strncmp(theirs.words, about.words, sizeof theirs.words - 1) != 0) {
      awaited const other{.words = theirs.words, .step = theirs.step};
      throw preflight_error(different_calls(r, other.text(), where_.global_rank, about.text()), here);
    }
    if (theirs.bytes == bytes) return;
    throw preflight_error("rank " + std::to_string(r) + " gathers " + std::to_string(theirs.bytes) + " bytes where rank " +
                              std::to_string(where_.global_rank) + " gathers " + std::to_string(bytes),
                          here);
  }

  topology where_;
  bounded_wait& waits_;
  c10d::ProcessGroupGloo* world_ = nullptr;
  shared_memory* memory_ = nullptr;  // null: a rank is elsewhere
  std::array<round, 2> rounds_;      // by board
};

}  // namespace chevron::detail
