#pragma once

#include <chevron/plan/costs.hpp>
#include <chevron/plan/factors.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/timeline.hpp>

/// \file
/// Several training steps in a row without a barrier between them: each rank begins its next step as soon as its current step
/// is over.

namespace chevron {

/// Returns a plan of `steps` steps of `one` back to back, in which microbatch m of step k has the number k × M + m. Cost
/// factors of M microbatches then apply to each step.
constexpr plan back_to_back(plan_view const& one, int steps) {
  int const micro_batches = one.size.units(), most = max_micro_batches / micro_batches;
  bool const fit = steps >= 1 && steps <= most;
  if (!fit || one.problem) steps = 1;
  plan made = detail::with_lists(one, one.total() * steps, [&](int rank, auto const& put) {
    for (int k = 0; k < steps; ++k) {
      for (int i = one.begin[rank]; i < one.begin[rank + 1]; ++i) {
        action a = one.actions[i];
        a.micro_batch = (a.micro_batch + static_cast<unsigned>(k * micro_batches)) & 0xffffu;
        put(a);
      }
    }
  });
  made.size.micro_batches *= steps;
  made.message_limit *= steps;
  if (!fit)
    made.problem = detail::fault(
        law::shape, "steps in a row must be at least 1 and number no more microbatches than a plan can; give at most ", most);
  return made;
}

/// Bounds of the mean time of a step, for many steps back to back.
struct step_time {
  double most = 0;   ///< upper bound
  double least = 0;  ///< lower bound; equal to `most` once the pattern of the steps repeats
  int steps = 0;     ///< number of steps that were played

  /// Whether both bounds are equal, except for rounding.
  constexpr bool settled() const { return most - least <= 1e-9 * most; }
};

namespace detail {

/// An ending without work: a rank begins its next step when its last action has ended.
struct no_ending {
  /// Leaves the times at which ranks are free as they are.
  constexpr void operator()(double const* /*end*/, double* /*clock*/) const {}
  /// The longest time of an ending.
  constexpr double most() const { return 0; }
};

/// The transfers of a step, each boundary in both directions.
constexpr double total_transfers(plan_view const& plan, cost_view const& costs) {
  double sum = 0;
  double const transfers = mean_factors(costs.lengths, plan.size.units()).transfer;
  for (int s = 0; s + 1 < plan.stages; ++s) sum += 2 * plan.size.units() * transfers * costs.of_message(s);
  return sum;
}
template <has_own_slices Costs>
constexpr double total_transfers(plan_view const& plan, Costs const& costs) {
  double sum = 0;
  for (int s = 0; s + 1 < plan.stages; ++s) {
    for (int unit = 0; unit < plan.size.units(); ++unit) sum += 2 * costs.of_message(s, unit);
  }
  return sum;
}

/// An upper bound of the time of any path through a step's actions, messages and gathers of parameters.
template <class Costs>
constexpr double total_cost(plan_view const& plan, Costs const& costs) {
  double sum = total_transfers(plan, costs);
  for (int r = 0; r < plan.size.ranks; ++r) sum += busy_time(plan, costs, r);
  for (int s = 0; s + 1 < plan.stages; ++s) sum += 2 * plan.size.units() * costs.of_latency(s);
  for (int s = 0; s < plan.stages && costs.unshard != nullptr; ++s) sum += costs.unshard[s * costs.unshard_stride];
  return sum;
}

/// `steady_step_time` for a `cost_view`, or a type with costs of each single action.
/// \param ending called behind each step with the ends of its actions and by rank the time from which the rank is free, which it
/// sets to the time at which the rank begins its next step, by sums and maxima of these times; `most()` bounds what it adds
template <class Costs, class Ending>
constexpr step_time steady_time(plan_view const& plan, Costs const& costs, Ending const& ending, int most_steps) {
  constexpr int kept = 8;  // number of earlier steps that a step is compared with: a pattern may repeat only every few steps
  wires const links(plan, costs);
  int const ranks = plan.size.ranks + links.count;  // wires count like ranks
  int const total = plan.total();
  buffer<double> start(total), end(total), clock(ranks, zeroed), first(ranks, zeroed), alone(ranks),
      past_memory(kept * ranks, zeroed);
  double* const past = past_memory.data;
  step_time result;
  // The largest and the smallest advance of a rank since the state `before`.
  auto const moved = [&](double const* before) {
    step_time out{clock.data[0] - before[0], clock.data[0] - before[0]};
    for (int r = 1; r < ranks; ++r) {
      double const by = clock.data[r] - before[r];
      out.most = by > out.most ? by : out.most;
      out.least = by < out.least ? by : out.least;
    }
    return out;
  };
  for (int step = 1; step <= most_steps; ++step) {
    if (play(plan, costs, links, clock.data, start.data, end.data) != total) return {};
    ending(end.data, clock.data);
    // Compares the step with each of the last few, and with the beginning.
    for (int back = 1; back <= kept + 1 && back <= step; ++back) {
      int const steps = back <= kept ? back : step;
      auto const [most, least, _] = moved(back <= kept ? past + (step - back) % kept * ranks : first.data);
      if (result.steps == 0 || most / steps < result.most) result.most = most / steps;
      if (least / steps > result.least) result.least = least / steps;
      result.steps = step;
    }
    if (result.settled()) break;
    if (step > 1) {
      double const* const before = past + (step - 1) % kept * ranks;
      double const most = moved(before).most;
      double latest = 0;
      for (double const now : clock) latest = now > latest ? now : latest;
      double const ahead = latest + total_cost(plan, costs) + ending.most();
      auto const moves_most = [&](int r) { return clock.data[r] - before[r] >= most - 1e-9 * most; };
      for (int r = 0; r < ranks; ++r) alone.data[r] = moves_most(r) ? clock.data[r] + ahead : clock.data[r];
      play(plan, costs, links, alone.data, start.data, end.data);
      ending(end.data, alone.data);
      double least = most;
      for (int r = 0; r < ranks; ++r) {
        double const by = alone.data[r] - clock.data[r] - ahead;
        if (moves_most(r)) least = by < least ? by : least;
      }
      if (least > result.least) result.least = least;
      if (result.settled()) break;
    }
    double* const keep = past + step % kept * ranks;
    for (int r = 0; r < ranks; ++r) keep[r] = clock.data[r];
  }
  return result;
}

}  // namespace detail

/// Plays steps back to back, at most `most_steps`, until the bounds of a step's time are equal. O(actions) per step.
/// \returns bounds of the mean time of a step, for many steps
///
/// A step computes the times at which ranks (and wires) become free from the times of the previous step, by sums and maxima
/// only. Hence, from any step to any later step, the largest and the smallest advance of a rank bound the time of a step in the
/// long run (the max-plus form of Collatz and Wielandt); the bounds are equal once all ranks advance by equal times. If no
/// message goes to earlier stages, as in a forward-only plan, ranks drift apart for ever; the function then plays the ranks
/// that advance most alone, since the slower steps of other ranks do not delay them.
constexpr step_time steady_step_time(plan_view const& plan, cost_view const& costs, int most_steps = 64) {
  return detail::steady_time(plan, costs, detail::no_ending{}, most_steps);
}

}  // namespace chevron
