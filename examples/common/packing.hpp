#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>
#include <span>
#include <vector>

/// \file
/// Puts pieces of text into windows of one length, whole.

namespace chevron::train {

/// Distributes pieces among as few windows as best-fit decreasing finds: longest pieces first, each into the window in which it
/// leaves the least room (Johnson, Near-optimal bin packing algorithms, 1973: at most 11/9 of the fewest windows, and a few).
/// The result depends on the lengths alone, so all ranks compute the same.
/// \param lengths of the pieces, each from 1 to `room` \param room length of a window
/// \returns for each window the numbers of its pieces, ascending; windows are in the order of their first pieces
inline std::vector<std::vector<std::size_t>> packed(std::span<std::size_t const> lengths, std::size_t room) {
  std::vector<std::size_t> order(lengths.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return lengths[a] > lengths[b]; });
  std::vector<std::vector<std::size_t>> windows;
  std::multimap<std::size_t, std::size_t> rooms;  // room that is left, window
  for (std::size_t const piece : order) {
    auto const best = rooms.lower_bound(lengths[piece]);
    std::size_t left = room, window = windows.size();
    if (best == rooms.end()) {
      windows.emplace_back();
    } else {
      left = best->first;
      window = best->second;
      rooms.erase(best);
    }
    windows[window].push_back(piece);
    if (left > lengths[piece]) rooms.emplace(left - lengths[piece], window);
  }
  for (auto& pieces : windows) std::sort(pieces.begin(), pieces.end());
  std::sort(windows.begin(), windows.end(), [](auto const& a, auto const& b) { return a.front() < b.front(); });
  return windows;
}

}  // namespace chevron::train
