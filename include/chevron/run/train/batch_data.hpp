#pragma once

#include <string>
#include <utility>

#include <c10/util/Exception.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/data_agreement.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/train/step_part.hpp>

/// \file
/// The comparison of a step's batches over ranks.

namespace chevron::detail {

/// Compares the data of each pipeline's ranks and, in the first step that compares data, of the replicas.
class batch_data final : public step_part {
 public:
  /// \param equal the handling of two replicas with the same batch
  batch_data(record& to, data_agreement agreement, same_batch equal)
      : agreement_(std::move(agreement)), equal_(equal), marks_(to.add(agreement_.width())) {}

  data_agreement const& agreement() const { return agreement_; }

  void begin(bool) override {
    agreement_.begin();
    first_ = true;
  }
  /// \throws preflight_error if shards were given different batches in the first run of all
  void take(transport& comm, split_batch const& batch, long step) override {
    agreement_.add(batch);
    if (std::exchange(first_, false))
      agreement_.check_shards(comm, {comm.topology().global_rank, -1, step, "comparison of data"});
  }
  void write(record& mine) override {
    mine.write(marks_, agreement_.numbers());
    compares_ = !agreement_.numbers().empty();
  }
  /// \throws preflight_error if ranks of a pipeline were given different data, and, with `same_batch::stop`, if two replicas
  /// were given the same
  void judge(records_of_ranks const& all, decision&, step_report&, error_context const& here) override {
    if (!compares_) return;
    auto const data_of = [&](int global_rank) { return all.numbers(global_rank, marks_).data(); };
    agreement_.check(data_of, here);
    if (std::exchange(replicas_compared_, true) || equal_ == same_batch::allow) return;
    std::string const warning = agreement_.equal_replicas(data_of);
    if (warning.empty()) return;
    if (equal_ == same_batch::stop) throw preflight_error(warning + ". No parameter was changed", here);
    if (here.rank == 0) TORCH_WARN(warning);
  }
  void finish(transport&) override { agreement_.was_compared(); }

 private:
  data_agreement agreement_;
  same_batch equal_;
  record::field marks_;
  bool first_ = false;              // the step's first run is still to come
  bool compares_ = false;           // in the step that was written last
  bool replicas_compared_ = false;  // in an earlier step
};

}  // namespace chevron::detail
