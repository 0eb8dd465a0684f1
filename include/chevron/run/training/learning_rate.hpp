#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

/// \file
/// Learning rates by step, for `trainer_options::learning_rate`. Any function of the step will do; these are the usual ones.

namespace chevron {

/// Up in a straight line over `warm_up` steps (the last of them has `highest`; none is as one), then down a half cosine from
/// `highest` to `lowest` in the last of `steps`.
struct warm_up_cosine {
  double highest = 1e-3;  ///< learning rate, as the optimizer takes it
  double warm_up = 0;     ///< in steps
  double steps = 1;       ///< of the whole training, the warm-up included; later ones have `lowest`
  double lowest = 0;      ///< learning rate of the last step

  /// \param step from 0
  /// \returns its learning rate
  double operator()(long step) const;
};

/// Up in a straight line over `warm_up` steps, then down in a straight line from `highest` to `lowest` in the last of `steps`.
struct warm_up_linear {
  double highest = 1e-3;  ///< as in `warm_up_cosine`
  double warm_up = 0;
  double steps = 1;
  double lowest = 0;

  /// \param step from 0
  /// \returns its learning rate
  double operator()(long step) const;
};

namespace detail {

/// How far this step is: below 0 in the warm-up, where -1 is before the first; then from 0, its last step, to 1, the last of all.
inline double way_of(long step, double warm_up, double steps) {
  double const number = static_cast<double>(step) + 1;
  double const rising = std::max(1.0, warm_up);
  if (number < rising) return number / rising - 1;
  return std::clamp((number - rising) / std::max(1.0, steps - rising), 0.0, 1.0);
}

}  // namespace detail

inline double warm_up_cosine::operator()(long step) const {
  double const way = detail::way_of(step, warm_up, steps);
  return way < 0 ? highest * (1 + way) : lowest + (highest - lowest) * (1 + std::cos(std::numbers::pi * way)) / 2;
}

inline double warm_up_linear::operator()(long step) const {
  double const way = detail::way_of(step, warm_up, steps);
  return way < 0 ? highest * (1 + way) : highest + (lowest - highest) * way;
}

}  // namespace chevron
