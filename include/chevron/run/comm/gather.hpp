#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/wait_table.hpp>

/// \file
/// The header of each rank's part of a gather, in every transport: by it, ranks detect that they are in different gathers.

namespace chevron {

/// The two gathers that may be under way at the same time: of `all_gather` (blocking) and of `start_all_gather` (split_phase).
enum class gather_slot : std::uint8_t { blocking, split_phase };

namespace detail {

/// Precedes a rank's bytes in a gather. Without headers, ranks in different gathers would exchange numbers without noticing.
struct gather_header {
  std::uint64_t bytes = 0;
  std::int64_t step = -1;
  std::int64_t program = 0;  // number of the program of the transport's last `open`
  char words[48] = {};
};

/// Writes a header, followed by a rank's bytes, into `out`.
/// \param about description of the call, for the header
inline void put_header(std::vector<std::byte>& out, std::span<std::byte const> mine, awaited const& about, long program) {
  gather_header first{.bytes = mine.size(), .step = about.step, .program = program};
  std::strncpy(first.words, about.words, sizeof first.words - 1);
  out.resize(sizeof first + mine.size());
  std::memcpy(out.data(), &first, sizeof first);
  std::copy(mine.begin(), mine.end(), out.begin() + sizeof first);
}

inline gather_header header_of(std::span<std::byte const> whole) {
  gather_header out;
  std::memcpy(&out, whole.data(), sizeof out);
  out.words[sizeof out.words - 1] = 0;
  return out;
}

/// Compares the header of rank `r` with this rank's header, and returns the bytes after it.
/// \param whole the part of rank r as received; truncated if rank r gathers another number of bytes
/// \param own  the part of this rank, with its header
/// \param rank  this rank
/// \throws preflight_error if rank r is in another gather, or its header has another size or another program's number
inline std::span<std::byte const> without_header(std::span<std::byte const> whole, int r, std::span<std::byte const> own,
                                                 int rank, awaited const& about) {
  gather_header const theirs = header_of(whole), mine = header_of(own);
  error_context const here{.rank = rank, .peer = r, .step = about.step, .action = about.action_text()};
  if (std::strncmp(theirs.words, about.words, sizeof theirs.words - 1) != 0) {
    awaited const other{.words = theirs.words, .step = theirs.step};
    throw preflight_error(different_calls(r, other.text(), rank, about.text()), here);
  }
  if (theirs.program != mine.program) {
    throw preflight_error(
        "rank " + std::to_string(r) + " has called another trainer or evaluator than rank " + std::to_string(rank) +
            ": messages of one model would reach the other model. Remedy: every rank makes and calls its trainers and "
            "evaluators in the same order",
        here);
  }
  if (theirs.bytes != mine.bytes) {
    throw preflight_error("rank " + std::to_string(r) + " gathers " + std::to_string(theirs.bytes) + " bytes where rank " +
                              std::to_string(rank) + " gathers " + std::to_string(mine.bytes) +
                              ". Remedy: every rank gathers as many numbers",
                          here);
  }
  return whole.subspan(sizeof theirs, mine.bytes);
}

/// The counter of a slot's gathers in `wait_progress`.
inline wait_need::count count_of(gather_slot slot) {
  return slot == gather_slot::blocking ? wait_need::count::gathers : wait_need::count::early_gathers;
}

}  // namespace detail
}  // namespace chevron
