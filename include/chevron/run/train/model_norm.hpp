#pragma once

#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <chevron/lower/program.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/scalar_reader.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/train/rank_gradients.hpp>
#include <chevron/run/train/shard_agreement.hpp>
#include <chevron/run/train/step_names.hpp>
#include <chevron/run/train/step_part.hpp>
#include <chevron/run/train/trainer_options.hpp>

/// \file
/// The norm of a step's gradient over all parameters of the model.

namespace chevron::detail {

/// Computes `step_report::grad_norm` from the squared norms of parameters, by stage and registration: sums have equal bits on
/// all ranks, for any cut into stages.
class model_norm final : public step_part {
 public:
  /// \param names names of all stages' parameters \param gradients of this rank; both must outlive this object
  /// \param tolerance relative difference up to which two shards' norms of a gradient count as equal
  /// \throws usage_error if no stage has a trained parameter
  model_norm(record& to, plan_view plan, topology const& where, step_names const& names, rank_gradients& gradients,
             trainer_options const& options, double tolerance)
      : plan_(plan),
        where_(where),
        names_(&names),
        gradients_(&gradients),
        rounds_(!options.master_parameters),
        clip_(options.clip_grad_norm),
        sharded_(options.shard != sharding::nothing),
        tolerance_(tolerance),
        squares_(to.add(names.most_norms(plan))) {
    if (squares_.count == 0) throw usage_error("no stage has a parameter that needs a gradient: nothing would be learned");
  }

  /// Squared norms of this rank's gradients, in the order of parameters; zeros after the last.
  record::field const& squares() const { return squares_; }

  void complete(record& mine, scalar_reader& numbers) override {
    gradients_->squared_norms(mine.numbers(squares_), clip_, numbers, rounds_);
  }
  /// Sums the squared norms of a cut parameter over the ranks that have its pieces; for any other parameter, counts the first
  /// shard's norm. A culprit is the last gradient by stage that is not finite, the first that the backward computed.
  /// \throws preflight_error if shards have unequal norms for a parameter of which each shard has a copy
  void judge(records_of_ranks const& all, decision& found, step_report& report, error_context const& here) override {
    std::vector<std::size_t> next(static_cast<std::size_t>(plan_.size.ranks * where_.shards));
    double sum = 0;
    for (std::size_t s = 0; s < names_->parameters.size(); ++s) {
      int const rank = plan_.rank_of_stage(static_cast<int>(s));
      std::size_t const before_cut = where_.shards > 1 ? before_cut_in(names_->parameters[s]) : 0;
      std::size_t number = 0;
      for (step_names::trained_parameter const& one : names_->parameters[s]) {
        bool const precedes = number++ < before_cut;
        double squared = 0;
        for (int shard = 0; shard < where_.shards; ++shard) {
          double of_shard = 0;
          std::size_t& place = next[static_cast<std::size_t>(rank * where_.shards + shard)];
          for (std::size_t k = 0; k < one.norm_numbers[static_cast<std::size_t>(shard)]; ++k, ++place) {
            for (int replica = 0; replica < (one.held == "experts" ? where_.expert_replicas : 1); ++replica)
              of_shard += norm_of(all, where_.rank_at(replica, rank, shard), place);
          }
          if (shard > 0 && one.held == "whole")
            check_equal_norms({s, one.name}, precedes, shard, squared, of_shard, tolerance_, here);
          if (shard == 0 || one.held != "whole") squared += of_shard;
        }
        if (!std::isfinite(squared)) found.gradient_culprit = "the gradient of stage " + std::to_string(s) + "'s " + one.name;
        sum += squared;
      }
    }
    report.grad_norm = std::sqrt(sum);
  }

 private:
  static std::size_t before_cut_in(std::vector<step_names::trained_parameter> const& all) {
    std::vector<over_shards> held;
    for (auto const& one : all) held.push_back(one.held == "whole" ? over_shards::replicated : over_shards::cut);
    return parameters_before_cut(held);
  }
  /// Returns a number of a norm: with a sharded optimizer its sum over replicas, of which all but one have 0.
  /// \param rank a rank of replica 0
  double norm_of(records_of_ranks const& all, int rank, std::size_t place) const {
    double sum = all.numbers(rank, squares_)[place];
    for (int replica = 1; sharded_ && replica < where_.replicas; ++replica)
      sum += all.numbers(rank + where_.rank_at(replica, 0, 0), squares_)[place];
    return sum;
  }

  plan_view plan_;
  topology where_;
  step_names const* names_;
  rank_gradients* gradients_;
  bool rounds_;  // the optimizer reads rounded gradients of half-precision parameters
  double clip_;
  bool sharded_;
  double tolerance_;
  record::field squares_;
};

}  // namespace chevron::detail
