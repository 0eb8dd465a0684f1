#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include <chevron/base/format.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/stop_request.hpp>
#include <chevron/run/stage/data_agreement.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/train/record.hpp>
#include <chevron/run/train/shard_agreement.hpp>
#include <chevron/run/train/step_names.hpp>
#include <chevron/run/train/step_report.hpp>
#include <chevron/run/train/trainer_options.hpp>

/// \file
/// The numbers that all ranks gather at the end of a step.

namespace chevron::detail {

/// A rank's numbers for one loss that one of its stages declares.
struct loss_contribution {
  double value = 0;   ///< this replica's part of the mean, without the loss's factor
  double counts = 0;  ///< the sum of this replica's microbatches' weights in this loss
  double total = 0;   ///< the sum of weights over all replicas, the denominator of the mean
};

/// A rank's contribution to the gather that ends a step.
struct step_contribution {
  std::span<double const> weighted_losses;               ///< by microbatch; zeros on ranks without the last stage
  std::span<loss_contribution const> stage_losses = {};  ///< of this rank's stages, by stage
  double counts = 0;                  ///< sum of this replica's weights; NaN on a rank without the tensors that are weighed
  double all_counts = 0;              ///< sum over all replicas, the denominator of means; NaN on such a rank
  std::int64_t samples = 0;           ///< samples of this replica; 0 on a rank that cannot count samples
  double shapes = 0;                  ///< a fingerprint of this rank's batches' shapes
  double busy_seconds = 0;            ///< in computations (`is_compute`: F, B, I, W, R and own actions), without waits
  double span_seconds = 0;            ///< from the beginning of the step to the end of its last computation (`is_compute`)
  std::int64_t calls = 0;             ///< calls of `step` and `accumulate` so far, including refused calls
  int stop_cause = 0;                 ///< the rank's stop request, a number of stop_request.hpp; 0: none
  std::span<double const> data = {};  ///< fingerprints of this rank's batch; empty if none are compared in this step
};

/// Gathers losses, squared norms by parameter, and times at a step's end. Every rank sums in one order (losses by replica and
/// microbatch, norms by stage and registration), so sums have equal bits on all ranks, for any cut into stages.
class step_statistics {
 public:
  /// Gathers the names of all ranks' parameters, losses and side inputs. Collective.
  /// \param names names of this rank (`step_names::text`)
  /// \param copies count of numbers that each rank contributes for the comparison of copies (copy_agreement.hpp)
  /// \param sharded true: each replica has only the norms of its own share of the parameters
  /// \param tolerance relative difference up to which two shards' losses, or norms of a gradient, count as equal
  /// \throws usage_error if no stage has a trained parameter
  step_statistics(plan_view plan, transport& comm, std::string const& names, data_check check, std::size_t copies, bool sharded,
                  double tolerance)
      : plan_(plan),
        comm_(&comm),
        names_(plan, comm.topology(), comm.all_gather_text(names)),
        sharded_(sharded),
        tolerance_(tolerance) {
    std::size_t const most = names_.most_norms(plan_);
    if (most == 0) throw usage_error("no stage has a parameter that needs a gradient: nothing would be learned");
    data_ = data_agreement(plan_, comm.topology(), names_.taken, check);
    of_units_ = mine_.add(static_cast<std::size_t>(plan_.size.units()));
    of_stages_ = mine_.add(per_loss * names_.most_losses(plan_));
    of_data_ = mine_.add(data_.width());
    of_copies_ = mine_.add(copies);
    norms_ = mine_.add(most);
  }

  void clear() { mine_.clear(); }
  /// Writes this rank's numbers, except for norms and copies. \param rate this rank's learning rate of the step
  void set(step_contribution const& input, double rate) {
    mine_[counts_] = input.counts;
    mine_[busy_] = input.busy_seconds;
    mine_[span_] = input.span_seconds;
    mine_[samples_] = static_cast<double>(input.samples);
    mine_[stop_] = input.stop_cause;
    mine_[shapes_] = input.shapes;
    mine_[calls_] = static_cast<double>(input.calls);
    mine_[rate_] = rate;
    mine_.write(of_units_, input.weighted_losses);
    double* next = mine_.numbers(of_stages_).data();
    for (loss_contribution const& one : input.stage_losses) {
      for (double const number : {one.value, one.counts, one.total}) *next++ = number;
    }
    mine_.write(of_data_, input.data);
    compares_data_ = !input.data.empty();
  }
  /// Squared norms of this rank's gradients, in the order of parameters; zeros after the last.
  std::span<double> norms() { return mine_.numbers(norms_); }
  std::span<double const> norms() const { return mine_.numbers(norms_); }
  /// This rank's numbers for the comparison of copies, for `copy_agreement::write`.
  std::span<double> copies() { return mine_.numbers(of_copies_); }
  /// 1 if this rank found a parameter that is not finite, in a step that looks for them.
  double& lost_parameter() { return mine_[lost_]; }
  double const* copies_of(int global_rank) const { return all_.numbers(global_rank, of_copies_).data(); }
  std::span<double const> losses() const { return mine_.numbers(of_units_); }
  /// The number of the first stage with trained parameters.
  int lowest_trained() const { return names_.lowest_trained(); }
  /// The comparison of batch tensors that several ranks of a pipeline read; their fingerprints are in
  /// `step_contribution::data`.
  data_agreement const& data() const { return data_; }

  void all_gather() { all_.gather(*comm_, mine_); }
  void start_all_gather() { all_.start(*comm_, mine_); }
  void finish_all_gather() { all_.finish(*comm_); }

  // All functions below read the gathered numbers of all ranks.

  /// Compares numbers of calls: after a call that only one rank refused, ranks would train on parts of different batches.
  /// \throws preflight_error if two ranks count different numbers of calls
  void check_calls(error_context const& here) const {
    for (int r = 1; r < comm_->topology().world(); ++r) {
      if (all_.at(r, calls_) == all_.at(0, calls_)) continue;
      throw preflight_error(
          "rank 0 has called step() and accumulate() " + number_text(all_.at(0, calls_)) + " times, rank " + std::to_string(r) +
              " " + number_text(all_.at(r, calls_)) +
              " times, calls that ended in a usage_error included: they would train on parts of different batches. No parameter "
              "was changed. Remedy: give all ranks a batch that none refuses, or make the call again on all of them",
          naming(here, {0, r}));
    }
  }
  /// Whether any rank found a parameter that is not finite.
  bool lost_on_any() const {
    for (int r = 0; r < comm_->topology().world(); ++r) {
      if (all_.at(r, lost_) != 0) return true;
    }
    return false;
  }
  /// Compares learning rates. \throws preflight_error if `trainer_options::learning_rate` returned different rates to two ranks
  void check_rates(error_context const& here) const {
    for (int r = 1; r < comm_->topology().world(); ++r) {
      if (all_.at(r, rate_) == all_.at(0, rate_)) continue;
      throw preflight_error("trainer_options::learning_rate gives rank 0 " + number_text(all_.at(0, rate_)) +
                                " for this step and rank " + std::to_string(r) + " " + number_text(all_.at(r, rate_)) +
                                ". No parameter was changed. Remedy: a function that depends on the step alone",
                            naming(here, {0, r}));
    }
  }
  /// The learning rate on the rank of the first trained stage.
  double rate() const { return all_.at(rank_of_stage(0, lowest_trained()), rate_); }

  /// Compares the weights of batches within each pipeline, and the replicas' sum of weights with the denominator of means.
  /// \param all_counts the total over all replicas by which this rank divided its weights
  /// \throws usage_error if ranks of a pipeline were given batches of different weights, or the total is not the sum
  void check_counts(double all_counts, error_context const& here) const {
    int const ranks = comm_->topology().ranks_of_replica();
    double sum = 0;
    std::string each;
    for (int replica = 0; replica < comm_->topology().replicas; ++replica) {
      int first = -1;  // first rank of the replica that knows the weights
      for (int r = replica * ranks; r < (replica + 1) * ranks; ++r) {
        double const counts = all_.at(r, counts_);
        if (std::isnan(counts)) continue;
        if (first < 0) first = r;
        if (counts == all_.at(first, counts_)) continue;
        throw usage_error(
            "ranks " + std::to_string(first) + " and " + std::to_string(r) + " were given batches that count " +
                number_text(all_.at(first, counts_)) + " and " + number_text(counts) +
                " samples (or units of trainer_options::loss_weight): all ranks of a pipeline take the same batch. Remedy: one "
                "batch for these ranks, and trainer_options::loss_weight where inputs and targets have different sizes",
            naming(here, {first, r}));
      }
      double const counts = all_.at(first, counts_);
      sum += counts;
      each += (replica == 0 ? "" : ", ") + number_text(counts);
    }
    if (sum == 0) refuse_empty_mean(here);
    if (std::abs(sum - all_counts) > 1e-9 * all_counts) {
      throw usage_error("the replicas' batches count " + each +
                            " samples (or units of trainer_options::loss_weight), but each was taken for a share of " +
                            number_text(all_counts) + ": give step() the total over all replicas, accumulated batches included",
                        here);
    }
  }

  /// Compares the data of each pipeline's ranks and, in the first step that compares data, of the replicas.
  /// \throws preflight_error if ranks of a pipeline were given different data, and, with `same_batch::stop`, if two replicas
  /// were given the same
  void check_data(same_batch equal, error_context const& here) {
    if (!compares_data_) return;
    auto const data_of = [&](int global_rank) { return all_.numbers(global_rank, of_data_).data(); };
    data_.check(data_of, here);
    if (std::exchange(replicas_compared_, true) || equal == same_batch::allow) return;
    std::string const warning = data_.equal_replicas(data_of);
    if (warning.empty()) return;
    if (equal == same_batch::stop) throw preflight_error(warning + ". No parameter was changed", here);
    if (here.rank == 0) TORCH_WARN(warning);
  }

  /// Sums all microbatches' losses into `report.loss`.
  /// \returns words for the first loss that is not finite and the number of finite ones; empty if all are finite
  /// \throws preflight_error if the shards of the last stage have different losses for a microbatch
  std::string add_losses(step_report& report, error_context const& here) const {
    std::string culprit;
    int finite = 0;
    report.loss = 0;
    for (int replica = 0; replica < comm_->topology().replicas; ++replica) {
      for (int m = 0; m < plan_.size.units(); ++m) {
        double const loss = all_.numbers(rank_of_stage(replica, plan_.stages - 1), of_units_)[static_cast<std::size_t>(m)];
        check_shards(replica, plan_.stages - 1, of_units_.first + static_cast<std::size_t>(m), "microbatch " + std::to_string(m),
                     here);
        finite += std::isfinite(loss) ? 1 : 0;
        if (culprit.empty() && !std::isfinite(loss)) {
          culprit = "the loss of microbatch " + std::to_string(m);
          if (comm_->topology().replicas > 1) culprit += " of replica " + std::to_string(replica);
        }
        report.loss += loss;
      }
    }
    if (!culprit.empty() && finite > 0) culprit += ", unlike " + std::to_string(finite) + (finite > 1 ? " others," : " other,");
    return culprit;
  }
  /// Sums the losses of stages over the replicas into `report.losses`.
  /// \returns words for the first loss that is not finite; empty if all are finite
  /// \throws usage_error if a loss's total in `step_total` is not the sum over replicas; preflight_error if losses of shards
  /// differ
  std::string add_stage_losses(step_report& report, error_context const& here) const {
    std::string culprit;
    std::vector<std::size_t> next(static_cast<std::size_t>(plan_.size.ranks), of_stages_.first);
    for (std::size_t s = 0; s < names_.losses.size(); ++s) {
      int const rank = plan_.rank_of_stage(static_cast<int>(s));
      for (step_names::loss const& loss : names_.losses[s]) {
        std::size_t const place =
            std::exchange(next[static_cast<std::size_t>(rank)], next[static_cast<std::size_t>(rank)] + per_loss);
        double value = 0, counts = 0;
        for (int replica = 0; replica < comm_->topology().replicas; ++replica) {
          double const* const of = all_.all(rank_of_stage(replica, static_cast<int>(s))).data() + place;
          value += of[0];
          counts += of[1];
          check_shards(replica, static_cast<int>(s), place, "`" + loss.name + "`", here);
          bool const all = replica + 1 == comm_->topology().replicas;
          if (!all || std::isnan(counts) || std::isnan(of[2]) || std::abs(counts - of[2]) <= 1e-9 * of[2]) continue;
          throw usage_error("the microbatches count " + number_text(counts) + " in loss `" + loss.name + "` of stage " +
                                std::to_string(s) + ", but each was taken for a share of " + number_text(of[2]) +
                                ": give step() the total over all replicas, accumulated batches included",
                            here);
        }
        if (culprit.empty() && !std::isfinite(value)) culprit = "loss `" + loss.name + "` of stage " + std::to_string(s);
        auto const same = std::find_if(report.losses.begin(), report.losses.end(),
                                       [&](stage_loss_value const& one) { return one.name == loss.name; });
        if (same != report.losses.end()) {
          same->value += value;
        } else {
          report.losses.push_back({loss.name, value, loss.factor});
        }
      }
    }
    return culprit;
  }
  /// Computes `report.grad_norm`. Sums the squared norms of a cut parameter over the ranks that have its pieces; for any other
  /// parameter, counts the first shard's norm.
  /// \returns words for the last gradient by stage that is not finite, the first that the backward computed; empty: all are
  /// finite
  /// \throws preflight_error if shards have unequal norms for a parameter of which each shard has a copy
  std::string add_norms(step_report& report, error_context const& here) const {
    topology const& where = comm_->topology();
    std::string culprit;
    std::vector<std::size_t> next(static_cast<std::size_t>(plan_.size.ranks * where.shards), norms_.first);
    double sum = 0;
    for (std::size_t s = 0; s < names_.parameters.size(); ++s) {
      int const rank = plan_.rank_of_stage(static_cast<int>(s));
      std::vector<over_shards> held;
      for (step_names::trained_parameter const& one : names_.parameters[s])
        held.push_back(one.held == "whole" ? over_shards::replicated : over_shards::cut);
      std::size_t before_cut = parameters_before_cut(held), number = 0;
      for (step_names::trained_parameter const& one : names_.parameters[s]) {
        bool const precedes = number++ < before_cut;
        double squared = 0;
        for (int shard = 0; shard < where.shards; ++shard) {
          double of_shard = 0;
          std::size_t& place = next[static_cast<std::size_t>(rank * where.shards + shard)];
          for (std::size_t k = 0; k < one.norm_numbers[static_cast<std::size_t>(shard)]; ++k, ++place) {
            for (int replica = 0; replica < (one.held == "experts" ? where.expert_replicas : 1); ++replica)
              of_shard += norm_of(where.rank_at(replica, rank, shard), place);
          }
          if (shard > 0 && one.held == "whole")
            check_equal_norms({s, one.name}, precedes, shard, squared, of_shard, tolerance_, here);
          if (shard == 0 || one.held != "whole") squared += of_shard;
        }
        if (!std::isfinite(squared)) culprit = "the gradient of stage " + std::to_string(s) + "'s " + one.name;
        sum += squared;
      }
    }
    report.grad_norm = std::sqrt(sum);
    return culprit;
  }
  /// Computes `report.bubble` from the ranks' times.
  void add_times(step_report& report) const {
    double busy = 0, longest = 0;
    int const world = comm_->topology().world();
    for (int r = 0; r < world; ++r) {
      busy += all_.at(r, busy_);
      longest = std::max(longest, all_.at(r, span_));
    }
    report.bubble = longest > 0 ? 1 - busy / (world * longest) : 0;
  }
  /// Words for the first rank with a stop request, and the reason; empty if no rank has a request.
  std::string stop_reason() const {
    for (int r = 0; r < comm_->topology().world(); ++r) {
      auto const cause = static_cast<int>(all_.at(r, stop_));
      if (cause != 0) return "rank " + std::to_string(r) + " " + stop_words(cause);
    }
    return "";
  }
  /// The number of samples of all replicas.
  std::int64_t samples() const {
    std::int64_t sum = 0;
    for (int replica = 0; replica < comm_->topology().replicas; ++replica) {
      double most = 0;
      for (int p = 0; p < plan_.size.ranks; ++p)
        most = std::max(most, all_.at(comm_->topology().rank_at(replica, p, 0), samples_));
      sum += static_cast<std::int64_t>(most);
    }
    return sum;
  }
  /// Whether two ranks of a pipeline were given batches of different shapes.
  bool shapes_differ() const {
    for (int r = 0; r < comm_->topology().world(); ++r) {
      if (all_.at(r, shapes_) != all_.at(comm_->topology().rank_at(comm_->topology().replica_of(r), 0, 0), shapes_)) return true;
    }
    return false;
  }

 private:
  static constexpr std::size_t per_loss = 3;  // numbers of a loss of a stage: value, counts, total

  /// Compares a loss, at index `place` of a rank's numbers, over a stage's shards. \throws preflight_error if shards differ
  void check_shards(int replica, int stage, std::size_t place, std::string const& of, error_context const& here) const {
    int const first = rank_of_stage(replica, stage);
    for (int k = 1; k < comm_->topology().shards; ++k)
      check_equal_losses(k, of, all_.all(first)[place], all_.all(first + k)[place], tolerance_, here);
  }
  /// The global rank that has a stage in a replica, for the first shard.
  int rank_of_stage(int replica, int stage) const { return comm_->topology().rank_at(replica, plan_.rank_of_stage(stage), 0); }
  /// Returns a number of a norm: with a sharded optimizer its sum over replicas, of which all but one have 0.
  /// \param rank a rank of replica 0
  double norm_of(int rank, std::size_t place) const {
    double sum = all_.all(rank)[place];
    for (int replica = 1; sharded_ && replica < comm_->topology().replicas; ++replica)
      sum += all_.all(rank + comm_->topology().rank_at(replica, 0, 0))[place];
    return sum;
  }

  plan_view plan_;
  transport* comm_;
  step_names names_;
  bool sharded_;
  double tolerance_;
  data_agreement data_;
  bool compares_data_ = false;      // in this step
  bool replicas_compared_ = false;  // in an earlier step
  record mine_;
  record::field const counts_ = mine_.add(), busy_ = mine_.add(), span_ = mine_.add(), samples_ = mine_.add(),
                      stop_ = mine_.add(), shapes_ = mine_.add(), calls_ = mine_.add(), rate_ = mine_.add(), lost_ = mine_.add();
  record::field of_units_, of_stages_, of_data_, of_copies_, norms_;
  records_of_ranks all_;
};

}  // namespace chevron::detail
