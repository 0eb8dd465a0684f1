#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/run/comm/agreement.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/stage/stage_loss.hpp>
#include <chevron/run/train/rank_gradients.hpp>

/// \file
/// The names that ranks gather when a trainer is constructed, so that a step has to gather only numbers.

namespace chevron::detail {

/// The parameters and losses of all stages, and the side inputs that the stages of each rank read.
struct step_names {
  struct loss {
    std::string name;
    double factor;
  };
  struct trained_parameter {
    std::string name;
    std::string held;                       ///< `whole`, `cut` over shards, or `experts`
    std::vector<std::size_t> norm_numbers;  ///< counts of numbers, by shard (gradient_buckets::norm_numbers)
  };
  std::vector<std::vector<trained_parameter>> parameters;  ///< trained parameters, by stage
  std::vector<std::vector<loss>> losses;                   ///< by stage
  std::vector<std::vector<std::string>> taken;             ///< names of side inputs, by pipeline rank

  step_names() = default;
  /// \param all the ranks' rows of `said`
  /// \throws usage_error, the same on every rank, for losses of one name with two factors, whose values the report cannot sum
  step_names(plan_view const& plan, topology const& where, std::vector<agreement_row> const& all)
      : parameters(static_cast<std::size_t>(plan.stages)),
        losses(parameters.size()),
        taken(static_cast<std::size_t>(plan.size.ranks)),
        shards_(static_cast<std::size_t>(where.shards)) {
    for (agreement_row const& row : all) {
      if (where.replica_of(row.rank) == 0) read(row, where);
    }
    check_factors();
  }

  /// Returns a rank's names. A row for a parameter has `trains`, stage, index within the stage, name, `held` and the count of the
  /// norm's numbers; for a side input, `takes` and the name; for a loss, `loss`, stage, name and factor.
  static agreement said(rank_gradients const& gradients, std::span<std::string const> taken, std::span<rank_loss const> losses) {
    agreement out = said(losses);
    for (std::size_t s = 0; s < gradients.stages(); ++s) {
      if (gradients[s] == nullptr) continue;
      for (std::size_t i = 0; i < gradients[s]->trained().size(); ++i) {
        parameter const& p = gradients[s]->trained()[i];
        char const* const held = p.held != over_shards::cut ? "whole" : p.cut_over == rank_group::experts ? "experts" : "cut";
        out.add({"trains", std::to_string(s), std::to_string(i), p.name, held, std::to_string(gradients[s]->norm_numbers(i))});
      }
    }
    for (std::string const& name : taken) out.add({"takes", name});
    return out;
  }
  /// Returns the losses that a rank's stages declare.
  static agreement said(std::span<rank_loss const> losses) {
    agreement out;
    for (rank_loss const& one : losses) out.add({"loss", std::to_string(one.stage), one.name, number_text(one.factor)});
    return out;
  }

  /// The first stage with trained parameters; the number of stages if no stage has any.
  int lowest_trained() const {
    auto const found = std::find_if(parameters.begin(), parameters.end(), [](auto const& names) { return !names.empty(); });
    return static_cast<int>(found - parameters.begin());
  }
  /// The largest count of numbers that a rank gathers for norms.
  std::size_t most_norms(plan_view const& plan) const {
    std::size_t out = 0;
    for (std::size_t shard = 0; shard < shards_; ++shard) {
      out = std::max(out, most(plan, parameters, [&](trained_parameter const& one) { return one.norm_numbers[shard]; }));
    }
    return out;
  }
  /// The largest number of losses that a rank's stages declare.
  std::size_t most_losses(plan_view const& plan) const {
    return most(plan, losses, [](loss const&) { return std::size_t{1}; });
  }

 private:
  template <class Lists, class Count>
  static std::size_t most(plan_view const& plan, Lists const& by_stage, Count const& count) {
    std::vector<std::size_t> of_rank(static_cast<std::size_t>(plan.size.ranks));
    for (int s = 0; s < plan.stages; ++s) {
      for (auto const& one : by_stage[static_cast<std::size_t>(s)])
        of_rank[static_cast<std::size_t>(plan.rank_of_stage(s))] += count(one);
    }
    return *std::max_element(of_rank.begin(), of_rank.end());
  }

  void read(agreement_row const& row, topology const& where) {
    bool const first_shard = where.shard_of(row.rank) == 0;
    if (row[0] == "trains") {
      auto& known = parameters[std::stoul(row[1])];
      if (first_shard) known.push_back({row[3], row[4], {}});
      known.at(std::stoul(row[2])).norm_numbers.push_back(std::stoul(row[5]));
    } else if (first_shard && row[0] == "takes") {
      taken[static_cast<std::size_t>(where.pipeline_rank_of(row.rank))].push_back(row[1]);
    } else if (first_shard) {
      losses[std::stoul(row[1])].push_back({row[2], std::stod(row[3])});
    }
  }
  void check_factors() const {
    std::map<std::string, std::pair<double, std::size_t>> first;
    for (std::size_t s = 0; s < losses.size(); ++s) {
      for (loss const& one : losses[s]) {
        auto const [known, is_new] = first.emplace(one.name, std::pair(one.factor, s));
        if (is_new || known->second.first == one.factor) continue;
        throw usage_error("loss `" + one.name + "` has the factor " + number_text(known->second.first) + " on stage " +
                          std::to_string(known->second.second) + " and " + number_text(one.factor) + " on stage " +
                          std::to_string(s) + ". Remedy: one factor, or another name");
      }
    }
  }

  std::size_t shards_ = 1;
};

}  // namespace chevron::detail
