#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <chevron/run/core/error.hpp>
#include <chevron/run/failure/failure.hpp>
#include <chevron/run/failure/wait_table.hpp>

/// \file
/// The header of a gather's parts, the same over every transport: it shows ranks that are in different gathers.

namespace chevron {

/// The two gathers that may be under way at the same time: that of `all_gather`, and that of `start_all_gather`.
enum class gather_slot : std::uint8_t { blocking, split_phase };

namespace detail {

/// Precedes a rank's bytes in a gather. Without it, ranks in different gathers would take each other's numbers for their own.
struct gather_header {
  std::uint64_t bytes = 0;
  std::int64_t step = -1;
  std::int64_t program = 0;  // number of the program whose messages this transport carried last
  char words[48] = {};
};

/// Writes a header and a rank's bytes behind it into `out`.
/// \param about the call, whose words go into the header
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

/// The bytes of rank `r` behind their header.
/// \param whole the part of rank r as received; cut off if that rank gathers another number of bytes
/// \param own  the part of this rank, with its header
/// \param rank  this rank
/// \throws preflight_error if rank r is in another gather, or its gather has another size or follows another program's messages
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
            ": one model's messages were taken for the other's. Remedy: every rank makes trainers and evaluators, and calls "
            "them, in the same order",
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

/// The count of a slot's gathers in the progress of ranks.
inline wait_need::count count_of(gather_slot slot) {
  return slot == gather_slot::blocking ? wait_need::count::gathers : wait_need::count::early_gathers;
}

}  // namespace detail
}  // namespace chevron
