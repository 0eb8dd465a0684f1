#pragma once

#include <cstdint>

/// \file
/// Random numbers of a search.

namespace chevron::search::detail {

/// Random numbers, the same for the same seed on every machine (SplitMix64: Steele, Lea, Flood, OOPSLA 2014).
class random_numbers {
 public:
  constexpr explicit random_numbers(std::uint64_t seed) : state_(seed) {}

  constexpr std::uint64_t next() {
    std::uint64_t mixed = state_ += 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
    return mixed ^ (mixed >> 31);
  }
  constexpr int below(int count) { return static_cast<int>(((next() >> 32) * static_cast<std::uint64_t>(count)) >> 32); }
  constexpr bool coin() { return (next() >> 63) != 0; }
  /// A number from 0 up to, and without, 1.
  constexpr double share() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  std::uint64_t state_;
};

}  // namespace chevron::search::detail
