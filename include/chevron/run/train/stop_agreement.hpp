#pragma once

#include <string>

#include <chevron/run/core/stop_request.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/train/step_part.hpp>

/// \file
/// Informs all ranks of the first rank that was asked to stop.

namespace chevron::detail {

/// Gathers the ranks' stop requests (stop_request.hpp).
class stop_agreement final : public step_part {
 public:
  stop_agreement(record& to, topology const& where) : world_(where.world()), cause_(to.add()) {}

  /// Words for the first stop request in a step's gathered numbers, with rank and reason; empty until a rank is asked to stop.
  std::string const& reason() const { return reason_; }

  void write(record& mine) override { mine[cause_] = stop_cause_now(); }
  void judge(records_of_ranks const& all, decision&, step_report&, error_context const&) override {
    for (int r = 0; r < world_ && reason_.empty(); ++r) {
      auto const cause = static_cast<int>(all.at(r, cause_));
      if (cause != 0) reason_ = "rank " + std::to_string(r) + " " + stop_words(cause);
    }
  }

 private:
  int world_;
  record::field cause_;
  std::string reason_;
};

}  // namespace chevron::detail
