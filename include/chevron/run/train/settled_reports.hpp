#pragma once

#include <functional>
#include <utility>
#include <vector>

#include <chevron/run/train/step_report.hpp>

/// \file
/// The queue of reports for `trainer_options::on_report`.

namespace chevron::detail {

/// The last step's report, and the settled reports that were not yet passed to `on_report`.
class settled_reports {
 public:
  explicit settled_reports(std::function<void(step_report const&)> on_report) : on_report_(std::move(on_report)) {}

  /// The report of the last step.
  step_report& last() { return last_; }
  /// Adds the report of a step that ended, settled or not.
  void add(step_report const& of_step) {
    last_ = of_step;
    if (last_.settled) settle();
  }
  /// Queues the last step's report, which is settled now.
  void settle() { pending_reports_.push_back(last_); }
  /// Calls `on_report`, if given, with each queued report. To be called when no step is under way.
  /// \returns the last step's report
  step_report const& tell() {
    for (step_report& each : std::exchange(pending_reports_, {})) {
      each.samples_per_second = static_cast<double>(each.samples) / each.seconds;
      if (each.step == last_.step) last_ = each;
      if (on_report_) on_report_(each);
    }
    return last_;
  }

 private:
  std::function<void(step_report const&)> on_report_;
  step_report last_;
  std::vector<step_report> pending_reports_;
};

}  // namespace chevron::detail
