#pragma once

#include <chevron/run/core/topology.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/train/step_part.hpp>

/// \file
/// The shapes of batches on the ranks of a pipeline.

namespace chevron::detail {

/// Finds whether ranks of a pipeline were given batches of different shapes, by fingerprints of shapes.
class batch_shapes final : public step_part {
 public:
  batch_shapes(record& to, topology const& where) : where_(where), mark_(to.add()) {}

  /// Whether shapes differed in the last step whose numbers were gathered; true before the first step. Equal on all ranks.
  bool may_differ() const { return may_differ_; }

  void begin(bool) override { sum_ = 0; }
  void add(step_pass const& pass, rank_trace const&) override { sum_ += pass.batch.shapes_mark(); }
  void write(record& mine) override { mine[mark_] = sum_; }
  void judge(records_of_ranks const& all, decision&, step_report&, error_context const&) override {
    may_differ_ = false;
    for (int r = 0; r < where_.world(); ++r)
      may_differ_ = may_differ_ || all.at(r, mark_) != all.at(where_.rank_at(where_.replica_of(r), 0, 0), mark_);
  }

 private:
  topology where_;
  record::field mark_;
  double sum_ = 0;
  bool may_differ_ = true;
};

}  // namespace chevron::detail
