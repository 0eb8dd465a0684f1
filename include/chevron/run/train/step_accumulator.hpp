#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <exception>
#include <span>
#include <string>

#include <c10/util/Exception.h>

#include <chevron/base/format.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/rank_trace.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage_loss.hpp>
#include <chevron/run/train/step_part.hpp>
#include <chevron/run/train/step_report.hpp>

/// \file
/// Counts the runs of a step, and collects this rank's own figures of the report.

namespace chevron::detail {

/// The runs of one step (one, or several if batches are accumulated) and the calls that made them. Compares the ranks' numbers of
/// calls: after a call that only one rank refused, ranks would train on parts of different batches.
class step_accumulator final : public step_part {
 public:
  step_accumulator(record& to, topology const& where) : world_(where.world()), calls_of_rank_(to.add()) {}

  /// Counts a call of `step` or `accumulate`, including a refused call.
  void count_call() { ++calls_; }

  /// Drops the runs of this step so far. Counts as a call, so that ranks which drop different runs are found.
  void drop() override {
    ++calls_;
    passes_ = 0;
  }
  /// The number of runs of this step so far.
  int passes() const { return passes_; }

  /// Checks and stores the totals that a run was given.
  /// \param given the totals of the whole step, from the caller
  /// \param all whether this run is the last of its step; a step of one run needs no totals
  /// \throws usage_error if `given` differs from the totals of the step's earlier runs, or lacks the total of a loss with a
  /// weight of its own, or for a total that is negative, infinite or NaN
  void check_total(step_total const& given, std::span<rank_loss const> losses, bool all) {
    if (passes_ > 0 && !(given == given_)) {
      throw usage_error("the batches of one step were weighed as shares of " + words_of(given_) + " and of " + words_of(given) +
                        ": give accumulate() and step() the same total");
    }
    if (!is_number(given.model)) refuse("the step's total", given.model);
    for (auto const& [name, total] : given.losses) {
      if (!is_number(total)) refuse("the step's total of loss `" + name + "`", total);
    }
    given_ = given;
    for (rank_loss const& one : losses) {
      if ((all && passes_ == 0) || !one.weight || given.of(one.name)) continue;
      throw usage_error("loss `" + one.name +
                        "` has a weight of its own, and a step of several batches needs this loss's total "
                        "over all batches and replicas. Remedy: accumulate(batch, {total, {{\"" +
                        one.name + "\", its total}}}), and step() alike");
    }
  }
  void begin(bool) override {
    nanoseconds_ = 0;
    peak_in_flight_ = 0;
    used_graphs_ = true;
    memory_ = {};
  }
  void write(record& mine) override { mine[calls_of_rank_] = static_cast<double>(calls_); }
  /// \throws preflight_error if two ranks count different numbers of calls
  void judge(records_of_ranks const& all, decision&, step_report&, error_context const& here) override {
    for (int r = 1; r < world_; ++r) {
      double const first = all.at(0, calls_of_rank_), other = all.at(r, calls_of_rank_);
      if (other == first) continue;
      throw preflight_error(
          "rank 0 has called step() and accumulate() " + number_text(first) + " times, rank " + std::to_string(r) + " " +
              number_text(other) +
              " times, calls that ended in a usage_error included: they would train on parts of different batches. No parameter "
              "was changed. Remedy: give all ranks a batch that none refuses, or make the call again on all of them",
          naming(here, {0, r}));
    }
  }

  /// Ends a run. \param nanoseconds duration of the call of `step` or `accumulate`
  void end_pass(rank_trace const& trace, bool used_graphs, std::int64_t nanoseconds) {
    peak_in_flight_ = std::max(peak_in_flight_, trace.peak_in_flight());
    used_graphs_ = used_graphs_ && used_graphs;
    memory_.add(trace.memory());
    nanoseconds_ += nanoseconds;
    ++passes_;
  }
  /// Ends the step, and writes this rank's own figures into the report.
  void end_step(step_report& report) {
    report.seconds = static_cast<double>(nanoseconds_) * 1e-9;
    report.peak_in_flight = peak_in_flight_;
    report.used_graphs = used_graphs_;
    report.memory = memory_;
    passes_ = 0;
  }

  /// Warns, at the end of a training, of batches that were accumulated and never stepped. Does nothing while an exception ends
  /// the training, since the exception tells more.
  /// \param step number of the step that did not come
  void warn_of_lost(long step) const noexcept {
    if (passes_ == 0 || std::uncaught_exceptions() > exceptions_) return;
    try {
      TORCH_WARN("the trainer ends with ", passes_, passes_ == 1 ? " accumulated batch" : " accumulated batches", " that step ",
                 step,
                 " never took: no parameter learns from them. Remedy: accumulate() for all but the last batch of a step, "
                 "step() for the last, also at the end of the data");
    } catch (...) {  // by a handler of warnings
    }
  }

 private:
  static bool is_number(double total) { return std::isfinite(total) && total >= 0; }
  /// Refuses a total by which shares would be zero, negative or NaN.
  [[noreturn]] static void refuse(std::string const& what, double total) {
    throw usage_error(
        what + " is " + number_text(total) +
        ", and every microbatch is weighed by its share of the total. Remedy: the samples (or units of "
        "trainer_options::loss_weight) of the whole step over all replicas; 0 in step() where replicas are to sum their weights");
  }
  static std::string words_of(step_total const& total) {
    std::string out = number_text(total.model);
    for (auto const& [name, counts] : total.losses) out += ", " + number_text(counts) + " in loss `" + name + "`";
    return out;
  }

  int const exceptions_ = std::uncaught_exceptions();  // where this object was made
  int world_;
  record::field calls_of_rank_;
  int passes_ = 0;
  std::int64_t calls_ = 0;
  step_total given_;
  std::int64_t nanoseconds_ = 0;
  int peak_in_flight_ = 0;
  bool used_graphs_ = true;
  allocator_use memory_;
};

}  // namespace chevron::detail
