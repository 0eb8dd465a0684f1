#pragma once

#include <algorithm>
#include <vector>

#include <chevron/tools/search/refute/integer_durations.hpp>

/// \file
/// The window of time in which each action must run if a step is to take no longer than a deadline.

namespace chevron::detail {

/// Earliest starts and latest ends of all actions under a deadline (Carlier & Pinson 1989).
class windows {
 public:
  std::vector<whole_time> start;  ///< by action: earliest start
  std::vector<whole_time> end;    ///< by action: latest end

  /// \param by_span the deadline counts from each rank's first start, not from the step's
  windows(integer_durations const& of, bool by_span) : of_(of), by_span_(by_span) {}

  /// Computes the windows for a deadline. \returns false if no order can meet it
  bool narrow(whole_time deadline) {
    if (of_.circular) return false;
    work_.assign(of_.at(of_.ranks), 0);
    for (int i = 0; i < of_.count; ++i) work_[of_.at(of_.rank_of[of_.at(i)])] += of_.takes[of_.at(i)];
    for (whole_time const one : work_) {
      if (one > deadline) return false;
    }
    start.assign(of_.at(of_.count), 0);
    end.assign(of_.at(of_.count), by_span_ ? unknown : deadline);
    if (!by_span_) return forwards() && backwards();
    // A rank starts when its first input arrives. The latest possible arrival limits how late the rank may end.
    if (!forwards()) return false;
    for (int again = 0; again < 2; ++again) {
      for (int r = 0; r < of_.ranks; ++r) {
        int const s = of_.first_stage[of_.at(r)];
        if (s < 0) continue;
        int const i = of_.forward(s, 0);
        whole_time const latest = s == 0 ? 0 : end[of_.at(i)] == unknown ? unknown : end[of_.at(i)] - of_.takes[of_.at(i)];
        if (latest == unknown) continue;
        end_by(r, latest + deadline);
      }
      if (!backwards()) return false;
    }
    return true;
  }
  static constexpr whole_time unknown = whole_time{1} << 61;

 private:
  bool forwards() {
    for (int const i : of_.sorted) {
      whole_time const ends = start[of_.at(i)] + of_.takes[of_.at(i)];
      if (ends > end[of_.at(i)]) return false;
      for (int e = of_.first[of_.at(i)]; e < of_.first[of_.at(i) + 1]; ++e) {
        integer_durations::edge const& to = of_.edges[of_.at(e)];
        start[of_.at(to.to)] = std::max(start[of_.at(to.to)], ends + to.delay);
      }
    }
    return true;
  }
  bool backwards() {
    for (auto at = of_.sorted.rbegin(); at != of_.sorted.rend(); ++at) {
      int const i = *at;
      for (int e = of_.first[of_.at(i)]; e < of_.first[of_.at(i) + 1]; ++e) {
        integer_durations::edge const& to = of_.edges[of_.at(e)];
        whole_time const latest = end[of_.at(to.to)];
        if (latest == unknown) continue;
        end[of_.at(i)] = std::min(end[of_.at(i)], latest - of_.takes[of_.at(to.to)] - to.delay);
      }
      if (start[of_.at(i)] + of_.takes[of_.at(i)] > end[of_.at(i)]) return false;
    }
    return true;
  }
  void end_by(int rank, whole_time latest) {
    for (int i = 0; i < of_.count; ++i) {
      if (of_.rank_of[of_.at(i)] == rank) end[of_.at(i)] = std::min(end[of_.at(i)], latest);
    }
  }

  integer_durations const& of_;
  bool by_span_;
  std::vector<whole_time> work_;
};

}  // namespace chevron::detail
