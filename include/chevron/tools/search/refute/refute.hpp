#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <chevron/plan/costs.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/tools/search/problem/problem.hpp>
#include <chevron/tools/search/refute/cases.hpp>
#include <chevron/tools/search/refute/integer_durations.hpp>

/// \file
/// Raises a lower bound by refuting lengths: a length is refuted if no plan is as short.

namespace chevron {

namespace detail {

/// Raises the lower bound for one pipeline.
class refuter {
 public:
  /// \param work limit of the steps of inner loops
  refuter(search::problem const& asked, double length, std::int64_t work)
      : placed_(asked.where),
        of_(asked, length),
        by_span_(asked.goal == search::objective::span),
        alike_(asked.costs.lengths.alike()),
        left_(work) {}

  double raise(double bound, double length) {
    whole_time const found = of_.units(length);
    whole_time low = of_.units(bound), high = found;
    if (!of_.usable) return bound;
    std::int64_t const all = left_;
    // First tries the length just below the known plan's: often no plan is shorter. If that takes too long, tries lengths halfway
    // between the bound and the known length.
    bool halfway = false;
    while (left_ > 0 && low < high && (!halfway || high - low > found / 4096)) {
      whole_time const deadline = halfway ? low + (high - low) / 2 : high - 1 - (high == found ? of_.rounding : 0);
      std::int64_t work = std::min(left_, halfway ? all / 12 : all / 2);
      left_ -= work;
      verdict const came_out = judge(deadline, work);
      left_ += std::max<std::int64_t>(work, 0);
      if (came_out == verdict::refuted) {
        low = deadline + 1;
        if (!halfway) break;
      } else {
        halfway = halfway || came_out == verdict::unknown;
        high = came_out == verdict::met ? std::min(shortest_, deadline) : deadline;
      }
    }
    double const proved = of_.time_of(low - of_.rounding);
    // Lengths that differ by less than the rounding of costs count as equal.
    if (proved >= length * (1 - 1e-12) - of_.time_of(2 * of_.rounding)) return length;
    return std::max(proved, bound);
  }
  /// The shortest plan found while raising the bound, without a name; or a plan without actions.
  plan& shorter() { return shorter_; }

 private:
  /// The order that met the deadline, as a plan.
  plan written(std::vector<int> const& order) const {
    return with_lists(placed_, of_.count, [&](int rank, auto const& put) {
      for (int const i : order) {
        if (of_.rank_of[of_.at(i)] != rank) continue;
        int const c = of_.chain_of(i), k = of_.kind_of_chain(c);
        put(make_action(kind_of_family(k, of_.kinds == 3), c / of_.kinds, i % of_.micro_batches));
      }
    });
  }

  /// Looks for an order that takes no longer than the deadline.
  verdict judge(whole_time deadline, std::int64_t& work) {
    int fed = -1;  // the first stage of the only rank that does not begin at once (`beginnings_are_known`)
    for (int r = 0; r < of_.ranks && by_span_ && alike_; ++r) fed = std::max(fed, of_.first_stage[of_.at(r)]);
    if (fed <= 0) return judge(of_, true, deadline, work);
    // The rank that does not begin at once begins when an input arrives for its first stage. A span counts from that time.
    // Since equal microbatches may be exchanged, any microbatch may arrive first: each is a case. The rank that sends it runs
    // the forwards before that microbatch without a wait.
    for (int m = 0; m < of_.micro_batches; ++m) {
      if (work < 0) return verdict::unknown;
      integer_durations now = of_;
      if (m > 0) now.begin_with(fed, m);
      now.connect();
      work -= 16 * static_cast<std::int64_t>(of_.count);
      verdict const came_out = judge(now, m == 0, deadline, work);
      if (came_out != verdict::refuted) return came_out;
    }
    return verdict::refuted;
  }
  /// \param ascends whether ranks begin with the first microbatch: only then is an order a plan as it stands
  verdict judge(integer_durations const& of, bool ascends, whole_time deadline, std::int64_t& work) {
    cases all(of, by_span_, work);
    verdict const came_out = all.look(deadline);
    if (came_out != verdict::met) return came_out;
    shortest_ = all.shortest();
    if (ascends) shorter_ = written(all.order());
    return came_out;
  }

  plan_view placed_;
  integer_durations of_;
  bool by_span_, alike_;
  std::int64_t left_;
  whole_time shortest_ = 0;
  plan shorter_;
};

/// Whether the cases cover all times at which ranks may begin, which matters for spans. If each rank begins with an input from
/// the first stage of another rank, it begins with the first microbatch, at a known time. Equal microbatches, however, may come
/// in any order: with three ranks the second rank may wait, after its first microbatch, for a later one, and the third rank
/// then begins at a time that no case covers. So with equal microbatches two ranks are the most.
inline bool beginnings_are_known(plan_view const& placed, bool alike) {
  std::vector<int> first(static_cast<std::size_t>(placed.size.ranks), -1);
  int fed = 0;
  for (int s = 0; s < placed.stages; ++s) {
    int& mine = first[static_cast<std::size_t>(placed.rank_of[s])];
    if (mine >= 0) continue;
    mine = s;
    if (s == 0) continue;
    if (first[static_cast<std::size_t>(placed.rank_of[s - 1])] != s - 1) return false;
    ++fed;
  }
  return !alike || fed <= 1;
}

/// The most actions of a problem that `refute` treats: with more, the table of ordered pairs costs more than it saves.
inline constexpr int most_refuted = 100'000;

}  // namespace detail

/// The outcome of `refute`.
struct refutation {
  double bound = 0;  ///< lower bound: no plan is shorter
  plan shorter;      ///< a plan shorter than the known one; or, if none was found, a plan without actions
};

/// Raises a known lower bound to the longest length that it can show to be too short for every plan. For a length it tries all
/// orders, case by case (`cases.hpp`), with a window of time for each action (`windows.hpp`). In
/// these orders microbatches of a stage and kind ascend. If microbatches are equal, this is no restriction, since they can be
/// renamed in any plan. If they are unequal, the bound holds for plans that take microbatches in the given order, weight
/// gradients included.
///
/// Returns `bound` where plans may do things that the cases do not cover: fused pairs that hide time, and, by span, transfers
/// that occupy ranks or wires, and more than two ranks with equal microbatches (`beginnings_are_known`). By makespan such
/// transfers count as delays. The method is Martin & Shmoys's (1996).
///
/// \param bound the known lower bound, in the costs' unit
/// \param length the length of a known plan: the bound rises to it at most, and equals it if no plan is shorter
/// \param work limit of steps of inner loops, of which some 10^9 take a second
inline refutation refute(search::problem const& asked, double bound, double length, std::int64_t work = 100'000'000) {
  refutation out{bound, {}};
  plan const& placed = asked.where;
  bool const by_span = asked.goal == search::objective::span;
  // The cases order a stage's actions by microbatch; backwards of slices run in another order.
  if (placed.size.slices > 1) return out;
  if (asked.costs.hidden > 0 || !(bound > 0) || !(length > bound * (1 + 1e-12))) return out;
  if (by_span && asked.costs.communication_occupies != occupies::nobody) return out;
  if (by_span && !detail::beginnings_are_known(placed, asked.costs.lengths.alike())) return out;
  if (std::int64_t{placed.stages} * placed.size.units() * (asked.split() ? 3 : 2) > detail::most_refuted) return out;
  owned_costs const whole = unsplit(asked.costs, placed.stages);
  search::problem const counted = asked.at(asked.split() ? asked.costs : whole.view());
  detail::refuter cases(counted, length, work);
  out.bound = cases.raise(bound, length);
  out.shorter = static_cast<plan&&>(cases.shorter());
  return out;
}

}  // namespace chevron
