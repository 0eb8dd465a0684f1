#pragma once

#include <functional>
#include <utility>
#include <vector>

#include <chevron/run/optimizer/step_report.hpp>

/// \file
/// Reports of steps on their way to the user.

namespace chevron::detail {

/// The last step's report, and the settled reports that `trainer_options::on_report` has not had.
class settled_reports {
 public:
  explicit settled_reports(std::function<void(step_report const&)> on_report) : on_report_(std::move(on_report)) {}

  /// Of the last step.
  step_report& last() { return last_; }
  /// A step is over; its report may be settled later.
  void add(step_report const& of_step) {
    last_ = of_step;
    if (last_.settled) settle();
  }
  /// The last step's report is settled now.
  void settle() { pending_reports_.push_back(last_); }
  /// Calls `on_report`, if there is one, with each settled report, when no step is under way.
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
