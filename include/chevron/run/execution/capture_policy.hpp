#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

/// \file
/// Whether a rank's computations are asked for one by one, captured, or launched as they were captured.

namespace chevron {

/// How a run of a program goes.
enum class run_mode {
  one_by_one,  ///< each kernel is asked for
  capture,     ///< the same computations as in the runs before: they are captured, and then launched
  launch       ///< they are launched
};

/// What a captured run depends on: graphs hold sizes and addresses.
struct run_signature {
  std::vector<std::int64_t> shapes;  ///< dtypes and sizes of the batch
  std::vector<void const*> memory;   ///< parameters and buffers of this rank's stages
  bool operator==(run_signature const&) const = default;
};

/// Decides for each run, and says in words why one was not launched. A rank decides for itself: messages are no part of what is
/// captured, so others need not do the same.
class capture_policy {
 public:
  /// Runs of the same signature that go before a capture: libraries get their workspaces in them, and messages their shapes.
  static constexpr int runs_before = 3;

  /// \param never why nothing can ever be captured; empty if it can
  explicit capture_policy(std::string never = {}) : never_(std::move(never)) { why_not_ = never_; }

  /// At the beginning of a run. After `capture`, one of `captured` and `failed` is to be called.
  run_mode next(run_signature now) {
    if (!never_.empty()) return one_by_one(never_);
    bool const alike = last_ == now;
    last_ = std::move(now);
    alike_ = alike ? alike_ + 1 : 0;
    if (holds_ && last_ == held_) {
      why_not_.clear();
      return run_mode::launch;
    }
    if (alike_ >= runs_before) return run_mode::capture;
    if (!holds_) {
      return one_by_one("the first " + std::to_string(runs_before) +
                        " steps with batches of the same shapes run kernel by kernel");
    }
    return one_by_one(last_.memory != held_.memory ? "parameters or buffers have other memory than when the step was captured"
                                                   : "the batch has other shapes than when the step was captured");
  }

  /// This run alone goes one by one.
  run_mode not_now(std::string why) { return one_by_one(never_.empty() ? std::move(why) : never_); }

  /// A stage drew random numbers: seeds are each microbatch's and step's own, and only the host can give them.
  void drew(int stage) { never("stage " + std::to_string(stage) + " draws random numbers, and each step has seeds of its own"); }
  void captured() {
    held_ = last_;
    holds_ = true;
    why_not_.clear();
  }
  void failed(std::string const& why) {
    never("capturing failed: " + why);
    why_not_ = never_;
  }

  /// Whether graphs are held that may yet be launched.
  bool holds() const { return holds_; }
  /// Why the last run was not launched; empty where it was.
  std::string const& why_not() const { return why_not_; }

 private:
  run_mode one_by_one(std::string why) {
    why_not_ = std::move(why);
    return run_mode::one_by_one;
  }
  void never(std::string why) {
    if (never_.empty()) never_ = std::move(why);
    holds_ = false;
  }

  std::string never_, why_not_;
  run_signature last_, held_;
  int alike_ = 0;  // runs in a row before this one that had its signature
  bool holds_ = false;
};

}  // namespace chevron
