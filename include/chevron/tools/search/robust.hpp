#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/tools/search/find.hpp>
#include <chevron/tools/search/held.hpp>
#include <chevron/tools/search/jitter.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/start.hpp>

/// \file
/// Searches for a schedule that is short when computations take random times around the planned ones.

namespace chevron::search {

/// The schedule found under jitter. `length`, `bound` and `published_length` are by planned times; `published` is the
/// catalogue's best schedule under this jitter. All drawn lengths come from the same draws, `jitter::draws` of `jitter::seed`,
/// in the costs' unit. The search does not use these draws, except that it returns the catalogue's schedule if no other is
/// clearly shorter in them.
struct robust_found : found {
  found planned;                                                   ///< the schedule by planned times, where the search began
  bool drawn = false;                                              ///< whether the best order was improved over draws
  bool kept = false;                                               ///< whether the best schedule is the catalogue's
  std::vector<double> best_drawn, planned_drawn, published_drawn;  ///< step lengths by draw; `published_drawn` may be empty
};

namespace detail {

/// Local search of one order by its mean length over a few draws, which are the same for every trial. A trial moves an action
/// of one draw's critical path to another place in its rank's list; a move that does not make the mean longer is kept.
class drawn_descent {
 public:
  drawn_descent(plan const& start, problem const& asked, jitter const& how)
      : best_(copy_of(start)), memory_(asked.memory), goal_(asked.goal), random_(how.seed) {
    for (int draw = 0; draw < how.draws; ++draw) now_.emplace_back(how, start.stages, start.size.units(), draw, 0);
    for (duration_sample const& one : now_) costs_.emplace_back(asked.costs, one);
    lengths_.resize(now_.size());
    for (std::size_t k = 0; k < now_.size(); ++k) lengths_[k] = length_under(k);
    at_.resize(static_cast<std::size_t>(3 * best_.stages * best_.size.units()));
    for (int i = 0; i < best_.actions.count; ++i) at_[cell(best_.actions.data[i])] = i;
  }

  /// Runs this many trials, unless the watcher stops them. A trial simulates the whole order once for each draw that it uses.
  void run(int trials, watched& watch) {
    for (int trial = 0; trial < trials && !watch.stop(); ++trial) {
      auto const k = static_cast<std::size_t>(random_.below(static_cast<int>(now_.size())));
      if (trial % in_turn == 0) find_path(k);
      try_one(path_[static_cast<std::size_t>(random_.below(static_cast<int>(path_.size())))], k);
    }
  }
  plan const& best() const { return best_; }
  static constexpr int in_turn = 8;  ///< number of trials for which one draw's critical path is used
  // Deleted, since `costs_` points to elements of `now_`.
  drawn_descent(drawn_descent const&) = delete;
  drawn_descent& operator=(drawn_descent const&) = delete;

 private:
  std::size_t cell(action a) const {
    int const k = a.kind == kind::forward ? 0 : a.kind == kind::backward_weight ? 2 : 1;
    return static_cast<std::size_t>((k * best_.stages + static_cast<int>(a.stage)) * best_.size.units() +
                                    static_cast<int>(a.micro_batch));
  }
  /// The best order's length in draw k; negative if ranks wait for each other for ever.
  double length_under(std::size_t k) {
    when_ = simulate_sampled(best_, costs_[k]);
    return when_.complete ? length_of(goal_, best_, when_) : -1;
  }
  int rank_of(int position) const { return best_.rank_of.data[static_cast<int>(best_.actions.data[position].stage)]; }

  /// Finds the critical path of a draw, backwards from the action that ends last.
  void find_path(std::size_t k) {
    length_under(k);
    path_.clear();
    int at = 0;
    for (int i = 0; i < best_.actions.count; ++i) at = when_.end.data[i] > when_.end.data[at] ? i : at;
    while (at >= 0) {
      path_.push_back(at);
      action const a = best_.actions.data[at];
      bool const first = at == best_.begin.data[rank_of(at)];
      int cause = first ? -1 : at - 1;
      int const feeder = step_graph(best_.rank_of.data, best_.stages, best_.size.units()).from(a);
      if (feeder >= 0 && (first || when_.start.data[at] > when_.end.data[at - 1])) {
        action from = a;
        from.stage = static_cast<std::uint32_t>(feeder) & 0x3ffu;
        cause = at_[cell(from)];
      }
      at = cause;
    }
  }

  void shift(int from, int to) {
    int const step = to > from ? 1 : -1;
    action const moved = best_.actions.data[from];
    for (int i = from; i != to; i += step) best_.actions.data[i] = best_.actions.data[i + step];
    best_.actions.data[to] = moved;
    for (int i = from; i != to + step; i += step) at_[cell(best_.actions.data[i])] = i;
  }
  bool fits(int rank) const { return keeps(memory_, best_, rank); }

  void try_one(int from, std::size_t first) {
    int const rank = rank_of(from);
    int const distance = random_.coin() ? 1 : 1 + random_.below(12);
    int const to = random_.coin() ? from - distance : from + distance;
    if (to < best_.begin.data[rank] || to >= best_.begin.data[rank + 1]) return;
    action const moved = best_.actions.data[from];
    // Actions of one stage and kind stay in the order of microbatches, F before its I and I before its W.
    for (int i = from < to ? from + 1 : to; i < (from < to ? to + 1 : from); ++i) {
      action const other = best_.actions.data[i];
      if (other.stage == moved.stage && (other.kind == moved.kind || other.micro_batch == moved.micro_batch)) return;
    }
    shift(from, to);
    if (fits(rank) && not_longer(first)) {
      lengths_ = then_;
      return;
    }
    shift(to, from);
  }
  static constexpr double hopeless = 0.001;

  /// Whether the changed order is, on average over the draws, no longer than the best. An order that is longer by a thousandth
  /// in the first draws is not simulated in the others.
  bool not_longer(std::size_t first) {
    then_ = lengths_;
    double more = 0;
    for (std::size_t n = 0; n < now_.size(); ++n) {
      std::size_t const k = (first + n) % now_.size();
      then_[k] = length_under(k);
      if (then_[k] < 0) return false;
      more += then_[k] - lengths_[k];
      if (more > hopeless * lengths_[k] * static_cast<double>(n + 1)) return false;
    }
    return more <= 0;
  }

  plan best_;
  activation_limit memory_;
  objective goal_;
  random_numbers random_;
  std::vector<duration_sample> now_;
  std::vector<sampled_costs> costs_;
  std::vector<double> lengths_, then_;
  std::vector<int> path_, at_;
  timeline when_;
};

}  // namespace detail

/// Searches for the schedule whose 90th percentile under jitter is the smallest. Begins with the schedule of `find` and the
/// catalogue's best, improves both by their mean over some draws, and chooses among them by other draws. If the chosen schedule
/// is not below the catalogue's best by two standard errors of the paired difference, returns the catalogue's: so the result's
/// 90th percentile is never above that of a published schedule on this placement within the limit.
///
/// \param planned the result of a search by the planned times, for the same problem
/// \param how the jitter; with a spread of 0 the result is that of `find`
/// \param how_hard the effort; a watcher may end the search at any time, and the best schedule so far is then still judged by all
/// draws
/// \returns a plan that passes `check`; or `best.problem` says why none was found
inline robust_found find_robust(found planned, problem const& asked, jitter const& how, effort how_hard = {}) {
  using namespace detail;
  constexpr int draws_to_descend = 24;
  robust_found out;
  out.planned = std::move(planned);
  out.best = copy_of(out.planned.best);
  out.bound = out.planned.bound;
  out.trials = out.planned.trials;
  out.stopped = out.planned.stopped;
  if (out.best.problem) return out;
  plan_view const placed = out.planned.best;
  watched watch(how_hard.watch);
  watch.now.bound = out.planned.bound;
  watch.now.length = out.planned.length;
  out.start = out.planned.start;
  auto const drawn = [&](plan_view const& made) { return sampled_lengths(made, asked.costs, how, asked.goal); };
  out.planned_drawn = drawn(out.planned.best);

  catalogue::for_each([&](auto const& one) {
    starting_point known(asked);
    plan made = to_begin_with(expand(one, placed.size), asked.costs);
    if (!known.consider(made, one.name)) return;
    std::vector<double> lengths = drawn(made);
    if (!out.published_drawn.empty() && quantile(lengths, target_percentile) >= quantile(out.published_drawn, target_percentile))
      return;
    out.published = std::move(made);
    out.published.name = one.name;
    out.published_length = length_of(asked.goal, out.published, asked.costs);
    out.published_drawn = std::move(lengths);
  });

  // Orders are improved with one set of draws and chosen with another, since an order looks best in the draws that it was made
  // with.
  jitter made_by = how, chosen_by = how;
  random_numbers seeds(how.seed);
  made_by.seed = seeds.next();
  made_by.draws = draws_to_descend;
  chosen_by.seed = seeds.next();
  int const actions = actions_of(placed.stages, placed.size.units(), asked.work);
  int const trials = how_hard.trials > 0 ? how_hard.trials : usual_trials(actions);
  plan challenger = copy_of(out.planned.best);
  std::vector<double> challenging = sampled_lengths(challenger, asked.costs, chosen_by, asked.goal);
  bool const any = !out.published_drawn.empty();
  drawn_descent from_planned(taken_apart(out.planned.best, asked.split()), asked, made_by);
  std::optional<drawn_descent> from_published;
  if (any) from_published.emplace(taken_apart(out.published, asked.split()), asked, made_by);
  // Both orders are improved in turn, so that both have had their share whenever a watcher ends the search.
  for (int left = trials / 20 + 1; left > 0 && !watch.stop(); left -= drawn_descent::in_turn) {
    int const some = std::min(left, drawn_descent::in_turn);
    from_planned.run(some, watch);
    if (any) from_published->run(some, watch);
  }
  auto const challenge = [&](drawn_descent const& search, plan_name const& name) {
    std::vector<double> lengths = sampled_lengths(search.best(), asked.costs, chosen_by, asked.goal);
    if (!difference(lengths, challenging).below()) return;
    challenger = copy_of(search.best());
    challenging = std::move(lengths);
    out.start = name;
    out.drawn = true;
  };
  challenge(from_planned, out.planned.start);
  if (any) challenge(*from_published, out.published.name);

  out.best_drawn = drawn(challenger);
  if (any && !difference(out.best_drawn, out.published_drawn).below()) {
    challenger = copy_of(out.published);
    out.best_drawn = out.published_drawn;
    out.start = out.published.name;
    out.drawn = false;
    out.kept = true;
  }
  out.best = std::move(challenger);
  out.length = length_of(asked.goal, out.best, asked.costs);
  out.stopped = out.stopped || watch.stopped();
  finish(out.best, asked.memory);
  return out;
}

/// Calls `find`, then `find_robust`, with the same problem and effort. \returns the result of `find_robust`
inline robust_found find_robust(problem const& asked, jitter const& how, effort how_hard = {}) {
  return find_robust(find(asked, how_hard), asked, how, how_hard);
}

}  // namespace chevron::search
