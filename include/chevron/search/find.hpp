#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include <chevron/plan/owned_costs.hpp>
#include <chevron/catalogue/catalogue.hpp>
#include <chevron/prove/bound.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/search/refute/refute.hpp>
#include <chevron/search/anneal.hpp>
#include <chevron/search/backfill.hpp>
#include <chevron/search/eager.hpp>
#include <chevron/search/effort.hpp>
#include <chevron/search/objective.hpp>
#include <chevron/search/steady.hpp>
#include <chevron/search/start.hpp>

/// \file
/// A schedule made for given costs and memory, on any placement.

namespace chevron::search {

/// What a search came to.
struct found {
  plan best;          ///< proved; or, where there is none, `best.problem` says why
  double length = 0;  ///< of the best, in the costs' unit
  double bound = 0;   ///< no schedule on this placement is shorter; of unequal microbatches none that takes them as given
  plan_name start;    ///< what the best was made from
  plan published;     ///< the shortest of the catalogue's on this placement within the limit, if `published_length` is not 0
  double published_length = 0;  ///< its length, in the costs' unit
  std::int64_t trials = 0;      ///< changes tried
  bool stopped = false;         ///< by its watcher, before its end

  /// Nothing shorter exists.
  constexpr bool optimal() const { return !best.problem && length <= bound * (1 + 1e-12); }

  /// Whether a further round is of no use, or its watcher has said stop.
  bool settled() const { return best.problem || optimal() || stopped; }
  double shortest() const { return length; }
  /// Takes what a further round came to, if that is shorter.
  void add(found&& next) {
    std::int64_t const all = trials + next.trials;
    bool const ended = next.stopped;
    double const proved = next.bound > bound ? next.bound : bound;
    if (!next.best.problem && next.length < length * (1 - 1e-12)) *this = std::move(next);
    bound = proved;
    trials = all;
    stopped = ended;
  }
};

namespace detail {

/// The limits at which a search stops on its way up, whatever the limit asked for: every chunk, or a sixteenth of what all stages
/// hold of one microbatch; an eighth of that for 64 stages or more, a quarter above it and for 256 or more.
constexpr int next_limit(int limit, int stages) {
  int const parts = limit >= stages || stages >= 256 ? 4 : stages >= 64 ? 8 : 16;
  int const step = stages / parts > 1 ? stages / parts : 1;
  return (limit / step + 1) * step;
}

/// How many schedules the catalogue has.
inline constexpr int published_count = [] {
  int count = 0;
  catalogue::for_each([&](auto const&) { ++count; });
  return count;
}();

/// An order of fewer actions is tried much harder for its size.
inline constexpr int short_order = 150;
/// With so few actions all orders are looked through at each limit on the way up, too, as far as that goes.
inline constexpr int few_actions = 250;

constexpr found finished(found& result, activation_limit memory) {
  finish(result.best, memory);
  return static_cast<found&&>(result);
}

/// Why no order can keep a limit, or a limit is none.
constexpr finding refusal(plan_view const& placed, activation_limit memory) {
  finding f;
  f.broken = law::description;
  f.words = "a microbatch on its way holds a chunk with each stage of a rank: the memory limit must be at least ";
  f.number = least_in_flight(placed);
  if (memory.most > 0 && memory.chunks() < f.number) return f;
  f.words = "what a chunk keeps for its W must be a share above 0 and at most 1; stages: ";
  f.number = placed.stages;
  if (!(memory.kept_for_weight > 0) || memory.kept_for_weight > 1) return f;
  return {};
}

/// For a limit at which no order was found.
constexpr finding nothing_found(plan_view const& placed, bool stopped) {
  finding f;
  f.broken = law::description;
  f.words = stopped ? "the search was ended before an order was found that keeps the memory limit; microbatches: "
                    : "no order was found that keeps the memory limit; microbatches: ";
  f.number = placed.size.micro_batches;
  return f;
}

/// Judges the orders of a search, and accepts all that keep the limit of chunks. A judge that counts otherwise, such as bytes by
/// rank, has the same members.
struct any_order {
  /// \returns the limit of chunks that every accepted order keeps: the search's own
  constexpr activation_limit widest(activation_limit memory) const { return memory; }
  /// \returns whether an order of the catalogue is accepted as it is
  constexpr bool fits(plan_view const&) const { return true; }
  /// Accepts an order, or changes it until it is accepted; its length then changes, too.
  /// \returns false for an order that no change makes acceptable
  constexpr bool mended(plan&) const { return true; }
  /// \returns whether higher limits are of no use; asked after each limit on the way up
  constexpr bool enough(int /*limit*/, double /*length*/, double /*bound*/) { return false; }
};

/// The search itself, for a plan without actions that says where the stages are.
/// \param judge accepts orders among those that keep `memory`, as `any_order` does
template <class Judge = any_order>
constexpr found find(plan const& placed, cost_view const& costs, activation_limit memory, objective goal, effort how_hard,
                     work_graph work, Judge judge = {}) {
  bool const split = work == work_graph::split_backward;
  char const* const name = "searched";
  found result;
  auto const refuse = [&](finding const& f) { result.best = chevron::detail::refused(placed.size, name, f); };
  if (finding const f = refusal(placed, memory)) {
    refuse(f);
    return result;
  }

  owned_costs const whole = unsplit(costs, placed.stages);
  cost_view const counted_costs = split ? costs : whole.view();
  auto const bound_at = [&](activation_limit const& limit) {
    lower_bounds const least = bounds(placed, counted_costs, limit);
    return goal == objective::makespan ? least.makespan : least.span;
  };
  activation_limit const widest = judge.widest(memory);
  result.bound = bound_at(widest);
  int const total = actions_of(placed.stages, placed.size.micro_batches, work);
  int const trials = how_hard.trials > 0 ? how_hard.trials : usual_trials(total);
  bool const few = total <= few_actions;
  std::int64_t const most_steps = few ? 20'000'000 : 10'000'000;
  std::int64_t const steps = std::min(trials * std::int64_t{1000}, most_steps);
  auto const refute_at = [&](activation_limit const& here, double bound, double length, std::int64_t work_steps) {
    refutation out{bound, {}};
    if (!std::is_constant_evaluated()) {
      out = refute(placed, counted_costs, here, goal == objective::span, split, bound, length, work_steps);
    }
    return out;
  };

  // What the catalogue has, and the paper's rule; each is looked at again where the limit on the way up first allows it.
  int const all = placed.size.micro_batches * placed.size.chunks;
  bool const limited = memory.most > 0 && memory.most < all;
  double const most = limited ? memory.rounded() : all;
  bool const straight = in_line(placed);
  watched watch(how_hard.watch);
  watch.now.bound = result.bound;
  starting_point published(placed, costs, widest, goal, split);
  plan known_here[published_count];  // of the catalogue, on this placement
  int count_here = 0;
  starting_point anything(placed, costs, {0, memory.kept_for_weight}, goal, split);
  catalogue::for_each([&](auto const& one) {
    plan made = to_begin_with(expand(one, placed.size), costs);
    if (anything.consider(made, made.name)) known_here[count_here++] = static_cast<plan&&>(made);
  });
  auto const for_each_published = [&](activation_limit const& limit, auto const& visit) {
    for (int i = 0; i < count_here; ++i) visit(known_here[i]);
    if (straight) for_each_with_slack(placed.size, costs, limit, split, visit);
  };
  for_each_published(widest, [&](plan const& made) {
    if (!judge.fits(made) || !published.consider(made, made.name)) return;
    double const length = published.length_of(made);
    if (result.published_length > 0 && published.better(result.published, result.published_length, made, length)) return;
    result.published_length = length;
    result.published = copy_of(made);
  });
  auto const is_shorter = [&](double length) { return result.length == 0 || length < result.length * (1 - 1e-12); };
  auto const take = [&](plan made, double length) {
    if (!judge.mended(made)) return;
    if constexpr (!std::is_same_v<Judge, any_order>) {
      length = published.length_of(made);
      if (!is_shorter(length)) return;
    }
    result.start = made.name;
    result.length = length;
    watch.now.length = published.exists() && published.shortest_length < length ? published.shortest_length : length;
    result.best = static_cast<plan&&>(made);
  };
  // Straight at the limit first: often nothing is left to do.
  watch.now.length = result.published_length;
  starting_point at_once(placed, costs, memory, goal, split);
  char const* const by_cases = "all orders";
  refutation refuted_here, refuted_below;
  if (!published.exists() || !watch.stop()) {
    add_list_schedules(at_once, placed, costs, memory, split);
    if (straight && split) add_zero_bubble(at_once, placed.size, costs, memory, goal);
    if (published.exists()) at_once.consider(published.shortest, published.shortest.name);
    if (at_once.exists()) {
      refuted_here = refute_at(widest, result.bound, at_once.shortest_length, steps);
      watch.now.bound = result.bound = refuted_here.bound;
      if (few && refuted_here.shorter.actions.count > 0) at_once.consider(refuted_here.shorter, by_cases);
    }
    if (at_once.exists() && at_once.shortest_length <= result.bound * (1 + 1e-12)) {
      take(copy_of(at_once.shortest), at_once.shortest_length);
      if (result.length > 0 && result.optimal()) return finished(result, memory);
    }
  }

  // Three lines are followed upwards, since the shorter order to begin with is not always the better one: what came from the
  // catalogue and the rule, from list scheduling, and, where memory is short, from periodic orders. Each goes on from its own
  // best.
  ascent published_line, listed_line, periodic_line;
  // Spans with room for all of a microbatch's chunks on each rank have a fourth: there gaps are what counts, and orders without them
  // have most left to gain.
  ascent eager_line;
  int roomy = placed.stages, roomier = placed.stages + placed.stages / 2;  // the next limits for it: 1, 1.5, 2, 3, 4, 6 … times the stages
  int limit = least_in_flight(placed);
  for (; limit <= most; limit = next_limit(limit, placed.stages)) {
    if ((result.length > 0 && result.optimal()) || watch.stop()) break;
    watch.now.limit = limit;
    activation_limit const here{limit < all ? static_cast<double>(limit) : 0, memory.kept_for_weight};
    double bound = std::max(result.bound, bound_at(here));
    bool const low = 2 * limit < placed.stages;
    int const parts = low ? (total < short_order ? 40 : 100) : total < short_order || limit > placed.stages ? 8 : 32;
    int const share = trials / parts + 1;
    int const periods = trials / 150 + 1;
    // Small orders can have more. Where a rank has more than two chunks, one beginning leads to a much longer period than another.
    bool const varied = placed.size.chunks > 2 && total < 5'000;
    int const by_size = varied ? std::min(32, 6 + trials / 4000) : total < 1'000 ? 16 : total < 2'000 ? 9 : 5;
    int const draws = total > 500'000 ? 1 : low ? 2 : by_size;
    int const samples = total < 3'200 ? 6 : 1 + 16'000 / total;
    auto const follow = [&](ascent& line, plan const& from, int tried) {
      if (line.length >= 0 && line.length <= bound * (1 + 1e-12)) return;
      std::uint64_t const drawn_by = how_hard.seed + static_cast<std::uint64_t>(limit);
      result.trials += line.improve(from, costs, here, goal, drawn_by, tried, bound, watch);
    };
    auto const take_over = [&](ascent& line, starting_point const& start) {
      if (!start.exists()) return;
      if (is_shorter(start.shortest_length)) take(copy_of(start.shortest), start.shortest_length);
      plan order = copy_of(start.apart);
      double length = start.apart_length;
      fill_gaps_by_slower_messages(order, length, costs, here, goal, bound, watch);
      line.take(order, length);
    };
    starting_point known(placed, costs, here, goal, split);
    if (straight && split) add_zero_bubble(known, placed.size, costs, here, goal);
    for_each_published(here, [&](plan const& made) { known.consider(made, made.name); });
    take_over(published_line, known);
    if (watch.stop()) break;
    starting_point listed(placed, costs, here, goal, split);
    add_list_schedules(listed, placed, costs, here, split);
    if (few && (known.exists() || listed.exists())) {
      bool const by_list = !known.exists() || (listed.exists() && listed.shortest_length < known.shortest_length);
      double const shortest = by_list ? listed.shortest_length : known.shortest_length;
      if (limit != most) refuted_below = refute_at(here, bound, shortest, steps);
      refutation const& refuted = limit == most ? refuted_here : refuted_below;
      if (refuted.shorter.actions.count > 0) listed.consider(refuted.shorter, by_cases);
      bound = std::max(bound, refuted.bound);
    }
    take_over(listed_line, listed);
    if (few && result.length > 0 && result.length <= bound * (1 + 1e-12)) continue;
    ascent const& some_line = published_line.length >= 0 ? published_line : listed_line;
    if (some_line.length < 0) continue;
    std::uint64_t const seed = how_hard.seed * 1000 + static_cast<std::uint64_t>(limit * 10);
    plan const order = periodic_start(some_line.best, costs, here, goal, seed, draws, samples, periods, bound,
                                      periodic_line.length, result.trials, watch);
    if (order.actions.count > 0) {
      follow(periodic_line, order, share);
    } else if (periodic_line.length >= 0 && !watch.stop()) {
      follow(periodic_line, copy_of(periodic_line.best), share);
    }
    for (ascent* line : {&published_line, &listed_line}) {
      bool const left_behind = total >= short_order && periodic_line.length >= 0 && line->length > 1.01 * periodic_line.length;
      if (line->length >= 0 && !left_behind && !watch.stop()) follow(*line, copy_of(line->best), share);
    }
    if (goal == objective::span && split && limit >= roomy && !watch.stop()) {
      while (limit >= roomy) roomy = std::exchange(roomier, 2 * roomy);
      plan const eager =
          eager_start(some_line.best, costs, here, goal, how_hard.seed + static_cast<std::uint64_t>(limit), trials, bound, watch);
      if (eager.actions.count > 0) follow(eager_line, eager, trials / 4);
    }
    for (ascent const* line : {&published_line, &listed_line, &periodic_line, &eager_line}) {
      if (line->length >= 0 && is_shorter(line->length)) take(copy_of(line->best), line->length);
    }
    if (judge.enough(limit, result.length, result.bound)) break;
  }
  if (published.exists() && is_shorter(published.shortest_length)) take(copy_of(published.shortest), published.shortest_length);
  result.stopped = watch.stopped();
  if (result.stopped && at_once.exists()) {
    // Where the way up would have come to the limit itself, it would have found these orders there.
    while (limit < most) limit = next_limit(limit, placed.stages);
    bool const on_the_way = limit == most && is_shorter(at_once.shortest_length);
    if (result.length == 0 || on_the_way) take(copy_of(at_once.shortest), at_once.shortest_length);
  }
  if (result.length == 0) {
    refuse(nothing_found(placed, result.stopped));
    return result;
  }
  if (!result.stopped) result.bound = refute_at(widest, result.bound, result.length, few ? 5 * steps : steps).bound;
  return finished(result, memory);
}

}  // namespace detail

/// Looks for the shortest schedule of this shape on this placement: from the catalogue's schedules, the zero-bubble paper's
/// orders (with one stage a rank) and list schedules, the best is improved by local search, trial by trial. So the result is
/// never longer than the best of the catalogue that lives on this placement and keeps the limit. Of a small pipeline all orders are
/// looked through (`refute`); then nothing is shorter, and that is said: `found.optimal()`.
///
/// \param where `placement::linear`, `loop`, `vee`, `wave<n>` or a map
/// \param costs by stage or one for all, in any unit of time
/// \param memory `most` is in chunks on a rank; the smallest that can be kept is the number of stages on a rank
/// \param work whether backwards are split into I and W
/// \returns a plan that passes `check` and declares its limit of chunks in flight: `lower(prove(found.best))`. Where there is
/// none, `best.problem` says why; it does not throw
template <placement_policy Placement>
constexpr found find(Placement const& where, shape size, cost_view const& costs, activation_limit memory = {},
                     objective goal = objective::makespan, effort how_hard = {}, work_graph work = work_graph::split_backward) {
  return detail::search_on<found>(where, size,
                                  [&](plan const& placed) { return detail::find(placed, costs, memory, goal, how_hard, work); });
}

}  // namespace chevron::search
