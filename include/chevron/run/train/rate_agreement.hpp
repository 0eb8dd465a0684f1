#pragma once

#include <string>

#include <chevron/base/format.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/train/step_part.hpp>

/// \file
/// The learning rate of a step on all ranks.

namespace chevron::detail {

/// Writes the learning rate to the report, and compares the rates of `trainer_options::learning_rate`.
class rate_agreement final : public step_part {
 public:
  /// \param rate this rank's rate; must outlive this object \param scheduled whether ranks compute rates by a function
  /// \param first the rank of the first trained stage, whose rate the report has
  rate_agreement(record& to, topology const& where, double const& rate, bool scheduled, int first)
      : where_(where), mine_(&rate), scheduled_(scheduled), first_(first), rate_(to.add()) {}

  void write(record& mine) override { mine[rate_] = *mine_; }
  /// \throws preflight_error if `trainer_options::learning_rate` returned different rates to two ranks
  void judge(records_of_ranks const& all, decision&, step_report& report, error_context const& here) override {
    for (int r = 1; scheduled_ && r < where_.world(); ++r) {
      if (all.at(r, rate_) == all.at(0, rate_)) continue;
      auto const [first, other] = texts_apart(all.at(0, rate_), all.at(r, rate_));
      throw preflight_error("trainer_options::learning_rate gives rank 0 " + first + " for this step and rank " +
                                std::to_string(r) + " " + other +
                                ". No parameter was changed. Remedy: a function that depends on the step alone",
                            naming(here, {0, r}));
    }
    report.learning_rate = all.at(first_, rate_);
  }

 private:
  topology where_;
  double const* mine_;
  bool scheduled_;
  int first_;
  record::field rate_;
};

}  // namespace chevron::detail
