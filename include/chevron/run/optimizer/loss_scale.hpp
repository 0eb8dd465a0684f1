#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include <chevron/run/core/error.hpp>

/// \file
/// Loss scaling: half precision loses small gradients, so the backward runs on a multiple of the loss.

namespace chevron {

/// The factor follows what the gradients bear: down when one is not finite (that step is skipped), up after many that were.
struct loss_scaling {
  double initial = 65536;      ///< factor of the first step
  double growth = 2;           ///< powers of 2 change no bit of a gradient that stays in range
  double backoff = 0.5;        ///< times this after an overflow; above 0, below 1
  int growth_interval = 2000;  ///< steps in a row without overflow
  double least = 1;            ///< an overflow with this factor is not the factor's fault
  double most = 16777216;      ///< it grows no further
};

/// The factor over the steps of a training job. The same on all ranks, since it depends on what all of them know.
class loss_scale {
 public:
  /// What to keep in a checkpoint.
  struct state {
    double factor = 1;
    int steps = 0;  ///< without overflow since it last changed
  };

  loss_scale() = default;
  /// \throws usage_error for what is no factor, or would take it the wrong way
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

  /// Whether there is any scaling.
  bool on() const { return on_; }

  /// 1 without scaling.
  double factor() const { return now_.factor; }
  /// Would a smaller factor help against an overflow?
  bool can_back_off() const { return on_ && now_.factor > how_.least; }

  /// Says how a step went, after it: the factor of the next one follows.
  /// \param overflow a scaled gradient was not finite, and the step was skipped
  void step(bool overflow) {
    if (!on_) return;
    if (overflow) {
      now_ = {std::max(how_.least, now_.factor * how_.backoff), 0};
    } else if (++now_.steps >= how_.growth_interval) {
      now_ = {std::min(how_.most, now_.factor * how_.growth), 0};
    }
  }

  state const& get() const { return now_; }
  /// Goes on from there; without scaling nothing changes.
  void set(state const& from) {
    if (on_) now_ = from;
  }

 private:
  loss_scaling how_;
  bool on_ = false;
  state now_;
};

}  // namespace chevron
