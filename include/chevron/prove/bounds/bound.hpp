#pragma once

#include <chevron/plan/costs.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/activation_limit.hpp>
#include <chevron/prove/bounds/free_places.hpp>
#include <chevron/prove/bounds/lone_microbatch.hpp>
#include <chevron/prove/bounds/wire_bound.hpp>

/// \file
/// Lower bounds on the length of any order of the actions, from placement, costs and the limit of chunks in flight.

namespace chevron {

/// Lengths, in the costs' unit, that no plan's makespan and span are below.
struct lower_bounds {
  double makespan = 0;
  double span = 0;
};

/// The smallest limit of chunks in flight that a plan with this placement can keep: when a microbatch reaches the last stage, a
/// rank holds the microbatch's chunk of each of its stages (with slices, one for each slice).
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
    // The next value in descending (or ascending) order, and the number of entries with this value.
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

/// Computes bounds rank by rank, and then for pairs of ranks. Methods follow the list at `bounds`.
class rank_bounds {
 public:
  /// \param each costs of a microbatch with factor 1
  /// \param costs costs with the least factors
  /// \param lengths null: all factors are 1
  /// \param exact costs for the sums of ranks' work, if I and W of `each` are shortened for the bound
  constexpr rank_bounds(plan_view const& plan, cost_view const& each, cost_view const& costs, unequal_lengths const* lengths,
                        activation_limit memory, cost_view const& exact)
      : plan_(plan),
        each_(each),
        costs_(costs),
        exact_(exact),
        lengths_(lengths),
        memory_(memory),
        micro_batches_(plan.size.units()),
        computations_(lengths == nullptr ? micro_batches_ : lengths->computation.sum),
        transfers_(lengths == nullptr ? micro_batches_ : lengths->transfer.sum),
        way_(plan, costs),
        forward_(plan.stages),
        weight_(plan.stages),
        first_stage_(plan.size.ranks),
        last_stage_(plan.size.ranks),
        to_last_input_(plan.size.ranks),
        to_last_round_(plan.size.ranks) {}

  constexpr lower_bounds all() {
    raise_by_wires(plan_, costs_, each_, transfers_, forward_start_, backward_start_, after_, best_.makespan, best_.span);
    for (int r = 0; r < plan_.size.ranks; ++r) by_rank(r);
    if (!plan_.forward_only) by_pairs_of_ranks();
    return best_;
  }

 private:
  /// A rank's chunks, with sums of their costs at factor 1.
  struct rank_chunks {
    int rank = 0, count = 0;
    int first = -1, last = -1;  ///< stages
    double forward = 0, input = 0, weight = 0;
    double held = 0;     ///< held activations times time: of one microbatch, or of all if lengths are unequal
    double densest = 0;  ///< the most work that can be left for each unit of held activations
    bool limited = false;
    int all = 0;    ///< chunks of a step
    int ahead = 0;  ///< chunks whose F memory allows before the first I
    double leaves = 0;  ///< from the end of the last chunk's I to the end of its dependent actions on the rank
  };

  static constexpr void raise(double& bound, double value) { bound = value > bound ? value : bound; }

  /// Sums the costs of a rank's chunks, and stores each chunk's F and W.
  constexpr rank_chunks chunks_of(int rank) {
    rank_chunks own{.rank = rank};
    for (int s = 0; s < plan_.stages; ++s) {
      if (plan_.rank_of[s] != rank) continue;
      own.first = own.first < 0 ? s : own.first;
      own.last = s;
      double const f = each_.of(kind::forward, s);
      double const i = each_.of_input(s);
      double const w = each_.of(kind::backward_weight, s);
      forward_.data[own.count] = f;
      weight_.data[own.count] = w;
      ++own.count;
      own.forward += f;
      own.input += i;
      own.weight += w;
      if (lengths_ == nullptr) {
        own.held += trip(s) + memory_.kept_for_weight * w;
      } else {
        own.held += lengths_->trips(s, trip(s), each_, micro_batches_, computations_, transfers_) +
                    memory_.kept_for_weight * w * computations_;
      }
      raise(own.densest, i + w);
      raise(own.densest, w / memory_.kept_for_weight);
    }
    own.all = micro_batches_ * own.count;
    own.limited = memory_.most > 0 && memory_.most < own.all;
    own.ahead = own.limited ? memory_.chunks() : own.all;
    return own;
  }

  constexpr void by_rank(int rank) {
    rank_chunks own = chunks_of(rank);
    first_stage_.data[rank] = own.first;
    last_stage_.data[rank] = own.last;
    if (own.count == 0) return;
    if (plan_.forward_only) {
      by_forwards(own);
      return;
    }
    own.leaves = leaves(own, way_, costs_);
    double span = by_work(own);
    raise(span, by_held_chunks(own));
    raise(span, by_longest_way(own));
    raise(span, by_fullest_stage(own));
    raise(best_.span, span);
    raise(best_.makespan, forward_start_[own.first] + span);
  }

  constexpr void by_forwards(rank_chunks const& own) {
    int const end = plan_.stages - 1;
    double const work = computations_ * own.forward;
    double const out =
        forward_start_[end] + costs_.of(kind::forward, end) - forward_start_[own.last] - costs_.of(kind::forward, own.last);
    raise(best_.span, work);
    raise(best_.makespan, forward_start_[own.first] + work + out);
  }

  /// Bounds by the rank's work, and by its waits before its first I, after its last I and after its last F.
  constexpr double by_work(rank_chunks const& own) {
    double const enters = forward_start_[own.first];
    double const input_end = backward_start_[own.last] + costs_.of_input(own.last);
    double const hideable = own.forward < own.input + own.weight ? own.forward : own.input + own.weight;
    double const hidden = computations_ * costs_.hidden * hideable;
    double const work = computations_ * (own.forward + own.input + own.weight) - hidden;
    // Before its first I the rank can only run as many forwards as memory allows: it waits at least this long.
    double const wait = backward_start_[own.last] - enters - sum_of(own, forward_, own.ahead, true);
    double const late = wait > 0 ? wait : 0;
    // The least work that has run when the last I ends, and when the last F ends.
    int const waiting = memory_.waiting_chunks();
    int const weights_done = own.limited && waiting < own.all ? own.all - waiting : 0;
    double const by_last_input = computations_ * (own.forward + own.input) - hidden + sum_of(own, weight_, weights_done, false);
    double const most_held = lengths_ == nullptr ? memory_.most : lengths_->computation.largest(memory_.most, own.count);
    double const left_over = own.limited ? most_held * own.densest : computations_ * (own.input + own.weight);
    double const by_last_forward = work - left_over + (own.limited ? late : 0);
    // From the end of the last F to the end of the same microbatch's I.
    double const round = input_end - forward_start_[own.last] - costs_.of(kind::forward, own.last);

    double span = work + late;
    if (exact_.lengths.attention > 0) {
      double backward = 0;
      for (int s = 0; s < plan_.stages; ++s) backward += plan_.rank_of[s] == own.rank ? exact_.of(kind::backward, s) : 0;
      double const most_hidden = costs_.hidden * (own.forward < backward ? own.forward : backward);
      raise(span, computations_ * (own.forward + backward - most_hidden) + late);
    }
    raise(span, by_last_input + late + costs_.of(kind::backward_weight, own.first));
    raise(span, by_last_forward + round + own.leaves);
    raise(best_.makespan, enters + by_last_input + late + after_[own.first]);
    raise(best_.makespan, enters + by_last_forward + round + after_[own.last]);
    to_last_input_.data[own.rank] = by_last_input + late;
    to_last_round_.data[own.rank] = by_last_forward + round;
    return span;
  }

  /// Bounds by the time for which chunks are held, divided by the number of chunks that memory holds at a time.
  constexpr double by_held_chunks(rank_chunks const& own) {
    double const held = lengths_ == nullptr ? micro_batches_ * own.held : own.held;
    double span = held / (own.limited ? memory_.most : own.all);
    if (own.limited && own.ahead > 0 && memory_.kept_for_weight == 1 && !(costs_.hidden > 0)) {
      // Adds the time for which no order can use all places. W's after the last I may run while that I's gradient is sent.
      free_places const unused(plan_, costs_, own.rank);
      double const filled = held + unused.lost(own.ahead, micro_batches_);
      double const left_last = sum_of(own, weight_, own.ahead, true) - unused.lost_to_last_weights(own.ahead) / own.ahead;
      raise(span, filled / own.ahead);
      raise(best_.makespan, forward_start_[own.first] + filled / own.ahead - left_last + after_[own.first]);
    }
    return span;
  }

  /// Bounds by the time of the longest microbatch, alone, through all stages and back.
  constexpr double by_longest_way(rank_chunks const& own) {
    unhindered const& way = lengths_ == nullptr ? way_ : lengths_->long_way;
    cost_view const costs = lengths_ == nullptr ? costs_ : lengths_->long_one.view();
    double const comes_back = way.backward_start.data[own.last] + costs.of_input(own.last);
    raise(best_.makespan, comes_back + way.after.data[own.last]);
    double const out = lengths_ == nullptr ? own.leaves : leaves(own, way, costs);
    return comes_back - way.forward_start.data[own.first] + out;
  }

  /// Bounds by the places that memory has for chunks of one stage: the place with the most microbatches holds them one after
  /// another.
  constexpr double by_fullest_stage(rank_chunks const& own) {
    double span = 0;
    int nested = 0;
    bool whole = memory_.kept_for_weight == 1;  // W of one microbatch that are alike may run last stage first
    for (int s = 0; s < plan_.stages && own.limited; ++s) {
      if (plan_.rank_of[s] != own.rank) continue;
      whole = whole && weight_.data[nested] == weight_.data[0];
      ++nested;  // while a rank holds this chunk before its I, it also holds those of its earlier stages
      int const places = own.ahead / nested > 1 ? own.ahead / nested : 1;
      int const turns = (micro_batches_ + places - 1) / places;
      auto const shortest = [&](int count) { return lengths_ == nullptr ? count : lengths_->computation.smallest(count); };
      double const trips = lengths_ == nullptr
                               ? turns * trip(s)
                               : lengths_->trips(s, trip(s), each_, turns, shortest(turns), lengths_->transfer.smallest(turns));
      double const one_by_one = trips + (whole ? shortest(turns - 1) * each_.of(kind::backward_weight, s) : 0);
      raise(span, one_by_one + costs_.of(kind::backward_weight, s));
      raise(best_.makespan, forward_start_[s] + one_by_one + after_[s]);
    }
    return span;
  }

  /// Bounds by two ranks: a rank begins before each rank with later stages, and ends after it.
  constexpr void by_pairs_of_ranks() {
    auto const until_out = [&](int from, int to) {
      return backward_start_[to] + costs_.of_input(to) - backward_start_[from] - costs_.of_input(from) +
             costs_.of(kind::backward_weight, to);
    };
    for (int q = 0; q < plan_.size.ranks; ++q) {
      int const to = first_stage_.data[q];
      for (int r = 0; r < plan_.size.ranks && to >= 0; ++r) {
        int const first = first_stage_.data[r];
        if (first < to) continue;
        double const lead = forward_start_[first] - forward_start_[to];
        raise(best_.span, lead + to_last_input_.data[r] + until_out(first, to));
        raise(best_.span, lead + to_last_round_.data[r] + until_out(last_stage_.data[r], to));
      }
    }
  }

  /// Computes `rank_chunks::leaves` for a microbatch with the times `one` and the costs `at`.
  constexpr double leaves(rank_chunks const& own, unhindered const& one, cost_view const& at) const {
    double out = 0;
    double const from = one.backward_start.data[own.last] + at.of_input(own.last);
    for (int s = 0; s < plan_.stages; ++s) {
      if (plan_.rank_of[s] != own.rank) continue;
      raise(out, one.backward_start.data[s] + at.of_input(s) + at.of(kind::backward_weight, s) - from);
    }
    return out;
  }

  /// From the start of a stage's F to the end of its I, by a microbatch alone with the least factors.
  constexpr double trip(int stage) const { return backward_start_[stage] + costs_.of_input(stage) - forward_start_[stage]; }

  /// The sum of the `count` longest or shortest of all microbatches' actions of a kind.
  constexpr double sum_of(rank_chunks const& own, buffer<double> const& by_chunk, int count, bool largest) const {
    return lengths_ == nullptr ? sum_of_most(by_chunk.data, own.count, micro_batches_, count, largest)
                               : lengths_->computation.products(by_chunk.data, own.count, count, largest);
  }

  plan_view const& plan_;
  cost_view const& each_;
  cost_view const& costs_;
  cost_view const& exact_;
  unequal_lengths const* const lengths_;
  activation_limit const memory_;
  int const micro_batches_;
  double const computations_, transfers_;  // sums of factors
  unhindered const way_;
  double const* const forward_start_ = way_.forward_start.data;
  double const* const backward_start_ = way_.backward_start.data;
  double const* const after_ = way_.after.data;
  buffer<double> forward_, weight_;  // of one rank's chunks
  buffer<int> first_stage_, last_stage_;
  buffer<double> to_last_input_, to_last_round_;  // from a rank's first start to its last I's end; its last F's I's
  lower_bounds best_;
};

}  // namespace detail

/// Lower bounds for every plan with this size and placement that keeps the limit. The given plan's actions are not used. By rank:
///   - the rank does all its work, after the first microbatch has arrived;
///   - before its first gradient arrives, the rank runs forwards only, no more than memory allows;
///   - after its last I gradients pass all earlier stages; by then all F and I have run, and all W that memory cannot hold back;
///   - after its last F that microbatch goes to the last stage and back; meanwhile the rank can run only chunks in flight;
///   - a chunk is held until its microbatch is back, and memory holds few: for each place, and for all with `free_places`;
///   - the rank of an earlier stage begins earlier and ends later, by the time between the two stages.
/// If transfers occupy wires, also by wire: the wire's messages are sent one after another, from the time at which the first can
/// be sent; actions that depend on the last message follow. A full backward counts as its I and W, a fused pair with the most
/// that it can hide. Transfers that occupy ranks count as delays only; R, UNSHARD and own actions count as no time.
///
/// If microbatches have unequal lengths, sums of work are exact; times of paths are those with the least factor of each kind; a
/// wait is reduced by the longest forwards that memory allows; a place of memory takes the shortest microbatches; and the longest
/// microbatch's path is a bound, too. If W's have no attention, I and W count as in `with_least_halves`, except in sums of work.
constexpr lower_bounds bounds(plan_view const& plan, cost_view const& costs, activation_limit memory) {
  if (costs.lengths.alike()) return detail::rank_bounds(plan, costs, costs, nullptr, memory, costs).all();
  owned_costs const least_halves = with_least_halves(costs, plan.stages, plan.size.units());
  cost_view const each = costs.lengths.attention > 0 ? least_halves.view() : costs;
  detail::unequal_lengths const lengths(plan, each);
  cost_view const least = lengths.least.view();
  return detail::rank_bounds(plan, each, least, &lengths, memory, costs).all();
}

/// Lower bounds with the plan's own declared limit of chunks in flight, if the plan has one.
constexpr lower_bounds bounds(plan_view const& plan, cost_view const& costs) {
  return bounds(plan, costs, {static_cast<double>(plan.in_flight_limit), 1});
}

}  // namespace chevron
