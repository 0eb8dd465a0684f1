#pragma once

/// \file
/// A limit on the activations of a rank.

namespace chevron {

/// A limit on the activations of a rank, in chunks whose backward has not begun. Between I and W a chunk holds a share of its
/// activations: all of them in the model of `peak_in_flight`, fewer if I frees activations that W does not need (arXiv
/// 2401.10241, table 1).
struct activation_limit {
  double most = 0;             ///< 0: no limit
  double kept_for_weight = 1;  ///< above 0, at most 1

  /// A sum that exceeds the limit by at most this is within the limit, since sums of shares are rounded.
  static constexpr double rounding = 1e-9;
  /// The number of whole chunks that a rank may hold.
  constexpr int chunks() const { return whole(most + rounding); }
  /// `most`, or the nearest whole number if the difference is only rounding.
  constexpr double rounded() const { return most > chunks() + rounding ? most : chunks(); }
  /// The number of chunks that may wait for their W, if the rank holds no others.
  constexpr int waiting_chunks() const { return whole((most + rounding) / kept_for_weight); }

 private:
  static constexpr int more_than_any = 1'000'000'000;  // more chunks than any step has: larger limits would not fit into an int
  static constexpr int whole(double count) { return count < more_than_any ? static_cast<int>(count) : more_than_any; }
};

}  // namespace chevron
