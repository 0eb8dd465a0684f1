#pragma once

#include <algorithm>

#include <chevron/run/core/rank_trace.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/train/step_part.hpp>

/// \file
/// The bubble of a step, from the times of all ranks.

namespace chevron::detail {

/// Computes `step_report::bubble`: the share of ranks × longest rank's time in which ranks did not compute.
class step_times final : public step_part {
 public:
  step_times(record& to, topology const& where) : world_(where.world()), busy_(to.add()), span_(to.add()) {}

  void begin(bool) override { busy_seconds_ = span_seconds_ = 0; }
  void add(step_pass const&, rank_trace const& trace) override {
    busy_seconds_ += trace.busy_seconds();
    span_seconds_ += trace.span_seconds();
  }
  void write(record& mine) override {
    mine[busy_] = busy_seconds_;
    mine[span_] = span_seconds_;
  }
  void judge(records_of_ranks const& all, decision&, step_report& report, error_context const&) override {
    double busy = 0, longest = 0;
    for (int r = 0; r < world_; ++r) {
      busy += all.at(r, busy_);
      longest = std::max(longest, all.at(r, span_));
    }
    report.bubble = longest > 0 ? 1 - busy / (world_ * longest) : 0;
  }

 private:
  int world_;
  record::field busy_, span_;
  double busy_seconds_ = 0;  // in computations (`is_compute`: F, B, I, W, R and own actions), without waits
  double span_seconds_ = 0;  // from the beginning of each run to the end of its last computation
};

}  // namespace chevron::detail
