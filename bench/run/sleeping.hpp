#pragma once

#include <time.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <chevron/plan/lengths.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Stages that sleep instead of compute, so that any number of ranks fits any machine.

namespace bench {

inline std::int64_t clock_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * std::int64_t{1000000000} + now.tv_nsec;
}

/// Sleeps until shortly before `until`, then polls the clock: the system may wake a thread late, and that is not to be measured.
inline void sleep_until(std::int64_t until) {
  std::int64_t const early = until - 250000;
  timespec const at{early / 1000000000, early % 1000000000};
  while (clock_ns() < early && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, nullptr) != 0) {
  }
  while (clock_ns() < until) std::this_thread::yield();
}
inline std::int64_t after(double seconds) { return clock_ns() + static_cast<std::int64_t>(seconds * 1e9); }

/// How long a stage sleeps.
class times {
 public:
  /// Seconds of F, I and W.
  struct means {
    double of[3];
  };
  /// \param sigma of the logarithm; 0: always the mean
  times(means mean, double sigma, int stage) : mean_(mean), sigma_(sigma) {
    for (unsigned i = 0; i < 3; ++i) random_[i].seed(static_cast<unsigned>(stage) * 3 + i);
  }
  /// The means are those of a microbatch that is `unit` long in its last dimension; times of others follow `factors_of`.
  static times by_length(means mean, double unit, double attention) {
    times out(mean, 0, 0);
    out.unit_ = unit;
    out.attention_ = attention;
    return out;
  }

  /// \param of 0: F, 1: I, 2: W; each has draws of its own, so their order among each other does not matter
  /// \param length the last dimension of the microbatch
  double next(int of, std::int64_t length) {
    double mean = mean_.of[of];
    if (unit_ > 0) mean *= chevron::computation_factor(static_cast<double>(length) / unit_, attention_);
    if (sigma_ <= 0) return mean;
    return mean * std::exp(sigma_ * std::normal_distribution<double>()(random_[of]) - sigma_ * sigma_ / 2);
  }

 private:
  means mean_;
  double sigma_;
  double unit_ = 0, attention_ = 0;
  std::mt19937 random_[3];
};

namespace detail {

/// One number of the weight, whose backward takes the time of W. The gradient is undefined, not zeros, whose sum would keep the
/// cores busy.
struct sleeping_weight : torch::autograd::Function<sleeping_weight> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor weight, std::int64_t length, times* stage) {
    context->saved_data["stage"] = reinterpret_cast<std::int64_t>(stage);
    context->saved_data["length"] = length;
    return weight.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list) {
    auto* const stage = reinterpret_cast<times*>(context->saved_data["stage"].toInt());
    sleep_until(after(stage->next(2, context->saved_data["length"].toInt())));
    return {{}, {}, {}};
  }
};

/// y = x in the time of F, the input's gradient in the time of I. Its backward runs once, in I; the weight's gradient waits
/// for W.
struct sleeping_input : torch::autograd::Function<sleeping_input> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, at::Tensor, std::int64_t length,
                            times* stage) {
    std::int64_t const end = after(stage->next(0, length));
    context->saved_data["stage"] = reinterpret_cast<std::int64_t>(stage);
    context->saved_data["length"] = length;
    at::Tensor y = x.clone();
    sleep_until(end);
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto* const stage = reinterpret_cast<times*>(context->saved_data["stage"].toInt());
    if (context->needs_input_grad(0)) sleep_until(after(stage->next(1, context->saved_data["length"].toInt())));
    return {gradients[0], at::zeros({1}), {}, {}};
  }
};

}  // namespace detail

/// y = x. F, I and W take the times of `stage`, the copy included: on a core that slept, a copy of four numbers takes up to
/// 0.1 ms.
/// \param length for `times`
inline at::Tensor sleep_in(at::Tensor const& x, at::Tensor const& weight, times* stage, std::int64_t length) {
  return detail::sleeping_input::apply(x, detail::sleeping_weight::apply(weight.narrow(0, 0, 1), length, stage), length, stage);
}
/// The same for the last dimension of `x`.
inline at::Tensor sleep_in(at::Tensor const& x, at::Tensor const& weight, times* stage) {
  return sleep_in(x, weight, stage, x.size(-1));
}

/// A stage that sleeps. \param parameters of its weight
inline chevron::stage sleeping_stage(times each, std::int64_t parameters = 1) {
  at::Tensor weight = at::ones({parameters});
  weight.requires_grad_(true);
  auto const stage = std::make_shared<times>(std::move(each));
  return chevron::stage([weight, stage](at::Tensor x) { return sleep_in(x, weight, stage.get()); }, {{"weight", weight}});
}

}  // namespace bench
