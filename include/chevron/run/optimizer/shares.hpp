#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// \file
/// How the parameters of a stage are cut into shares, one for each replica.

namespace chevron::detail {

/// Cuts a row of parameters into shares of nearly equal size. Replica r's share are the elements [cut[r], cut[r + 1]) of the row.
/// \param sizes elements of each parameter \param blocks of each, the elements that stay together from its beginning: a share
/// begins between two parameters or between two blocks of one, at the place next to an equal cut
/// \returns replicas + 1 offsets, ascending, from 0 to the end of the row
inline std::vector<std::int64_t> cut_into_shares(std::span<std::int64_t const> sizes, std::span<std::int64_t const> blocks,
                                                 int replicas) {
  std::int64_t total = 0;
  for (std::int64_t const size : sizes) total += size;
  std::vector<std::int64_t> cut{0};
  std::int64_t begin = 0;  // of the parameter in the row
  std::size_t i = 0;
  for (int r = 1; r < replicas; ++r) {
    std::int64_t const wanted = total / replicas * r + total % replicas * r / replicas;
    while (i < sizes.size() && begin + sizes[i] <= wanted) begin += sizes[i++];
    if (i == sizes.size()) {
      cut.push_back(total);
      continue;
    }
    std::int64_t const before = (wanted - begin) / blocks[i] * blocks[i];
    std::int64_t const behind = before + blocks[i] < sizes[i] ? before + blocks[i] : sizes[i];
    std::int64_t const next = wanted - begin - before <= behind - (wanted - begin) ? before : behind;
    cut.push_back(begin + next > cut.back() ? begin + next : cut.back());
  }
  cut.push_back(total);
  return cut;
}

}  // namespace chevron::detail
