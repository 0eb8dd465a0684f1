#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

/// \file
/// Decides whether a rank's computations run kernel by kernel, are captured, or are launched as graphs.

namespace chevron::detail {

/// How the host launches a run's computations on the device.
enum class run_mode {
  one_by_one,  ///< the host launches each kernel
  capture,     ///< as the previous runs had equal shapes and memory, the host captures graphs and launches them
  launch       ///< the host launches the captured graphs
};

/// The sizes and addresses that graphs contain: graphs may be launched in runs whose signature equals the captured run's.
struct run_signature {
  std::vector<std::int64_t> shapes;  ///< dtypes and sizes of the batch
  std::vector<void const*> memory;   ///< addresses of parameters and buffers of this rank's stages
  bool operator==(run_signature const&) const = default;
};

/// Chooses the mode of each run of one rank, and stores the reason why a run launches no graphs. Ranks may choose different
/// modes, since graphs contain no messages.
class capture_policy {
 public:
  /// The number of equal runs before a capture, in which libraries allocate workspaces, and messages' shapes are recorded.
  static constexpr int runs_before = 3;

  /// \param never the reason why no run can ever be captured; empty if runs can
  explicit capture_policy(std::string never = {}) : never_(std::move(never)) { why_not_ = never_; }

  /// The mode of a run that begins now. If the mode is `capture`, the caller must then call `captured` or `failed`.
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

  /// The mode of a run that must run kernel by kernel, with any signature. \param why the reason, in words
  run_mode not_now(std::string why) { return one_by_one(never_.empty() ? std::move(why) : never_); }

  /// Ends all captures and launches, since a stage drew random numbers: only the host sets seeds of each microbatch and step.
  void drew(int stage) { never("stage " + std::to_string(stage) + " draws random numbers, and each step has seeds of its own"); }
  /// Records that the run was captured.
  void captured() {
    held_ = last_;
    holds_ = true;
    why_not_.clear();
  }
  /// Records that the capture failed, and ends all captures. \param why the reason, in words
  void failed(std::string const& why) {
    never("capturing failed: " + why);
    why_not_ = never_;
  }

  /// Whether captured graphs may still be launched.
  bool holds() const { return holds_; }
  /// The reason why the last run launched no graphs, in words; empty if it launched graphs.
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
  int alike_ = 0;  // number of consecutive runs, just before the current run, with its signature
  bool holds_ = false;
};

}  // namespace chevron::detail
