#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/csv/csv.hpp>
#include <chevron/plan/lengths.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/train/trainer.hpp>
#include <chevron/tools/profile/attention_share.hpp>
#include <chevron/tools/profile/trace_window.hpp>
#include <chevron/tools/replan/run_time_planning.hpp>
#include <chevron/tools/search/lengths/replan.hpp>

/// \file
/// Plans each step before it runs, for the lengths of its microbatches, which may be unequal.

namespace chevron {

/// The options of a length_schedule, the same on all ranks.
struct length_options {
  int steps = 10;  ///< number of measured steps before the first plan, from 1 to 20, after one unmeasured step
  /// Share of attention in the time of a microbatch of median length, for `factors_of`, from 0 to 1; empty: computed from the
  /// measured steps by `attention_share`.
  std::optional<double> attention = {};
  double least_gain = .01;       ///< a found plan replaces the plan in use if shorter by this share, for a step's lengths
  activation_limit memory = {};  ///< in chunks; `most` 0: the peak of the first program's fullest rank
  search::effort effort = {};    ///< of each search; `trials` 0: 1000, which take milliseconds
  /// Computes the costs for plans from the measured profile; empty: the profile is used. Called only on global rank 0.
  std::function<profile(profile measured)> costs = {};
};

/// The result of planning one step, equal on every rank. Lengths of plans are predicted, in milliseconds.
struct length_report {
  bool changed = false;  ///< the step runs under the found plan
  double running = 0;    ///< length of the plan in use, for the step's microbatches
  double found = 0;      ///< length of the found plan
  double bound = 0;      ///< lower bound for every order with these stages on these ranks
  double seconds = 0;    ///< of the search on global rank 0
  double attention = 0;  ///< share of time that grows with the square of a length, as given or measured
};

/// Plans a trainer's steps for the lengths of their microbatches. Every rank constructs a length_schedule, with equal options,
/// and calls `before_step` before each step. The first steps are measured. Each later step runs under a plan that was searched
/// for the step's lengths, if that plan is shorter than the plan in use:
///
///     chevron::length_schedule planner(trainer);
///     for (...) {
///       planner.before_step(lengths);  // in tokens, one a microbatch
///       trainer.step(parts);           // std::vector<batch>
///     }
///
/// Stages remain on their ranks and gradients are added in the same order, so losses and parameters have the same bits as under
/// the first program.
///
/// The length of a microbatch is its largest length over the replicas. The cost of a microbatch on a stage is the stage's
/// median cost for a microbatch of median length, times a factor for the length (`factors_of`).
class length_schedule {
 public:
  /// Compares the options over the ranks. Collective.
  /// \param train must outlive this object
  /// \throws usage_error for options out of range and for a plan with slices; preflight_error if ranks have different options
  explicit length_schedule(trainer& train, length_options options = {})
      : train_(&train), options_(std::move(options)), first_(copy_of(train.program().plan)) {
    detail::refuse_slices(train, "length_schedule");
    if (!(options_.memory.most > 0)) options_.memory.most = peak_in_flight(first_);
    auto options_of = detail::planning_options(options_.steps, options_.least_gain, options_.memory);
    double const attention = options_.attention.value_or(0);
    options_of.push_back({"attention", options_.attention ? detail::number_text(attention) : "fitted",
                          attention >= 0 && attention <= 1, "from 0 to 1"});
    detail::check_options(train.comm(), "length_options", options_of);
  }

  /// Plans a step, and changes the trainer's program. To be called on every rank before each step. Collective: two gathers of a
  /// few hundred bytes.
  /// \param lengths of the step's microbatches in tokens, above 0; the same on all ranks of a pipeline
  /// \returns the report of the plan; empty until enough steps were measured
  /// \throws usage_error, the same on every rank, if there is not one length per microbatch, a length is not above 0, ranks of
  /// a pipeline were given different lengths, or no plan was found
  std::optional<length_report> before_step(std::vector<double> const& lengths) {
    transport& comm = train_->comm();
    collective_scope const doing(comm, "planning the step");
    std::vector<std::vector<double>> given = lengths_of(comm.all_gather_text(text_of(lengths)));
    bool const ready = costs_ready_ || measured_all(comm);
    std::vector<double> const now = longest_of(given);
    last_ = std::move(given);
    if (!ready) return std::nullopt;
    return take(detail::decided_by_first(comm, "step", train_->next_step(), [&] { return decided(now); }));
  }

 private:
  search::objective goal() const { return detail::objective_of(*train_); }

  static std::string text_of(std::vector<double> const& lengths) {
    std::ostringstream out;
    out.precision(17);
    for (double const one : lengths) out << one << ' ';
    return out.str();
  }
  /// Reads the lengths that all ranks were given, by replica and microbatch.
  std::vector<std::vector<double>> lengths_of(std::vector<std::string> const& all) const {
    auto const pipeline = static_cast<std::size_t>(train_->comm().topology().ranks_of_replica());
    auto const wanted = static_cast<std::size_t>(train_->program().plan.size.units());
    std::vector<std::vector<double>> out;
    for (std::size_t r = 0; r < all.size(); ++r) {
      std::size_t const of_replica = r - r % pipeline;
      if (all[r] != all[of_replica])
        throw usage_error("ranks " + std::to_string(of_replica) + " and " + std::to_string(r) +
                              " were given different lengths, [ " + all[of_replica] + "] and [ " + all[r] +
                              "]. Remedy: all ranks of a pipeline take the same batch",
                          {.ranks = {static_cast<int>(of_replica), static_cast<int>(r)}});
      if (r != of_replica) continue;
      std::istringstream in(all[r]);
      std::vector<std::string> words;
      for (std::string word; in >> word;) words.push_back(word);
      std::string const who = "before_step on rank " + std::to_string(r) + ": ";
      error_context const here{.ranks = {static_cast<int>(r)}};
      if (words.size() != wanted)
        throw usage_error(who + std::to_string(words.size()) + " lengths for " + std::to_string(wanted) +
                              " microbatches. Remedy: give one for each",
                          here);
      out.emplace_back();
      for (std::size_t m = 0; m < wanted; ++m) {
        out.back().push_back(std::strtod(words[m].c_str(), nullptr));
        if (!(out.back()[m] > 0) || !std::isfinite(out.back()[m]))
          throw usage_error(who + "the length of microbatch " + std::to_string(m) + " is " + words[m] +
                                ". Remedy: give how many tokens it has, above 0",
                            here);
      }
    }
    return out;
  }
  /// The largest length of each microbatch over the replicas.
  static std::vector<double> longest_of(std::vector<std::vector<double>> const& by_replica) {
    std::vector<double> out = by_replica.front();
    for (auto const& one : by_replica) {
      for (std::size_t m = 0; m < out.size(); ++m) out[m] = std::max(out[m], one[m]);
    }
    return out;
  }

  /// Stores the record of the last step; gathers all records once enough steps were measured. \returns true once enough steps
  /// were measured
  bool measured_all(transport& comm) {
    ++calls_;
    if (calls_ <= 2) return false;  // no step yet, or only the first, in which ranks exchanged messages' shapes
    records_.keep(train_->last_trace(), 0);
    seen_.resize(last_.size());
    for (std::size_t replica = 0; replica < last_.size(); ++replica) seen_[replica].push_back(std::move(last_[replica]));
    if (records_.size() < static_cast<std::size_t>(options_.steps)) return false;
    std::vector<std::string> const texts = comm.all_gather_text(records_.text());
    records_ = {};
    if (comm.topology().global_rank == 0) texts_ = texts;
    costs_ready_ = true;
    return true;
  }

  /// On global rank 0, once: computes the costs of a microbatch of median length, and the share of attention.
  void work_out_costs() {
    if (texts_.empty()) return;
    all_steps const steps = steps_of(texts_, train_->comm().topology().shards);
    texts_.clear();
    std::vector<double> all;
    for (auto const& replica : seen_) {
      for (auto const& step : replica) all.insert(all.end(), step.begin(), step.end());
    }
    median_length_ = median(std::move(all));
    attention_ = options_.attention ? *options_.attention : attention_share(steps, first_.size.ranks, seen_, median_length_);
    profile measured = profile_of(first_, steps);
    if (options_.costs) measured = options_.costs(std::move(measured));
    std::vector<bool> split = split_stages(first_);
    bool const any = std::find(split.begin(), split.end(), true) != split.end();
    costs_ = costs_of(measured, std::vector<bool>(split.size(), any));
    if (!costs_.problem.empty()) throw usage_error("no plan can be made from the measured costs: " + costs_.problem);
  }

  /// On global rank 0: plans a step. \returns the report as a line of numbers, then the plan as CSV if the plan changes
  std::string decided(std::vector<double> const& lengths) {
    work_out_costs();
    auto const from = std::chrono::steady_clock::now();
    length_factors const factors = factors_of(lengths, median_length_, attention_);
    cost_view costs = costs_.view();
    costs.lengths = factors.view();
    plan_view const running = train_->program().plan;
    length_report news;
    news.running = search::length_of(goal(), running, costs);
    // Two starts of the search: the first program, and the plan in use, which was made for other lengths.
    search::found best = search::replan(first_, {.costs = costs, .memory = options_.memory, .goal = goal()}, options_.effort);
    search::found other = search::replan(running, {.costs = costs, .memory = options_.memory, .goal = goal()}, options_.effort);
    if (!other.best.problem && (best.best.problem || other.length < best.length)) best = std::move(other);
    if (best.best.problem) throw usage_error(std::string("no plan was found: ") + describe(best.best.problem).characters);
    news.found = best.length;
    news.bound = best.bound;
    news.changed = news.found <= news.running * (1 - options_.least_gain) && news.found < news.running;
    news.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
    std::ostringstream out;
    out.precision(17);
    out << news.changed << ' ' << news.running << ' ' << news.found << ' ' << news.bound << ' ' << news.seconds << ' '
        << attention_ << '\n';
    if (news.changed) out << show::csv(best.best);
    return out.str();
  }

  /// On every rank: reads rank 0's report, and changes the program if the report says so.
  length_report take(std::string const& told) {
    length_report news;
    std::size_t const line_end = told.find('\n');
    std::istringstream in(told.substr(0, line_end));
    in >> news.changed >> news.running >> news.found >> news.bound >> news.seconds >> news.attention;
    if (news.changed)
      train_->change_schedule(detail::searched_program(std::string_view(told).substr(line_end + 1), options_.memory));
    return news;
  }

  trainer* train_;
  length_options options_;
  plan first_;  // of the trainer's first program
  long calls_ = 0;
  bool costs_ready_ = false;
  trace_window records_;
  std::vector<std::vector<double>> last_;               // lengths of the previous step, by replica
  std::vector<std::vector<std::vector<double>>> seen_;  // lengths of the measured steps, by replica and step

  // On global rank 0.
  std::vector<std::string> texts_;  // records of all ranks, until costs are computed from them
  profiled_costs costs_;
  double median_length_ = 1, attention_ = 0;
};

}  // namespace chevron
