#pragma once

#include <chevron/plan/costs.hpp>
#include <chevron/plan/factors.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/activation_limit.hpp>
#include <chevron/prove/free_places.hpp>
#include <chevron/prove/wire_bound.hpp>

/// \file
/// Lower bounds on the length of any order of the actions, from placement, costs and the limit of chunks in flight.

namespace chevron {

/// Lengths, in the costs' unit, below which there is no plan.
struct lower_bounds {
  double makespan = 0;
  double span = 0;
};

/// The smallest limit of chunks in flight that any plan with this placement can keep: when a microbatch reaches the last stage,
/// each stage holds one chunk of it (with slices, one for each slice).
constexpr int least_in_flight(plan_view const& plan) {
  return plan.forward_only ? 0 : detail::most_on_a_rank(plan) * plan.size.slices;
}

namespace detail {

/// The sum of the `count` largest (or smallest) of values, each of which occurs `times` times.
constexpr double sum_of_most(double const* values, int kinds, int times, int count, bool largest) {
  double sum = 0;
  double last = 0;
  bool first = true;
  while (count > 0) {
    // The next value in that order, and how many entries have it.
    double next = 0;
    int same = 0;
    for (int i = 0; i < kinds; ++i) {
      bool const later = first || (largest ? values[i] < last : values[i] > last);
      if (!later) continue;
      if (same == 0 || (largest ? values[i] > next : values[i] < next)) {
        next = values[i];
        same = 1;
      } else if (values[i] == next) {
        ++same;
      }
    }
    if (same == 0) return sum;
    int const taken = count < same * times ? count : same * times;
    sum += taken * next;
    count -= taken;
    last = next;
    first = false;
  }
  return sum;
}

/// The times of one microbatch that goes through all stages forwards and backwards, if no other microbatch were there.
struct unhindered {
  buffer<double> forward_start;   ///< by stage: from the step's start to the start of F
  buffer<double> backward_start;  ///< by stage: from the step's start to the start of I (or B)
  buffer<double> after;           ///< from the end of I to the end of all actions that depend on it

  constexpr unhindered(plan_view const& plan, cost_view const& costs)
      : forward_start(plan.stages), backward_start(plan.stages), after(plan.stages) {
    int const stages = plan.stages;
    auto const message = [&](int boundary) {
      return plan.rank_of[boundary] != plan.rank_of[boundary + 1] ? costs.of_delay(boundary) : 0.0;
    };
    double now = 0;
    for (int s = 0; s < stages; ++s) {
      if (s > 0) now += message(s - 1);
      forward_start.data[s] = now;
      now += costs.of(kind::forward, s);
    }
    for (int s = stages - 1; s >= 0; --s) {
      backward_start.data[s] = now;
      now += costs.of_input(s);
      if (s > 0) now += message(s - 1);
    }
    for (int s = 0; s < stages; ++s) {
      double const own = costs.of(kind::backward_weight, s);
      double const on = s > 0 ? message(s - 1) + costs.of_input(s - 1) + after.data[s - 1] : 0;
      after.data[s] = own > on ? own : on;
    }
  }
};

/// Factors of microbatches of unequal length, for bounds. The time of a path is linear in them: computations, transfers,
/// latencies.
struct unequal_lengths {
  sorted_factors computation, transfer;
  owned_costs least;  ///< costs with the least factor of each kind: no microbatch is quicker anywhere
  owned_costs long_one;
  unhindered long_way;                       ///< for the microbatch with the longest computations
  unhindered of_computations, of_transfers;  ///< a path's computations, and its transfers, with factor 1

  constexpr unequal_lengths(plan_view const& plan, cost_view const& costs)
      : computation(costs.lengths.computation, costs.lengths.count, plan.size.units()),
        transfer(costs.lengths.transfer, costs.lengths.count, plan.size.units()),
        least(scaled(costs, plan.stages, computation.least(), transfer.least())),
        long_one(scaled(costs, plan.stages, computation.most(), transfer_of_longest(plan, costs))),
        long_way(plan, long_one.view()),
        of_computations(plan, without_latency(scaled(costs, plan.stages, 1, 0).view())),
        of_transfers(plan, without_latency(scaled(costs, plan.stages, 0, 1).view())) {}

  /// The sum, over `count` microbatches, of the time from the start of a stage's F to the end of its I, if each were alone, given
  /// the sums of their factors.
  constexpr double trips(int stage, double at_least, cost_view const& each, int count, double computations,
                         double transfers) const {
    double const input = each.of_input(stage);
    double const compute = of_computations.backward_start.data[stage] + input - of_computations.forward_start.data[stage];
    double const messages = of_transfers.backward_start.data[stage] - of_transfers.forward_start.data[stage];
    return count * at_least + (computations - count * computation.least()) * compute +
           (transfers - count * transfer.least()) * messages;
  }

 private:
  static constexpr double transfer_of_longest(plan_view const& plan, cost_view const& costs) {
    int longest = 0;
    for (int m = 1; m < plan.size.units(); ++m) {
      if (costs.lengths.of_computation(m) > costs.lengths.of_computation(longest)) longest = m;
    }
    return costs.lengths.of_transfer(longest);
  }
  static constexpr cost_view without_latency(cost_view of) {
    of.latency = &no_time;
    of.latency_stride = 0;
    return of;
  }
};

/// \param each costs of a microbatch with factor 1
/// \param costs costs with the least factors
/// \param lengths null: all factors are 1
/// \param exact costs for the sums of ranks' work, if I and W of `each` are shortened for the bound
constexpr lower_bounds bounds_at(plan_view const& plan, cost_view const& each, cost_view const& costs,
                                 unequal_lengths const* lengths, activation_limit memory, cost_view const& exact) {
  int const stages = plan.stages;
  int const ranks = plan.size.ranks;
  int const micro_batches = plan.size.units();
  lower_bounds best;
  auto const raise = [](double& bound, double value) { bound = value > bound ? value : bound; };
  double const computations = lengths == nullptr ? micro_batches : lengths->computation.sum;
  unhindered const way(plan, costs);
  unhindered const& long_way = lengths == nullptr ? way : lengths->long_way;
  double const* const forward_start = way.forward_start.data;
  double const* const backward_start = way.backward_start.data;
  raise_by_wires(plan, costs, each, lengths == nullptr ? micro_batches : lengths->transfer.sum, forward_start, backward_start,
                 way.after.data, best.makespan, best.span);
  buffer<double> forward(stages), weight(stages);  // of one rank's chunks
  buffer<int> first_stage(ranks), last_stage(ranks);
  buffer<double> to_last_input(ranks), to_last_round(ranks);  // from a rank's first start to its last I's end; its last F's I's
  for (int r = 0; r < ranks; ++r) {
    int chunks = 0;
    int first = -1;
    int last = -1;
    double sum_forward = 0;
    double sum_input = 0;
    double sum_weight = 0;
    double held = 0;     // by one microbatch (unequal ones: by all): amount times time
    double densest = 0;  // the most work left for a unit of held activations
    for (int s = 0; s < stages; ++s) {
      if (plan.rank_of[s] != r) continue;
      first = first < 0 ? s : first;
      last = s;
      double const f = each.of(kind::forward, s);
      double const i = each.of_input(s);
      double const w = each.of(kind::backward_weight, s);
      forward.data[chunks] = f;
      weight.data[chunks] = w;
      ++chunks;
      sum_forward += f;
      sum_input += i;
      sum_weight += w;
      if (lengths == nullptr) {
        held += backward_start[s] + i - forward_start[s] + memory.kept_for_weight * w;
      } else {
        double const trip = backward_start[s] + costs.of_input(s) - forward_start[s];
        held += lengths->trips(s, trip, each, micro_batches, computations, lengths->transfer.sum) +
                memory.kept_for_weight * w * computations;
      }
      raise(densest, i + w);
      raise(densest, w / memory.kept_for_weight);
    }
    first_stage.data[r] = first;
    last_stage.data[r] = last;
    if (chunks == 0) continue;
    double const enters = forward_start[first];
    if (plan.forward_only) {
      double const work = computations * sum_forward;
      double const out =
          forward_start[stages - 1] + costs.of(kind::forward, stages - 1) - forward_start[last] - costs.of(kind::forward, last);
      raise(best.span, work);
      raise(best.makespan, enters + work + out);
      continue;
    }
    double const input_end = backward_start[last] + costs.of_input(last);
    // From the end of the last chunk's I to the end of its dependent actions on this rank.
    auto const leaves_by = [&](unhindered const& one, cost_view const& at) {
      double out = 0;
      double const from = one.backward_start.data[last] + at.of_input(last);
      for (int s = 0; s < stages; ++s) {
        if (plan.rank_of[s] != r) continue;
        raise(out, one.backward_start.data[s] + at.of_input(s) + at.of(kind::backward_weight, s) - from);
      }
      return out;
    };
    double const leaves = leaves_by(way, costs);

    double const hideable = sum_forward < sum_input + sum_weight ? sum_forward : sum_input + sum_weight;
    double const hidden = computations * costs.hidden * hideable;
    double const work = computations * (sum_forward + sum_input + sum_weight) - hidden;
    int const all = micro_batches * chunks;
    bool const limited = memory.most > 0 && memory.most < all;
    int const ahead = limited ? memory.chunks() : all;
    // The sum of the `count` longest or shortest of all microbatches' actions of a kind.
    auto const sum_of = [&](buffer<double> const& by_chunk, int count, bool largest) {
      return lengths == nullptr ? sum_of_most(by_chunk.data, chunks, micro_batches, count, largest)
                                : lengths->computation.products(by_chunk.data, chunks, count, largest);
    };
    // Before its first I the rank can only run as many forwards as memory allows: it waits at least this long.
    double const wait = backward_start[last] - enters - sum_of(forward, ahead, true);
    double const late = wait > 0 ? wait : 0;
    // Work that must be done when the last I ends, and when the last F ends.
    int const weights_done = limited && memory.waiting_chunks() < all ? all - memory.waiting_chunks() : 0;
    double const by_last_input = computations * (sum_forward + sum_input) - hidden + sum_of(weight, weights_done, false);
    double const most_held = lengths == nullptr ? memory.most : lengths->computation.largest(memory.most, chunks);
    double const left_over = limited ? most_held * densest : computations * (sum_input + sum_weight);
    double const by_last_forward = work - left_over + (limited ? late : 0);
    // From the end of the last F to the end of the same microbatch's I.
    double const round = input_end - forward_start[last] - costs.of(kind::forward, last);

    double span = work + late;
    if (exact.lengths.attention > 0) {
      double backward = 0;
      for (int s = 0; s < stages; ++s) backward += plan.rank_of[s] == r ? exact.of(kind::backward, s) : 0;
      double const most_hidden = costs.hidden * (sum_forward < backward ? sum_forward : backward);
      raise(span, computations * (sum_forward + backward - most_hidden) + late);
    }
    raise(span, by_last_input + late + costs.of(kind::backward_weight, first));
    raise(span, by_last_forward + round + leaves);
    double const held_by_all = lengths == nullptr ? micro_batches * held : held;
    raise(span, held_by_all / (limited ? memory.most : all));
    if (limited && ahead > 0 && memory.kept_for_weight == 1 && !(costs.hidden > 0)) {
      // With the time of memory places that no order can use. W's left after the last I may run while its gradient is sent.
      free_places const unused(plan, costs, r);
      double const filled = held_by_all + unused.lost(ahead, micro_batches);
      double const left_last = sum_of(weight, ahead, true) - unused.lost_to_last_weights(ahead) / ahead;
      raise(span, filled / ahead);
      raise(best.makespan, enters + filled / ahead - left_last + way.after.data[first]);
    }
    if (lengths == nullptr) {
      raise(span, input_end - enters + leaves);
    } else {
      cost_view const long_costs = lengths->long_one.view();
      double const comes_back = long_way.backward_start.data[last] + long_costs.of_input(last);
      raise(span, comes_back - long_way.forward_start.data[first] + leaves_by(long_way, long_costs));
      raise(best.makespan, comes_back + long_way.after.data[last]);
    }
    // Memory has so many places for a stage's chunks; the fullest one takes its share of the microbatches, one after another.
    int nested = 0;
    bool whole = memory.kept_for_weight == 1;  // W of one microbatch that are alike may run last stage first
    for (int s = 0; s < stages && limited; ++s) {
      if (plan.rank_of[s] != r) continue;
      whole = whole && weight.data[nested] == weight.data[0];
      ++nested;  // while a rank holds this chunk before its I, it also holds those of its earlier stages
      int const places = ahead / nested > 1 ? ahead / nested : 1;
      int const turns = (micro_batches + places - 1) / places;
      double const w = costs.of(kind::backward_weight, s);
      double const trip = backward_start[s] + costs.of_input(s) - forward_start[s];
      auto const shortest = [&](int count) { return lengths == nullptr ? count : lengths->computation.smallest(count); };
      double const trips = lengths == nullptr
                               ? turns * trip
                               : lengths->trips(s, trip, each, turns, shortest(turns), lengths->transfer.smallest(turns));
      double const one_by_one = trips + (whole ? shortest(turns - 1) * each.of(kind::backward_weight, s) : 0);
      raise(span, one_by_one + w);
      raise(best.makespan, forward_start[s] + one_by_one + way.after.data[s]);
    }
    raise(best.span, span);
    raise(best.makespan, enters + span);
    raise(best.makespan, enters + by_last_input + late + way.after.data[first]);
    raise(best.makespan, enters + by_last_forward + round + way.after.data[last]);
    if (lengths == nullptr) raise(best.makespan, input_end + way.after.data[last]);
    to_last_input.data[r] = by_last_input + late;
    to_last_round.data[r] = by_last_forward + round;
  }
  // A rank begins before the ranks to whose stages its first stage sends, and ends after them.
  auto const until_out = [&](int from, int to) {
    return backward_start[to] + costs.of_input(to) - backward_start[from] - costs.of_input(from) +
           costs.of(kind::backward_weight, to);
  };
  for (int q = 0; q < ranks && !plan.forward_only; ++q) {
    int const to = first_stage.data[q];
    for (int r = 0; r < ranks && to >= 0; ++r) {
      int const first = first_stage.data[r];
      if (first < to) continue;
      double const lead = forward_start[first] - forward_start[to];
      raise(best.span, lead + to_last_input.data[r] + until_out(first, to));
      raise(best.span, lead + to_last_round.data[r] + until_out(last_stage.data[r], to));
    }
  }
  return best;
}

}  // namespace detail

/// Lower bounds for every plan with this size and placement that keeps the limit. The given plan's actions are not used. By rank:
///   - the rank does all its work, after the first microbatch has arrived;
///   - before its first gradient arrives, the rank runs forwards only, no more than memory allows;
///   - after its last I gradients pass all earlier stages; by then all F and I have run, and all W that memory cannot hold back;
///   - after its last F that microbatch goes to the last stage and back; meanwhile the rank can run only chunks in flight;
///   - a chunk is held until its microbatch is back, and memory holds few: for each place, and for all with `free_places`;
///   - the rank of an earlier stage begins earlier and ends later, by the time between the two stages.
/// If transfers occupy wires, also by wire: its messages go one after another, between the first that can be sent and the end of
/// what the last leads to. A full backward counts as its I and W, a fused pair with the most that it can hide. Transfers that
/// occupy ranks count as delays only.
///
/// If microbatches have unequal lengths, sums of work are exact; times of paths are those with the least factor of each kind; a
/// wait is reduced by the longest forwards that memory allows; a place of memory takes the shortest microbatches; and the longest
/// microbatch's path is a bound, too. If W's have no attention, I and W count as in `with_least_halves`, except in sums of work.
constexpr lower_bounds bounds(plan_view const& plan, cost_view const& costs, activation_limit memory) {
  if (costs.lengths.alike()) return detail::bounds_at(plan, costs, costs, nullptr, memory, costs);
  owned_costs const least_halves = with_least_halves(costs, plan.stages, plan.size.units());
  cost_view const each = costs.lengths.attention > 0 ? least_halves.view() : costs;
  detail::unequal_lengths const lengths(plan, each);
  cost_view const least = lengths.least.view();
  return detail::bounds_at(plan, each, least, &lengths, memory, costs);
}

/// Lower bounds with the plan's own declared limit of chunks in flight, if the plan has one.
constexpr lower_bounds bounds(plan_view const& plan, cost_view const& costs) {
  return bounds(plan, costs, {static_cast<double>(plan.in_flight_limit), 1});
}

}  // namespace chevron
