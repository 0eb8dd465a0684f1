#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include <chevron/search.hpp>

/// \file
/// Lengths of microbatches for benchmarks.

namespace bench {

/// Lengths with a mean of about 1000, log-normal, the same on every machine.
inline std::vector<double> sampled_lengths(int count, double spread, std::uint64_t seed) {
  chevron::search::detail::random_numbers random(seed);
  std::vector<double> out;
  for (int m = 0; m < count; ++m) {
    double const u = random.share();
    double const z = std::sqrt(-2 * std::log1p(-u)) * std::cos(2 * 3.14159265358979323846 * random.share());
    out.push_back(std::round(1000 * std::exp(spread * z - spread * spread / 2)) + 1);
  }
  return out;
}

}  // namespace bench
