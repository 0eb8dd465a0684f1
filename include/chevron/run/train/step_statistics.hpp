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
        copies_(copies),
        sharded_(sharded),
        tolerance_(tolerance) {
    std::size_t const most = names_.most_norms(plan_);
    most_losses_ = names_.most_losses(plan_);
    if (most == 0) throw usage_error("no stage has a parameter that needs a gradient: nothing would be learned");
    data_ = data_agreement(plan_, comm.topology(), names_.taken, check);
    width_ = first_norm() + most;
    mine_.resize(width_);
    all_.resize(width_ * static_cast<std::size_t>(comm.topology().world()));
  }

  void clear() { std::fill(mine_.begin(), mine_.end(), 0.0); }
  /// Writes this rank's numbers, except for norms and copies. \param rate this rank's learning rate of the step
  void set(step_contribution const& input, double rate) {
    mine_[0] = input.counts;
    mine_[1] = input.busy_seconds;
    mine_[2] = input.span_seconds;
    mine_[3] = static_cast<double>(input.samples);
    mine_[4] = input.stop_cause;
    mine_[5] = input.shapes;
    mine_[6] = static_cast<double>(input.calls);
    mine_[7] = rate;
    std::copy(input.weighted_losses.begin(), input.weighted_losses.end(), mine_.begin() + header);
    double* next = mine_.data() + first_of_losses();
    for (loss_contribution const& one : input.stage_losses) {
      for (double const number : {one.value, one.counts, one.total}) *next++ = number;
    }
    std::copy(input.data.begin(), input.data.end(), mine_.begin() + first_of_data());
    compares_data_ = !input.data.empty();
  }
  /// Squared norms of this rank's gradients, in the order of parameters; zeros after the last.
  std::span<double> norms() { return std::span(mine_).subspan(first_norm()); }
  std::span<double const> norms() const { return std::span(mine_).subspan(first_norm()); }
  /// This rank's numbers for the comparison of copies, for `copy_agreement::write`.
  std::span<double> copies() { return std::span(mine_).subspan(first_of_copies(), copies_); }
  /// 1 if this rank found a parameter that is not finite, in a step that looks for them.
  double& lost_parameter() { return mine_[8]; }
  double const* copies_of(int global_rank) const { return of_rank(global_rank) + first_of_copies(); }
  std::span<double const> losses() const {
    return std::span(mine_).subspan(header, static_cast<std::size_t>(plan_.size.units()));
  }
  /// The number of the first stage with trained parameters.
  int lowest_trained() const { return names_.lowest_trained(); }
  /// The comparison of batch tensors that several ranks of a pipeline read; their fingerprints are in
  /// `step_contribution::data`.
  data_agreement const& data() const { return data_; }

  void all_gather() { comm_->all_gather(mine_, all_); }
  void start_all_gather() { comm_->start_all_gather(mine_); }
  void finish_all_gather() { comm_->finish_all_gather(all_); }

  // All functions below read the gathered numbers of all ranks.

  /// Compares numbers of calls: after a call that only one rank refused, ranks would train on parts of different batches.
  /// \throws preflight_error if two ranks count different numbers of calls
  void check_calls(error_context const& here) const {
    for (int r = 1; r < comm_->topology().world(); ++r) {
      if (of_rank(r)[6] == of_rank(0)[6]) continue;
      throw preflight_error(
          "rank 0 has called step() and accumulate() " + number_text(of_rank(0)[6]) + " times, rank " + std::to_string(r) + " " +
              number_text(of_rank(r)[6]) +
              " times, calls that ended in a usage_error included: they would train on parts of different batches. No parameter "
              "was changed. Remedy: give all ranks a batch that none refuses, or make the call again on all of them",
          naming(here, {0, r}));
    }
  }
  /// Whether any rank found a parameter that is not finite.
  bool lost_on_any() const {
    for (int r = 0; r < comm_->topology().world(); ++r) {
      if (of_rank(r)[8] != 0) return true;
    }
    return false;
  }
  /// Compares learning rates. \throws preflight_error if `trainer_options::learning_rate` returned different rates to two ranks
  void check_rates(error_context const& here) const {
    for (int r = 1; r < comm_->topology().world(); ++r) {
      if (of_rank(r)[7] == of_rank(0)[7]) continue;
      auto const [first, other] = texts_apart(of_rank(0)[7], of_rank(r)[7]);
      throw preflight_error("trainer_options::learning_rate gives rank 0 " + first + " for this step and rank " +
                                std::to_string(r) + " " + other +
                                ". No parameter was changed. Remedy: a function that depends on the step alone",
                            naming(here, {0, r}));
    }
  }
  /// The learning rate on the rank of the first trained stage.
  double rate() const { return of_rank(rank_of_stage(0, lowest_trained()))[7]; }

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
        double const counts = of_rank(r)[0];
        if (std::isnan(counts)) continue;
        if (first < 0) first = r;
        if (counts == of_rank(first)[0]) continue;
        auto const [one, other] = texts_apart(of_rank(first)[0], counts);
        throw usage_error(
            "ranks " + std::to_string(first) + " and " + std::to_string(r) + " were given batches that count " + one + " and " +
                other +
                " samples (or units of trainer_options::loss_weight): all ranks of a pipeline take the same batch. Remedy: one "
                "batch for these ranks, and trainer_options::loss_weight where inputs and targets have different sizes",
            naming(here, {first, r}));
      }
      double const counts = of_rank(first)[0];
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
    auto const data_of = [&](int global_rank) { return of_rank(global_rank) + first_of_data(); };
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
        double const loss = of_rank(rank_of_stage(replica, plan_.stages - 1))[header + m];
        check_shards(replica, plan_.stages - 1, header + m, "microbatch " + std::to_string(m), here);
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
    std::vector<int> next(static_cast<std::size_t>(plan_.size.ranks), first_of_losses());
    for (std::size_t s = 0; s < names_.losses.size(); ++s) {
      int const rank = plan_.rank_of_stage(static_cast<int>(s));
      for (step_names::loss const& loss : names_.losses[s]) {
        int const place = std::exchange(next[static_cast<std::size_t>(rank)], next[static_cast<std::size_t>(rank)] + per_loss);
        double value = 0, counts = 0;
        for (int replica = 0; replica < comm_->topology().replicas; ++replica) {
          double const* const of = of_rank(rank_of_stage(replica, static_cast<int>(s))) + place;
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
    std::vector<std::size_t> next(static_cast<std::size_t>(plan_.size.ranks * where.shards), first_norm());
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
      busy += of_rank(r)[1];
      longest = std::max(longest, of_rank(r)[2]);
    }
    report.bubble = longest > 0 ? 1 - busy / (world * longest) : 0;
  }
  /// Words for the first rank with a stop request, and the reason; empty if no rank has a request.
  std::string stop_reason() const {
    for (int r = 0; r < comm_->topology().world(); ++r) {
      auto const cause = static_cast<int>(of_rank(r)[4]);
      if (cause != 0) return "rank " + std::to_string(r) + " " + stop_words(cause);
    }
    return "";
  }
  /// The number of samples of all replicas.
  std::int64_t samples() const {
    std::int64_t sum = 0;
    for (int replica = 0; replica < comm_->topology().replicas; ++replica) {
      double most = 0;
      for (int p = 0; p < plan_.size.ranks; ++p) most = std::max(most, of_rank(comm_->topology().rank_at(replica, p, 0))[3]);
      sum += static_cast<std::int64_t>(most);
    }
    return sum;
  }
  /// Whether two ranks of a pipeline were given batches of different shapes.
  bool shapes_differ() const {
    for (int r = 0; r < comm_->topology().world(); ++r) {
      if (of_rank(r)[5] != of_rank(comm_->topology().rank_at(comm_->topology().replica_of(r), 0, 0))[5]) return true;
    }
    return false;
  }

 private:
  static constexpr int header = 9;
  static constexpr int per_loss = 3;

  int first_of_losses() const { return header + plan_.size.units(); }
  int first_of_data() const { return first_of_losses() + per_loss * static_cast<int>(most_losses_); }
  std::size_t first_of_copies() const { return static_cast<std::size_t>(first_of_data()) + data_.width(); }
  std::size_t first_norm() const { return first_of_copies() + copies_; }
  /// Compares a loss, at index `place` of a rank's numbers, over a stage's shards. \throws preflight_error if shards differ
  void check_shards(int replica, int stage, int place, std::string const& of, error_context const& here) const {
    int const first = rank_of_stage(replica, stage);
    for (int k = 1; k < comm_->topology().shards; ++k)
      check_equal_losses(k, of, of_rank(first)[place], of_rank(first + k)[place], tolerance_, here);
  }
  /// The global rank that has a stage in a replica, for the first shard.
  int rank_of_stage(int replica, int stage) const { return comm_->topology().rank_at(replica, plan_.rank_of_stage(stage), 0); }
  /// Returns a number of a norm: with a sharded optimizer its sum over replicas, of which all but one have 0.
  /// \param rank a rank of replica 0
  double norm_of(int rank, std::size_t place) const {
    double sum = of_rank(rank)[place];
    for (int replica = 1; sharded_ && replica < comm_->topology().replicas; ++replica)
      sum += of_rank(rank + comm_->topology().rank_at(replica, 0, 0))[place];
    return sum;
  }
  double const* of_rank(int global_rank) const { return all_.data() + width_ * static_cast<std::size_t>(global_rank); }

  plan_view plan_;
  transport* comm_;
  step_names names_;
  std::size_t most_losses_ = 0;  // largest number of losses that a rank's stages declare
  std::size_t copies_;           // numbers that a rank has for the comparison of copies
  bool sharded_;
  double tolerance_;
  data_agreement data_;
  bool compares_data_ = false;      // in this step
  bool replicas_compared_ = false;  // in an earlier step
  std::size_t width_ = 0;
  std::vector<double> mine_, all_;
};

}  // namespace chevron::detail
