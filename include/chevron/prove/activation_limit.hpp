#pragma once

/// \file
/// How much a rank may hold.

namespace chevron {

/// How much a rank may hold, counted in chunks whose backward has not begun. Between I and W a chunk holds a share of
/// that: 1 in the model of `peak_in_flight`, less where I lets go of what only it needs (arXiv 2401.10241, table 1).
struct activation_limit {
  double most = 0;             ///< 0: no limit
  double kept_for_weight = 1;  ///< above 0, at most 1

  /// What is above a limit by no more than this is within it: shares that are added up are rounded.
  static constexpr double rounding = 1e-9;
  /// How many whole chunks may be held.
  constexpr int chunks() const { return whole(most + rounding); }
  /// `most`, or the whole number that it misses by rounding.
  constexpr double rounded() const { return most > chunks() + rounding ? most : chunks(); }
  /// How many chunks may wait for their W, if nothing else is held.
  constexpr int waiting_chunks() const { return whole((most + rounding) / kept_for_weight); }

 private:
  static constexpr int more_than_any = 1'000'000'000;  // chunks of a step; a larger limit need not be a number that an int has
  static constexpr int whole(double count) { return count < more_than_any ? static_cast<int>(count) : more_than_any; }
};

}  // namespace chevron
