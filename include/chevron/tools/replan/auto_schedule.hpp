#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/csv/csv.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/gradient_order.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/train/step_report.hpp>
#include <chevron/run/train/trainer.hpp>
#include <chevron/tools/profile/trace_window.hpp>
#include <chevron/tools/replan/replan_report.hpp>
#include <chevron/tools/replan/run_time_planning.hpp>
#include <chevron/tools/search/find.hpp>

/// \file
/// Measures the costs of steps during training, searches a plan for these costs, and changes the trainer's program.

namespace chevron {

/// The options of an auto_schedule, the same on all ranks.
struct auto_options {
  int steps = 10;                ///< number of measured steps per search, from 1 to 20, after one unmeasured step
  double least_gain = .02;       ///< a found plan replaces the plan in use if shorter by this share, with measured costs
  double most_drift = .1;        ///< a larger change of costs (cost_drift), as a share, starts a new search
  long watch_every = 100;        ///< steps from one measurement to the next
  activation_limit memory = {};  ///< in chunks; `most` 0: the peak of the first program's fullest rank
  search::effort effort = {};    ///< of each search
  /// Computes the costs for a search from the measured profile; empty: the profile is used. Called only on global rank 0.
  std::function<profile(profile measured)> costs = {};
};

/// Measures a trainer's steps, searches a plan for the measured costs, and changes the trainer's program. Stages remain on
/// their ranks, so only the order of actions changes, and losses and parameters have the same bits as under the first program.
/// Every rank constructs an auto_schedule, with equal options, and calls `after_step` after each step.
///
///     chevron::auto_schedule planner(trainer);
///     for (...) planner.after_step(trainer.step(inputs, targets));
///
/// Steps under the new program are measured, too: if they are not shorter, the trainer returns to the old program. Later, costs
/// are measured again every `watch_every` steps.
///
/// Costs are medians of a few steps, and are assumed not to depend on the order of actions; with ranks that share cores the
/// assumption is wrong.
class auto_schedule {
 public:
  /// Compares the options over the ranks. Collective.
  /// \param train must outlive this object
  /// \throws usage_error for options out of range, for a program that does not add gradients in ascending order of
  /// microbatches, and for a plan with slices; preflight_error if ranks have different options
  explicit auto_schedule(trainer& train, auto_options options = {})
      : train_(&train), options_(std::move(options)), watch_every_(options_.watch_every) {
    detail::refuse_slices(train, "auto_schedule");
    plan_view const running = train.program().plan;
    if (!same_gradient_order(running, in_ascending_order(running))) {
      throw usage_error(std::string("schedule ") + running.name +
                        " does not add gradients up in the order of microbatches, so another one would compute other bits. "
                        "Remedy: begin with another schedule, or with in_ascending_order(plan)");
    }
    if (!(options_.memory.most > 0)) options_.memory.most = peak_in_flight(running);
    auto options_of = detail::planning_options(options_.steps, options_.least_gain, options_.memory);
    options_of.push_back({"most_drift", detail::number_text(options_.most_drift), options_.most_drift > 0, "above 0"});
    options_of.push_back({"watch_every", detail::number_text(static_cast<double>(watch_every_)), watch_every_ >= options_.steps,
                          "as large as `steps`, the steps that are measured"});
    detail::check_options(train.comm(), "auto_options", options_of);
  }

  /// Measures a step, and after enough steps searches and changes the trainer's program. To be called on every rank after each
  /// step. Collective once enough steps were measured.
  /// \param report the step's report
  /// \returns the report of a search, or of the measurement after a change of plan; else empty
  /// \throws usage_error, the same on every rank, if no plan was found
  std::optional<replan_report> after_step(step_report const& report) {
    if (skip_ > 0) {
      --skip_;
      return std::nullopt;
    }
    records_.keep(train_->last_trace(), report.seconds);
    if (records_.size() < static_cast<std::size_t>(options_.steps)) return std::nullopt;
    transport& comm = train_->comm();
    collective_scope const doing(comm, "planning the schedule");
    std::vector<std::string> const texts = comm.all_gather_text(records_.text());
    records_ = {};
    replan_report news{.step = report.step, .steps = options_.steps};
    std::string const told = detail::decided_by_first(comm, "schedule", news.step, [&] { return decided(texts, news); });
    return take(told, std::move(news));
  }

 private:
  enum class phase { planning, verifying, watching };
  static constexpr char const* quiet = "quiet";

  search::objective goal() const { return detail::objective_of(*train_); }

  /// On global rank 0: decides from the costs. \returns the report as a line of numbers, then the plan if the plan changes;
  /// `quiet` if costs have hardly changed
  std::string decided(std::vector<std::string> const& texts, replan_report& news) {
    profile costs = profile_of(train_->program().plan, steps_of(texts, train_->comm().topology().shards));
    if (options_.costs) costs = options_.costs(std::move(costs));
    news.costs = costs;
    news.measured = goal() == search::objective::span ? costs.step : costs.pipeline;
    std::string plan_text;
    if (phase_ == phase::verifying) {
      news.before = before_;
      news.found = news.running = predicted_;
      news.what = news.measured < before_ ? schedule_event::confirmed : schedule_event::went_back;
      if (news.what == schedule_event::confirmed) reference_ = costs;
    } else {
      double const drift = phase_ == phase::watching ? cost_drift(reference_, costs) : 0;
      if (phase_ == phase::watching && drift <= options_.most_drift) return quiet;
      news.drift = drift;
      reference_ = costs;
      before_ = news.measured;
      plan_text = searched(costs, news);
      predicted_ = news.found;
    }
    std::ostringstream out;
    out.precision(17);
    out << static_cast<int>(news.what) << ' ' << news.drift << ' ' << news.measured << ' ' << news.running << ' ' << news.found
        << ' ' << news.bound << ' ' << news.before << ' ' << news.seconds << '\n'
        << plan_text;
    return out.str();
  }

  /// Searches a plan for the costs, and writes predicted lengths to `news`. \returns the plan as CSV; empty if the gain is too
  /// small
  std::string searched(profile const& measured, replan_report& news) const {
    plan_view const running = train_->program().plan;
    auto const stages = static_cast<std::size_t>(running.stages);
    profiled_costs const own = costs_of(measured, split_stages(running));
    work_graph work = work_graph::split_backward;
    profiled_costs costs = costs_of(measured, std::vector<bool>(stages, true));
    if (!costs.problem.empty()) {
      work = work_graph::full_backward;
      costs = costs_of(measured, std::vector<bool>(stages, false));
    }
    std::string const problem = own.problem.empty() ? costs.problem : own.problem;
    if (!problem.empty()) throw usage_error("no plan can be made from the measured costs: " + problem);
    news.running = search::length_of(goal(), running, own.view());

    auto const from = std::chrono::steady_clock::now();
    search::found const got = search::find(
        {.where = running, .costs = costs.view(), .memory = options_.memory, .goal = goal(), .work = work}, options_.effort);
    news.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
    if (got.best.problem) throw usage_error(std::string("no plan was found: ") + describe(got.best.problem).characters);
    plan const best = in_ascending_order(got.best);
    news.found = search::length_of(goal(), best, costs.view());
    news.bound = got.bound;
    bool const gains = news.found <= news.running * (1 - options_.least_gain) && same_gradient_order(best, running);
    news.what = gains && !check(best) ? schedule_event::changed : schedule_event::kept;
    return news.what == schedule_event::changed ? show::csv(best) : std::string();
  }

  /// On every rank: reads rank 0's report, and changes the program if the report says so.
  std::optional<replan_report> take(std::string const& told, replan_report news) {
    long const until_next = std::max(1L, watch_every_ - options_.steps);
    if (told == quiet) {
      skip_ = until_next;
      return std::nullopt;
    }
    std::size_t const line_end = told.find('\n');
    std::istringstream in(told.substr(0, line_end));
    int what = 0;
    in >> what >> news.drift >> news.measured >> news.running >> news.found >> news.bound >> news.before >> news.seconds;
    news.what = static_cast<schedule_event>(what);
    phase_ = phase::watching;
    skip_ = until_next;
    switch (news.what) {
      case schedule_event::changed:
        previous_ =
            train_->change_schedule(detail::searched_program(std::string_view(told).substr(line_end + 1), options_.memory));
        phase_ = phase::verifying;
        skip_ = 1;
        break;
      case schedule_event::went_back:
        train_->change_schedule(*previous_);
        break;
      case schedule_event::kept:
        // If costs change and a search gains nothing, costs are measured less and less often.
        if (news.drift > 0) watch_every_ = std::min(2 * watch_every_, 16 * options_.watch_every);
        break;
      case schedule_event::confirmed:
        break;
    }
    return news;
  }

  trainer* train_;
  auto_options options_;
  std::optional<proved_program> previous_;  // the program before the one in use
  long watch_every_;
  phase phase_ = phase::planning;
  long skip_ = 1;  // next steps that are not measured: in a program's first step ranks exchange messages' shapes
  trace_window records_;

  // On global rank 0.
  profile reference_;                  // costs of the last search, from which drift is measured
  double before_ = 0, predicted_ = 0;  // length measured before the last change of plan, length predicted for the new plan
};

}  // namespace chevron
