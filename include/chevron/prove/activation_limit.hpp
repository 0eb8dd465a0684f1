#pragma once

/// \file
/// A limit on the activations of a rank.

namespace chevron {

/// A limit on the activations of a rank, in chunks whose backward has not begun. Between I and W a chunk holds a share of its
/// activations: 1 in the model of `peak_in_flight`, less where I frees activations that W does not need (arXiv 2401.10241,
/// table 1).
struct activation_limit {
  double most = 0;             ///< 0: no limit
  double kept_for_weight = 1;  ///< above 0, at most 1

  /// Sums above a limit by no more than this are within the limit: shares that are added up are rounded.
  static constexpr double rounding = 1e-9;
  /// The number of whole chunks that a rank may hold.
  constexpr int chunks() const { return whole(most + rounding); }
  /// `most`, or the whole number next to it where rounding alone made the difference.
  constexpr double rounded() const { return most > chunks() + rounding ? most : chunks(); }
  /// The number of chunks that may wait for their W, if the rank holds no others.
  constexpr int waiting_chunks() const { return whole((most + rounding) / kept_for_weight); }

 private:
  static constexpr int more_than_any = 1'000'000'000;  // chunks of a step; a larger limit need not be a number that an int has
  static constexpr int whole(double count) { return count < more_than_any ? static_cast<int>(count) : more_than_any; }
};

}  // namespace chevron
