#include <algorithm>
#include <cstddef>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "common/packing.hpp"

namespace {

using windows = std::vector<std::vector<std::size_t>>;

std::size_t filled(std::vector<std::size_t> const& pieces, std::vector<std::size_t> const& lengths) {
  std::size_t sum = 0;
  for (std::size_t const piece : pieces) sum += lengths[piece];
  return sum;
}

/// Best-fit decreasing by the definition alone: each piece looks at all windows.
windows by_looking(std::vector<std::size_t> const& lengths, std::size_t room) {
  windows out;
  std::size_t const longest = lengths.empty() ? 0 : *std::max_element(lengths.begin(), lengths.end());
  for (std::size_t length = longest; length > 0; --length) {
    for (std::size_t piece = 0; piece < lengths.size(); ++piece) {
      if (lengths[piece] != length) continue;
      std::vector<std::size_t>* best = nullptr;
      for (auto& window : out) {
        bool const fits = filled(window, lengths) + length <= room;
        if (fits && (best == nullptr || filled(window, lengths) > filled(*best, lengths))) best = &window;
      }
      if (best == nullptr) best = &out.emplace_back();
      best->push_back(piece);
    }
  }
  return out;
}

/// The fewest windows, by trying all.
std::size_t fewest(std::vector<std::size_t> const& lengths, std::size_t room, std::size_t next, std::vector<std::size_t>& used,
                   std::size_t best) {
  if (used.size() >= best) return best;
  if (next == lengths.size()) return used.size();
  for (std::size_t w = 0; w < used.size(); ++w) {
    if (used[w] + lengths[next] > room) continue;
    used[w] += lengths[next];
    best = fewest(lengths, room, next + 1, used, best);
    used[w] -= lengths[next];
  }
  used.push_back(lengths[next]);
  best = fewest(lengths, room, next + 1, used, best);
  used.pop_back();
  return best;
}

}  // namespace

TEST_CASE("each piece is in one window, no window is too full, and windows follow their first pieces") {
  std::mt19937 draw(5);
  for (std::size_t room : {1, 2, 7, 64}) {
    for (std::size_t count : {0, 1, 2, 9, 300}) {
      std::vector<std::size_t> lengths(count);
      for (std::size_t& length : lengths) length = 1 + draw() % room;
      CAPTURE(room);
      CAPTURE(count);
      windows const got = chevron::train::packed(lengths, room);
      std::vector<std::size_t> seen;
      for (auto const& pieces : got) {
        REQUIRE_FALSE(pieces.empty());
        CHECK(filled(pieces, lengths) <= room);
        CHECK(std::is_sorted(pieces.begin(), pieces.end()));
        seen.insert(seen.end(), pieces.begin(), pieces.end());
      }
      CHECK(std::is_sorted(got.begin(), got.end(), [](auto const& a, auto const& b) { return a.front() < b.front(); }));
      std::sort(seen.begin(), seen.end());
      REQUIRE(seen.size() == count);
      for (std::size_t piece = 0; piece < count; ++piece) CHECK(seen[piece] == piece);
      // As full as windows are that look for their pieces one by one.
      auto const levels = [&](windows const& all) {
        std::vector<std::size_t> out;
        for (auto const& pieces : all) out.push_back(filled(pieces, lengths));
        std::sort(out.begin(), out.end());
        return out;
      };
      CHECK(levels(got) == levels(by_looking(lengths, room)));
    }
  }
}

TEST_CASE("windows are at most 11/9 of the fewest, and a few") {
  std::mt19937 draw(6);
  for (int round = 0; round < 100; ++round) {
    std::size_t const room = 5 + draw() % 20;
    std::vector<std::size_t> lengths(1 + draw() % 8);
    for (std::size_t& length : lengths) length = 1 + draw() % room;
    std::vector<std::size_t> used;
    std::size_t const least = fewest(lengths, room, 0, used, lengths.size()), got = chevron::train::packed(lengths, room).size();
    CAPTURE(round);
    CHECK(got >= least);
    CHECK(9 * got <= 11 * least + 6);
  }
}
