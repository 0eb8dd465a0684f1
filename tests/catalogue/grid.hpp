#pragma once

#include <initializer_list>
#include <numeric>
#include <vector>

#include <chevron/schedule.hpp>

#include <doctest/doctest.h>

#include "support/plan_claims.hpp"

/// \file
/// Laws over a grid of shapes: a claim is a function of a plan, and the first shape for which it fails comes back.

namespace chevron::tests {

struct grid_result {
  int points = 0;
  shape failed{};
  constexpr bool holds() const { return points > 0 && failed.ranks == 0; }
};

/// The result of a grid of so many ranks, computed when the program runs. clang evaluates calls with known numbers while
/// compiling, for minutes, and cannot evaluate a call with a parameter.
template <class Grid>
grid_result when_run(int most_ranks, Grid grid) {
  return grid(most_ranks);
}

/// Every P up to the largest and every V ≤ 3 that the placement allows, with each of these numbers of microbatches.
template <class Description, class Claim>
constexpr grid_result over_grid(Description const& schedule, Claim claim, int largest, std::vector<int> const& micro_batches) {
  grid_result result;
  for (int chunks = 1; chunks <= 3; ++chunks) {
    if (!schedule.where.allows(chunks)) continue;
    for (int ranks = 1; ranks <= largest; ++ranks) {
      for (int const m : micro_batches) {
        ++result.points;
        shape const size{ranks, m, chunks};
        plan const made = expand(schedule, size);
        if (!claim(made.view())) return {result.points, size};
      }
    }
  }
  return result;
}

/// All P ≤ 16 and M ≤ 48.
template <class Description, class Claim>
grid_result over_all(Description const& schedule, Claim claim) {
  std::vector<int> every(48);
  std::iota(every.begin(), every.end(), 1);
  return over_grid(schedule, claim, 16, every);
}

/// All P ≤ 6 and of M some: below, at and above P and 2P for some P, a multiple of each P.
template <class Description, class Claim>
constexpr grid_result over_some(Description const& schedule, Claim claim) {
  return over_grid(schedule, claim, 6, {1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 13});
}

}  // namespace chevron::tests

/// LAW(schedule, claim): holds over some shapes while compiling, and over all of the grid when the test runs. While compiling it
/// would take minutes: the compiler evaluates hundreds of times slower than a program.
#define LAW(schedule, ...)                                                                         \
  static_assert(::chevron::tests::over_some(schedule, __VA_ARGS__).holds());                       \
  TEST_CASE("every shape of the grid: " #schedule) {                                               \
    auto const found = ::chevron::tests::over_all(schedule, __VA_ARGS__);                          \
    CHECK_MESSAGE(found.holds(), "P = ", found.failed.ranks, ", M = ", found.failed.micro_batches, \
                  ", V = ", found.failed.chunks);                                                  \
  }
