#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/tools/search/anneal.hpp>
#include <chevron/tools/search/backfill.hpp>
#include <chevron/tools/search/eager.hpp>
#include <chevron/tools/search/found.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/problem/problem.hpp>
#include <chevron/tools/search/refute/refute.hpp>
#include <chevron/tools/search/start.hpp>
#include <chevron/tools/search/steady.hpp>

/// \file
/// The search of `find`: starts at the smallest limit of chunks in flight, and goes up to the limit asked for.

namespace chevron::search::detail {

/// The next higher limit that a search tries. The steps do not depend on the requested limit: one chunk or, if that is more, a
/// sixteenth of all stages (an eighth from 64 stages on); above the number of stages, and from 256 stages on, a quarter.
constexpr int next_limit(int limit, int stages) {
  int const parts = limit >= stages || stages >= 256 ? 4 : stages >= 64 ? 8 : 16;
  int const step = stages / parts > 1 ? stages / parts : 1;
  return (limit / step + 1) * step;
}

/// The number of schedules in the catalogue, for training with and without slices.
inline constexpr std::size_t published_count =
    decltype(hana::size(catalogue::all))::value + decltype(hana::size(catalogue::sliced))::value;

/// A judge of a search's orders, which accepts every order that keeps the limit of chunks. Judges with other limits, such as
/// bytes by rank, have the same members.
struct any_order {
  /// \returns the limit of chunks that every accepted order keeps: the search's own
  constexpr activation_limit widest(activation_limit memory) const { return memory; }
  /// \returns whether an order of the catalogue is accepted as it is
  constexpr bool fits(plan_view const&) const { return true; }
  /// Accepts an order, or changes it until it is acceptable; a change may alter the order's length.
  /// \returns false for an order that no change makes acceptable
  constexpr bool mended(plan&) const { return true; }
  /// \returns whether higher limits are of no use; asked after each limit on the way up
  constexpr bool enough(int /*limit*/, double /*length*/, double /*bound*/) { return false; }
};

/// The search of `find`, for a problem that is not refused. First it tries the limit asked for, by the catalogue, list
/// schedules and `refute`. Then it goes from the least limit up to that one; at each it improves several lines of orders
/// (`ascent`), each from its best.
template <class Judge>
class rising_search {
 public:
  constexpr rising_search(problem const& asked, effort const& how_hard, Judge const& judge)
      : asked_(asked),
        widest_(asked.within(judge.widest(asked.memory))),
        unlimited_(asked.within({0, asked.memory.kept_for_weight})),
        how_hard_(how_hard),
        judge_(judge),
        total_(actions_of(asked.where.stages, asked.where.size.units(), asked.work)),
        trials_(how_hard.trials > 0 ? how_hard.trials : usual_trials(total_)),
        all_(asked.where.size.units() * asked.where.size.chunks),
        straight_(in_line(asked.where)),
        watch_(how_hard.watch),
        published_(widest_),
        at_once_(asked) {
    bool const limited = asked.memory.most > 0 && asked.memory.most < all_;
    most_ = limited ? asked.memory.rounded() : all_;
    std::int64_t const most_steps = few() ? 20'000'000 : 10'000'000;
    steps_ = std::min(trials_ * std::int64_t{1000}, most_steps);
    watch_.now.bound = result_.bound = bound_of(asked, widest_.memory);
  }
  // Deleted, since `starting_point` members refer to this object's problems.
  rising_search(rising_search const&) = delete;
  rising_search& operator=(rising_search const&) = delete;

  constexpr found run() {
    look_at_published();
    watch_.now.length = result_.published_length;
    if (!published_.exists() || !watch_.stop()) {
      look_at_limit();
      if (has_optimum()) return finished(result_, asked_.memory);
    }
    int const stages = asked_.where.stages;
    int limit = least_in_flight(asked_.where);
    for (; limit <= most_; limit = next_limit(limit, stages)) {
      if (has_optimum() || watch_.stop() || !climb(limit)) break;
    }
    if (published_.exists() && is_shorter(published_.shortest_length))
      take(copy_of(published_.shortest), published_.shortest_length);
    result_.stopped = watch_.stopped();
    if (result_.stopped && at_once_.exists()) {
      // If the limit asked for is one of the steps, a search with a higher limit would try these orders here, too.
      while (limit < most_) limit = next_limit(limit, stages);
      bool const on_the_way = limit == most_ && is_shorter(at_once_.shortest_length);
      if (result_.length == 0 || on_the_way) take(copy_of(at_once_.shortest), at_once_.shortest_length);
    }
    if (result_.length == 0) {
      result_.best = chevron::detail::refused(asked_.where.size, "searched", nothing_found(asked_, result_.stopped));
      return static_cast<found&&>(result_);
    }
    if (!result_.stopped) result_.bound = refute_at(widest_, result_.bound, result_.length, few() ? 5 * steps_ : steps_).bound;
    return finished(result_, asked_.memory);
  }

 private:
  /// Plans with fewer actions than this get many more trials for each action.
  static constexpr int short_order = 150;
  /// With at most this many actions `refute` tries all orders at each limit, as far as its work allows.
  static constexpr int few_actions = 250;
  static constexpr char const* by_cases = "all orders";

  /// A step of the rising search: the problem with one limit, the limit, and a lower bound within it.
  struct rung {
    problem here;
    int limit;
    double bound;
  };

  constexpr bool few() const { return total_ <= few_actions; }
  constexpr bool has_optimum() const { return result_.length > 0 && result_.optimal(); }
  constexpr bool is_shorter(double length) const { return result_.length == 0 || length < result_.length * (1 - 1e-12); }
  constexpr refutation refute_at(problem const& here, double bound, double length, std::int64_t work) const {
    refutation out{bound, {}};
    if (!std::is_constant_evaluated()) out = refute(here, bound, length, work);
    return out;
  }
  constexpr void take(plan made, double length) {
    if (!judge_.mended(made)) return;
    if constexpr (!std::is_same_v<Judge, any_order>) {
      length = published_.length_of(made);
      if (!is_shorter(length)) return;
    }
    result_.start = made.name;
    result_.length = length;
    watch_.now.length = published_.exists() && published_.shortest_length < length ? published_.shortest_length : length;
    result_.best = static_cast<plan&&>(made);
  }

  /// Expands the catalogue's schedules on this placement, and stores the shortest that is accepted at the limit as the schedule
  /// to beat.
  constexpr void look_at_published() {
    starting_point anything(unlimited_);
    for_each_start(asked_.where.size, [&](auto const& one) {
      plan made = to_begin_with(expand(one, asked_.where.size), asked_.costs);
      if (anything.consider(made, made.name)) known_here_[count_here_++] = static_cast<plan&&>(made);
    });
    for_each_published(widest_, [&](plan const& made) {
      if (!judge_.fits(made) || !published_.consider(made, made.name)) return;
      double const length = published_.length_of(made);
      if (result_.published_length > 0 && published_.better(result_.published, result_.published_length, made, length)) return;
      result_.published_length = length;
      result_.published = copy_of(made);
    });
  }
  /// Visits the catalogue's schedules on this placement and, with one stage a rank, variants with slack for slow links as far
  /// as the limit allows.
  template <class Visit>
  constexpr void for_each_published(problem const& here, Visit const& visit) const {
    for (int i = 0; i < count_here_; ++i) visit(known_here_[i]);
    if (straight_) for_each_with_slack(here, visit);
  }

  /// Tries the limit asked for first, by list schedules, the zero-bubble paper's rule and refuting: a small problem often ends
  /// here.
  constexpr void look_at_limit() {
    add_list_schedules(at_once_, asked_);
    if (straight_ && asked_.split()) add_zero_bubble(at_once_, asked_);
    if (published_.exists()) at_once_.consider(published_.shortest, published_.shortest.name);
    if (!at_once_.exists()) return;
    refuted_at_limit_ = refute_at(widest_, result_.bound, at_once_.shortest_length, steps_);
    watch_.now.bound = result_.bound = refuted_at_limit_.bound;
    if (few() && refuted_at_limit_.shorter.actions.count > 0) at_once_.consider(refuted_at_limit_.shorter, by_cases);
    if (at_once_.shortest_length <= result_.bound * (1 + 1e-12)) take(copy_of(at_once_.shortest), at_once_.shortest_length);
  }

  /// Improves each line of orders at one limit.
  /// \returns whether higher limits should be tried
  constexpr bool climb(int limit) {
    watch_.now.limit = limit;
    activation_limit const memory{limit < all_ ? static_cast<double>(limit) : 0, asked_.memory.kept_for_weight};
    rung at{asked_.within(memory), limit, std::max(result_.bound, bound_of(asked_, memory))};
    starting_point known(at.here);
    if (straight_ && asked_.split()) add_zero_bubble(known, at.here);
    for_each_published(at.here, [&](plan const& made) { known.consider(made, made.name); });
    take_over(published_line_, known, at);
    if (watch_.stop()) return false;
    begin_with_lists(known, at);
    if (few() && result_.length > 0 && result_.length <= at.bound * (1 + 1e-12)) return true;
    ascent const& some_line = published_line_.length >= 0 ? published_line_ : listed_line_;
    if (some_line.length < 0) return true;
    follow_lines(some_line, at);
    if (asked_.goal == objective::span && asked_.split() && limit >= roomy_ && !watch_.stop()) follow_eager(some_line, at);
    for (ascent const* line : {&published_line_, &listed_line_, &periodic_line_, &eager_line_}) {
      if (line->length >= 0 && is_shorter(line->length)) take(copy_of(line->best), line->length);
    }
    return !judge_.enough(limit, result_.length, result_.bound);
  }

  /// Fills the waits of the limit's best starting order; if the result is shorter than the line's best, it becomes the line's
  /// best.
  constexpr void take_over(ascent& line, starting_point const& start, rung const& at) {
    if (!start.exists()) return;
    if (is_shorter(start.shortest_length)) take(copy_of(start.shortest), start.shortest_length);
    plan order = copy_of(start.apart);
    double length = start.apart_length;
    fill_gaps_by_slower_messages(order, length, at.here, at.bound, watch_);
    line.take(order, length);
  }

  /// Adds list schedules to their line. For a plan with few actions, `refute` also runs, which may raise the limit's bound.
  constexpr void begin_with_lists(starting_point const& known, rung& at) {
    starting_point listed(at.here);
    add_list_schedules(listed, at.here);
    if (few() && (known.exists() || listed.exists())) {
      bool const by_list = !known.exists() || (listed.exists() && listed.shortest_length < known.shortest_length);
      double const shortest = by_list ? listed.shortest_length : known.shortest_length;
      if (at.limit != most_) refuted_below_ = refute_at(at.here, at.bound, shortest, steps_);
      refutation const& refuted = at.limit == most_ ? refuted_at_limit_ : refuted_below_;
      if (refuted.shorter.actions.count > 0) listed.consider(refuted.shorter, by_cases);
      at.bound = std::max(at.bound, refuted.bound);
    }
    take_over(listed_line_, listed, at);
  }

  constexpr void follow(ascent& line, plan const& from, int trials, rung const& at) {
    if (line.length >= 0 && line.length <= at.bound * (1 + 1e-12)) return;
    std::uint64_t const seed = how_hard_.seed + static_cast<std::uint64_t>(at.limit);
    result_.trials += line.improve(from, at.here, {.trials = trials, .seed = seed}, at.bound, watch_);
  }

  /// Improves lines by periodic orders and local search, with the limit's share of the trials.
  constexpr void follow_lines(ascent const& some_line, rung const& at) {
    int const stages = asked_.where.stages;
    bool const low = 2 * at.limit < stages;
    int const parts = low ? (total_ < short_order ? 40 : 100) : total_ < short_order || at.limit > stages ? 8 : 32;
    int const share = trials_ / parts + 1;
    // Small plans leave time for more periodic orders. If a rank has more than two chunks, some initial periods lead to much
    // longer results than others.
    bool const varied = asked_.where.size.chunks > 2 && total_ < 5'000;
    int const by_size = varied ? std::min(32, 6 + trials_ / 4000) : total_ < 1'000 ? 16 : total_ < 2'000 ? 9 : 5;
    periodic_effort const periods{.seed = how_hard_.seed * 1000 + static_cast<std::uint64_t>(at.limit * 10),
                                  .draws = total_ > 500'000 ? 1
                                           : low            ? 2
                                                            : by_size,
                                  .samples = total_ < 3'200 ? 6 : 1 + 16'000 / total_,
                                  .trials = trials_ / 150 + 1,
                                  .bound = at.bound,
                                  .beat = periodic_line_.length};
    plan const order = periodic_start(some_line.best, at.here, periods, result_.trials, watch_);
    if (order.actions.count > 0) {
      follow(periodic_line_, order, share, at);
    } else if (periodic_line_.length >= 0 && !watch_.stop()) {
      follow(periodic_line_, copy_of(periodic_line_.best), share, at);
    }
    for (ascent* line : {&published_line_, &listed_line_}) {
      bool const left_behind = total_ >= short_order && periodic_line_.length >= 0 && line->length > 1.01 * periodic_line_.length;
      if (line->length >= 0 && !left_behind && !watch_.stop()) follow(*line, copy_of(line->best), share, at);
    }
  }
  constexpr void follow_eager(ascent const& some_line, rung const& at) {
    while (at.limit >= roomy_) roomy_ = std::exchange(roomier_, 2 * roomy_);
    std::uint64_t const seed = how_hard_.seed + static_cast<std::uint64_t>(at.limit);
    plan const eager = eager_start(some_line.best, at.here, {.trials = trials_, .seed = seed}, at.bound, watch_);
    if (eager.actions.count > 0) follow(eager_line_, eager, trials_ / 4, at);
  }

  problem const& asked_;
  problem widest_, unlimited_;
  effort how_hard_;
  Judge judge_;
  int total_;          // number of actions
  int trials_;
  int all_;  // the chunks of a rank, over all microbatches
  bool straight_;
  watched watch_;
  double most_ = 0;         // the requested limit, in chunks
  std::int64_t steps_ = 0;  // limit of inner-loop steps of a call of `refute`
  found result_;
  starting_point published_, at_once_;
  plan known_here_[published_count];  // the catalogue's schedules on this placement
  int count_here_ = 0;
  refutation refuted_at_limit_, refuted_below_;
  // Each line continues from its own best order, since the shortest starting order does not always give the shortest result.
  // The lines are: the catalogue and the zero-bubble rule; list schedules; periodic orders; and, by span with room for all of a
  // microbatch's chunks on each rank, eager orders: there waits decide the length, and orders without waits have most left to
  // gain.
  ascent published_line_, listed_line_, periodic_line_, eager_line_;
  // The next limits of the eager line: 1, 1.5, 2, 3, 4, 6 … times the stages.
  int roomy_ = asked_.where.stages, roomier_ = asked_.where.stages + asked_.where.stages / 2;
};

}  // namespace chevron::search::detail
