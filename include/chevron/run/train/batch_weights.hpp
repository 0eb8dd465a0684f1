#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>

#include <chevron/base/format.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/train/step_part.hpp>

/// \file
/// The weights and samples of a step's batches.

namespace chevron::detail {

/// Sums samples into the report, and compares the weights of batches within each pipeline, and the replicas' sum of weights with
/// the denominator of means.
class batch_weights final : public step_part {
 public:
  batch_weights(record& to, topology const& where) : where_(where), weight_(to.add()), samples_(to.add()) {}

  void begin(bool) override { sum_ = {}; }
  void add(step_pass const& pass, rank_trace const&) override {
    sum_.total = pass.totals.total();
    sum_.weight += pass.batch.counts();
    sum_.samples += pass.batch.samples();
  }
  void write(record& mine) override {
    mine[weight_] = sum_.weight;
    mine[samples_] = static_cast<double>(sum_.samples);
    total_ = sum_.total;
  }
  /// \throws usage_error if ranks of a pipeline were given batches of different weights, or the total is not the sum
  void judge(records_of_ranks const& all, decision&, step_report& report, error_context const& here) override {
    int const ranks = where_.ranks_of_replica();
    double sum = 0;
    std::string each;
    for (int replica = 0; replica < where_.replicas; ++replica) {
      int first = -1;  // first rank of the replica that knows the weights
      for (int r = replica * ranks; r < (replica + 1) * ranks; ++r) {
        double const weight = all.at(r, weight_);
        if (std::isnan(weight)) continue;
        if (first < 0) first = r;
        if (weight == all.at(first, weight_)) continue;
        auto const [one, other] = texts_apart(all.at(first, weight_), weight);
        throw usage_error(
            "ranks " + std::to_string(first) + " and " + std::to_string(r) + " were given batches that count " + one + " and " +
                other +
                " samples (or units of trainer_options::loss_weight): all ranks of a pipeline take the same batch. Remedy: one "
                "batch for these ranks, and trainer_options::loss_weight where inputs and targets have different sizes",
            naming(here, {first, r}));
      }
      double const weight = all.at(first, weight_);
      sum += weight;
      each += (replica == 0 ? "" : ", ") + number_text(weight);
    }
    if (sum == 0) refuse_empty_mean(here);
    if (std::abs(sum - total_) > 1e-9 * total_) {
      throw usage_error("the replicas' batches count " + each +
                            " samples (or units of trainer_options::loss_weight), but each was taken for a share of " +
                            number_text(total_) + ": give step() the total over all replicas, accumulated batches included",
                        here);
    }
    report.samples = samples(all);
  }

 private:
  /// The number of samples of all replicas; a rank that cannot count samples has 0.
  std::int64_t samples(records_of_ranks const& all) const {
    std::int64_t sum = 0;
    for (int replica = 0; replica < where_.replicas; ++replica) {
      double most = 0;
      for (int p = 0; p < where_.ranks_of_replica() / where_.shards; ++p)
        most = std::max(most, all.at(where_.rank_at(replica, p, 0), samples_));
      sum += static_cast<std::int64_t>(most);
    }
    return sum;
  }

  struct sums {
    double weight = 0;         // of this replica; NaN on a rank without the tensors that are weighed
    double total = 0;          // over all replicas, the denominator of means; NaN on such a rank
    std::int64_t samples = 0;  // of this replica
  };
  topology where_;
  record::field weight_, samples_;
  sums sum_;
  double total_ = 0;  // of the step that was written last
};

}  // namespace chevron::detail
