#pragma once

#include <algorithm>

/// \file
/// Loss scaling: half precision loses small gradients, so the backward runs on a multiple of the loss.

namespace chevron {

/// The factor follows what the gradients bear: down when one is not finite (that step is skipped), up after many that were.
struct loss_scaling {
  double initial = 65536;
  double growth = 2;           ///< powers of 2 change no bit of a gradient that stays in range
  double backoff = 0.5;
  int growth_interval = 2000;  ///< steps in a row without overflow
  double least = 1;            ///< an overflow with this factor is not the factor's fault
  double most = 16777216;
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
  explicit loss_scale(loss_scaling const& how) : how_(how), on_(true), now_{how.initial, 0} {}

  /// 1 without scaling.
  double factor() const { return now_.factor; }
  /// Would a smaller factor help against an overflow?
  bool can_back_off() const { return on_ && now_.factor > how_.least; }

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
