#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include <chevron/base/format.hpp>
#include <chevron/run/core/error.hpp>

/// \file
/// Learning rates by step, for `trainer_options::learning_rate`, which takes any function of the step.

namespace chevron {

namespace detail {

/// Returns the progress of a step: rises from -1 (before the first step) to 0 (last step of the warm-up), then to 1 (last
/// step). \param schedule name of the type, for the error \throws usage_error unless `steps` is at least 1
inline double way_of(char const* schedule, long step, double warm_up, double steps) {
  if (!(steps >= 1)) {
    throw usage_error(std::string(schedule) + "::steps is " + number_text(steps) +
                      ": the rate falls until the last step of the training. Remedy: the number of all steps, including the "
                      "warm-up");
  }
  double const number = static_cast<double>(step) + 1;
  double const rising = std::max(1.0, warm_up);
  if (number < rising) return number / rising - 1;
  return std::clamp((number - rising) / std::max(1.0, steps - rising), 0.0, 1.0);
}

}  // namespace detail

/// A rate that rises in a straight line to `highest` in the last of `warm_up` steps, and then falls along a half cosine
/// (Loshchilov and Hutter, SGDR, arXiv 1608.03983, without restarts) to `lowest` in the last of `steps` steps.
struct warm_up_cosine {
  double highest = 1e-3;  ///< learning rate after the warm-up
  double warm_up = 0;     ///< in steps; 0 and 1 are equivalent
  double steps = 0;       ///< steps of the whole training, including the warm-up: to be given; later steps have rate `lowest`
  double lowest = 0;      ///< learning rate of the last step

  /// \param step from 0
  /// \returns the step's learning rate \throws usage_error if `steps` was not given
  double operator()(long step) const {
    double const way = detail::way_of("warm_up_cosine", step, warm_up, steps);
    return way < 0 ? highest * (1 + way) : lowest + (highest - lowest) * (1 + std::cos(std::numbers::pi * way)) / 2;
  }
};

/// A rate that rises in a straight line to `highest` in the last of `warm_up` steps, and then falls in a straight line to
/// `lowest` in the last of `steps` steps.
struct warm_up_linear {
  double highest = 1e-3;  ///< as in `warm_up_cosine`
  double warm_up = 0;
  double steps = 0;
  double lowest = 0;

  /// \param step from 0
  /// \returns the step's learning rate \throws usage_error if `steps` was not given
  double operator()(long step) const {
    double const way = detail::way_of("warm_up_linear", step, warm_up, steps);
    return way < 0 ? highest * (1 + way) : highest + (lowest - highest) * way;
  }
};

}  // namespace chevron
