#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include <chevron/run/core/error.hpp>

/// \file
/// Loss scaling (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.2): half precision rounds small
/// gradients to zero, so the backward runs on a multiple of the loss.

namespace chevron {

/// Options of loss scaling. The factor of the loss shrinks after a step with a loss or gradient that is not finite (the step is
/// skipped), and grows after many steps in a row with finite gradients.
struct loss_scaling {
  double initial = 65536;      ///< factor of the first step
  double growth = 2;           ///< multiplies the factor; at least 1; a power of 2 changes no bit of a gradient in range
  double backoff = 0.5;        ///< multiplies the factor after an overflow; above 0, below 1
  int growth_interval = 2000;  ///< steps in a row without overflow before the factor grows
  double least = 1;            ///< smallest factor; `when_not_finite` says what an overflow with this factor causes
  double most = 16777216;      ///< largest factor
};

/// The factor of the loss, updated after each step. Equal on all ranks, since every rank is informed of each overflow.
class loss_scale {
 public:
  /// The state that a checkpoint stores.
  struct state {
    double factor = 1;  ///< factor of the next step
    int steps = 0;      ///< number of steps without overflow since the factor last changed
  };

  /// No scaling: the factor is always 1.
  loss_scale() = default;
  /// Starts with the factor `how.initial`.
  /// \throws usage_error for a factor that is not finite or not positive, and for growth below 1 or backoff outside (0, 1)
  explicit loss_scale(loss_scaling const& how) : how_(how), on_(true), now_{how.initial, 0} {
    auto const require = [](bool holds, char const* name, double value, char const* wanted) {
      if (!holds) throw usage_error(std::string("loss scaling's ") + name + " is " + std::to_string(value) + ": give " + wanted);
    };
    require(std::isfinite(how.least) && how.least > 0, "least factor", how.least, "a number above 0");
    require(std::isfinite(how.most) && how.most >= how.least, "largest factor", how.most, "a number from the least one");
    require(how.initial >= how.least && how.initial <= how.most, "first factor", how.initial,
            "a number between the least and the largest");
    require(std::isfinite(how.growth) && how.growth >= 1, "growth", how.growth, "a number from 1");
    require(how.backoff > 0 && how.backoff < 1, "backoff", how.backoff, "a number between 0 and 1");
    require(how.growth_interval > 0, "growth interval", how.growth_interval, "a number of steps from 1");
  }

  /// Whether losses are scaled.
  bool on() const { return on_; }

  /// The factor of the next loss; 1 without scaling.
  double factor() const { return now_.factor; }
  /// Whether the factor can still shrink after an overflow.
  bool can_back_off() const { return on_ && now_.factor > how_.least; }

  /// Updates the factor after a step.
  /// \param overflow whether a loss or scaled gradient was not finite, so that the step was skipped
  void step(bool overflow) {
    if (!on_) return;
    if (overflow) {
      now_ = {std::max(how_.least, now_.factor * how_.backoff), 0};
    } else if (++now_.steps >= how_.growth_interval) {
      now_ = {std::min(how_.most, now_.factor * how_.growth), 0};
    }
  }

  state const& get() const { return now_; }  ///< the state for a checkpoint
  /// Restores the state of a checkpoint; does nothing without scaling.
  void set(state const& from) {
    if (on_) now_ = from;
  }

 private:
  loss_scaling how_;
  bool on_ = false;
  state now_;
};

}  // namespace chevron
