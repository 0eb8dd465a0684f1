#pragma once

/// \file
/// A limit on the activations of a rank.

namespace chevron {

/// A limit on the activations of a rank; the unit is the activations of one chunk before its backward. From I to W a chunk
/// counts as `kept_for_weight`: 1, as in `peak_in_flight`, or less if I frees activations that W does not need (arXiv
/// 2401.10241, table 1).
struct activation_limit {
  double most = 0;             ///< number of chunks; 0: no limit
  double kept_for_weight = 1;  ///< share of a chunk's activations that I does not free: above 0, at most 1

  /// The amount by which a sum of shares may exceed the limit, since such sums are rounded.
  static constexpr double rounding = 1e-9;
  /// The number of whole chunks that the limit allows.
  constexpr int chunks() const { return whole(most + rounding); }
  /// `most`, or the nearest whole number if the difference is only rounding.
  constexpr double rounded() const { return most > chunks() + rounding ? most : chunks(); }
  /// The number of chunks that may wait for their W, if the rank has no other chunks in flight.
  constexpr int waiting_chunks() const { return whole((most + rounding) / kept_for_weight); }

 private:
  static constexpr int more_than_any = 1'000'000'000;  // more chunks than any step has: larger limits would not fit into an int
  static constexpr int whole(double count) { return count < more_than_any ? static_cast<int>(count) : more_than_any; }
};

}  // namespace chevron
