#pragma once

#include <cstdint>

#include <chevron/describe/sized.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/tools/search/problem/objective.hpp>

/// \file
/// The zero-bubble paper's automatic schedules, ZB-1p and ZB-2p (Qi et al., arXiv 2401.10241 §3.1): orders for given costs and
/// memory, with one stage a rank.

namespace chevron::search {

/// Activation memory of a stage: memory that F allocates, and that I and W free (the three sum to 0). The unit is the caller's
/// (chunks, bytes, bytes of one layer …).
struct memory_model {
  double forward = 1;           ///< memory that F of a microbatch allocates
  double backward_input = 0;    ///< change of memory by I: 0 or below, since I frees memory
  double backward_weight = -1;  ///< change of memory by W
  double limit = 0;             ///< memory limit of a rank; 0: none
};

namespace detail {

/// Three choices that the rule leaves open; all eight combinations are tried.
struct zero_bubble_choice {
  bool stop_short;   ///< warm-up: run no forward that would end after the first gradient has arrived
  bool defer;        ///< steady state: a rank that is two forwards ahead of the next one may skip the forward of a round
  bool fill_partly;  ///< run a W in a wait shorter than the W, even if another rank has idled more
};

/// Builds one zero-bubble order: rank by rank and round by round, a round being one forward and one input gradient on each
/// rank. Weight gradients run where a rank would wait, where memory is full, and at the end. This class is not a policy of
/// `dispatch`, which chooses actions in the order of time: with 8 ranks and 32 microbatches 86 % of all actions begin before an
/// action that was chosen earlier.
struct zero_bubble_weaver {
  /// \param where a plan with one stage on each rank
  constexpr zero_bubble_weaver(plan_view const& where, cost_view const& c, memory_model const& m)
      : costs(c),
        memory(m),
        ranks(where.size.ranks),
        micro_batches(where.size.units()),
        graph(where),
        order(3 * ranks * micro_batches),
        made(graph.results()),
        clock(ranks),
        held(ranks),
        idle(ranks),
        done(3 * ranks),
        demand(ranks) {}

  cost_view costs;
  memory_model memory;
  int ranks;
  int micro_batches;
  step_graph graph;
  zero_bubble_choice choice{};
  buffer<action> order;              // rank r's actions begin at index 3Mr
  buffer<double> made;               // by result: the time of its computation
  buffer<double> clock, held, idle;  // by rank: the end of its last action, memory held, time waited since its first forward
  buffer<int> done;                  // by rank and family F, I, W: number of actions done
  buffer<int> demand;                // by rank: number of forwards to run next

  static constexpr kind kinds[3] = {kind::forward, gradient_kind(true), kind::backward_weight};
  enum family { forwards, inputs, weights };

  constexpr int& count(int rank, family f) { return done[rank * 3 + f]; }
  /// The cost of a rank's next action of a family.
  constexpr double cost(int rank, family f) const { return costs.of_action(make_action(kinds[f], rank, done[rank * 3 + f])); }
  constexpr double change(family f) const {
    return f == forwards ? memory.forward : f == inputs ? memory.backward_input : memory.backward_weight;
  }
  constexpr bool fits(double amount) const { return !(memory.limit > 0) || amount <= memory.limit; }
  constexpr double most_idle() const {
    double most = 0;
    for (int r = 0; r < ranks; ++r) most = idle[r] > most ? idle[r] : most;
    return most;
  }

  /// The time at which the input of a rank's next F or I arrives; 0 if the action has no input from another rank.
  constexpr double arrival(int rank, family f) {
    action const next = make_action(kinds[f], rank, count(rank, f));
    int const needed = graph.needs(next);
    return needed < 0 ? 0 : made[needed] + costs.of_delay(graph.comes_over(next), count(rank, f));
  }

  constexpr void take(int rank, family f) {
    double const there = arrival(rank, f);
    double const wait = there > clock[rank] ? there - clock[rank] : 0;
    if (count(rank, forwards) > 0) idle[rank] += wait;
    clock[rank] += wait + cost(rank, f);
    held[rank] += change(f);
    int const at = rank * 3 * micro_batches + count(rank, forwards) + count(rank, inputs) + count(rank, weights);
    action const taken = order[at] = make_action(kinds[f], rank, count(rank, f)++);
    if (int const result = graph.makes(taken); result >= 0) made[result] = clock[rank];
  }
  constexpr bool has_weight(int rank) { return count(rank, weights) < count(rank, inputs); }

  /// Runs weight gradients until memory suffices for `f`. \returns false if there are too few
  constexpr bool make_room(int rank, family f) {
    while (!fits(held[rank] + change(f))) {
      if (!has_weight(rank)) return false;
      take(rank, weights);
    }
    return true;
  }
  /// Runs weight gradients while the rank waits for the input of `f`. The last W may take longer than the wait: no rank is
  /// delayed as long as others wait for another rank, and the W is worth it if this rank would otherwise have idled most.
  constexpr void fill(int rank, family f) {
    double const until = arrival(rank, f);
    while (has_weight(rank) && clock[rank] + cost(rank, weights) <= until) take(rank, weights);
    if (!has_weight(rank) || clock[rank] >= until) return;
    if (choice.fill_partly || until - clock[rank] > most_idle() - idle[rank]) take(rank, weights);
  }

  /// Runs as many forwards as fit before the first gradient arrives, on each rank at least one more than on the next.
  constexpr void warm_up() {
    for (int r = 0; r < ranks; ++r) take(r, forwards);
    double gradient = 0;  // the time at which the next rank has computed its first gradient
    for (int r = ranks - 1; r >= 0; --r) {
      double now = clock[r];
      if (r + 1 < ranks) {
        double const back = gradient + costs.of_delay(r, 0);
        double const each = cost(r, forwards);
        double amount = held[r] + change(forwards);
        while (1 + demand[r] < micro_batches && fits(amount) && (choice.stop_short ? now + each <= back : now < back)) {
          amount += change(forwards);
          now += each;
          ++demand[r];
        }
        now = now > back ? now : back;
      }
      gradient = now + cost(r, inputs);
    }
    for (int r = 1; r < ranks; ++r) {  // equal numbers of forwards only where both ranks run all of them
      bool const all = 1 + demand[r - 1] == micro_batches;
      while (demand[r] > 0 && demand[r] >= demand[r - 1] + (all ? 1 : 0)) --demand[r];
    }
    for (int r = 0; r < ranks; ++r) {
      for (; demand[r] > 0; --demand[r]) take(r, forwards);
    }
    for (int r = ranks - 1; r >= 0; --r) take(r, inputs);
  }

  /// Whether a rank that is at least two forwards ahead of the next rank should skip its forward in this round: the forward
  /// would delay the gradient that the next rank can send soonest, and this rank's waits do not decide the length of the step.
  constexpr bool holds_back(int rank) {
    if (!choice.defer || rank + 1 >= ranks || count(rank, forwards) < count(rank + 1, forwards) + 2) return false;
    double const back =
        clock[rank + 1] + cost(rank + 1, forwards) + cost(rank + 1, inputs) + costs.of_delay(rank, count(rank + 1, inputs));
    if (clock[rank] >= back) return true;
    double amount = held[rank] + change(forwards);
    double end = clock[rank] + cost(rank, forwards);
    for (int w = count(rank, weights); w < count(rank, inputs) && !fits(amount); ++w) {
      amount += change(weights);
      end += cost(rank, weights);
    }
    return end > back && back - clock[rank] <= most_idle() - idle[rank];
  }

  /// Runs one forward and one input gradient on each rank. \returns false if memory does not suffice
  constexpr bool round() {
    bool go_on = true;  // false: neither this rank nor any rank before it runs a forward
    for (int r = ranks - 1; r >= 0; --r) {
      go_on = go_on && count(r, forwards) < micro_batches && !holds_back(r);
      demand[r] = go_on ? 1 : 0;
    }
    for (int r = 0; r < ranks; ++r) {
      if (demand[r] == 0) continue;
      if (!make_room(r, forwards)) return false;
      fill(r, forwards);
      take(r, forwards);
    }
    for (int r = ranks - 1; r >= 0; --r) {
      if (!make_room(r, inputs)) return false;
      fill(r, inputs);
      // No rank waits for actions of the first rank after its last forward.
      while (r == 0 && count(r, forwards) == micro_batches && has_weight(r)) take(r, weights);
      take(r, inputs);
    }
    return true;
  }

  /// Builds the order of one combination of choices. \returns false if memory does not suffice
  constexpr bool weave(zero_bubble_choice const& chosen) {
    choice = chosen;
    for (int i = 0; i < 3 * ranks; ++i) done[i] = 0;
    for (int r = 0; r < ranks; ++r) clock[r] = held[r] = idle[r] = demand[r] = 0;
    warm_up();
    for (int m = 1; m < micro_batches; ++m) {
      if (!round()) return false;
    }
    for (int r = 0; r < ranks; ++r) {
      while (has_weight(r)) take(r, weights);
    }
    return true;
  }
};

/// Checks a memory model for one stage a rank. \returns its first fault
constexpr finding check_memory(memory_model const& memory) {
  using chevron::detail::fault;
  double const sum = memory.forward + memory.backward_input + memory.backward_weight;
  double const rounding = memory.forward * 1e-9;
  if (sum > rounding || sum < -rounding)
    return fault(law::description,
                 "the memory of F, I and W must add up to 0, since I and W free all memory that F takes; stage ", 0);
  if (memory.limit > 0 && memory.limit < memory.forward)
    return fault(law::description, "the memory limit is below the memory of one microbatch; raise the limit of rank ", 0);
  return {};
}

}  // namespace detail

/// The best of eight orders that follow one rule: forwards as far as memory allows until the first gradient arrives, then one
/// forward and one input gradient in turn, weight gradients where a rank would wait or memory is full. With a limit of P or 2P
/// microbatches the result is the paper's ZB-1p or ZB-2p.
///
/// Stage s is on rank s. Costs may differ from stage to stage. The plan declares its own peak of chunks in flight as its limit.
/// If the memory model is not valid, or the limit is below one microbatch, the plan's `problem` says so.
constexpr plan zero_bubble(cost_view const& costs, memory_model const& memory, shape size, objective goal = objective::span) {
  if (finding const f = chevron::detail::check_shape(placement::linear, size)) return chevron::detail::refused(size, "ZB", f);
  if (finding const f = chevron::detail::whole_sequences("this rule orders whole microbatches: slices must be 1, not ", size))
    return chevron::detail::refused(size, "ZB", f);
  if (finding const f = detail::check_memory(memory)) return chevron::detail::refused(size, "ZB", f);
  size.chunks = 1;
  int const ranks = size.ranks;
  plan result;
  result.size = size;
  result.stages = ranks;
  result.name = "ZB";
  result.begin = buffer<int>(ranks + 1);
  result.rank_of = buffer<std::int16_t>(ranks);
  for (int r = 0; r <= ranks; ++r) result.begin.data[r] = r * 3 * size.units();
  for (int r = 0; r < ranks; ++r) result.rank_of.data[r] = static_cast<std::int16_t>(r);
  for (int pending = 1; pending <= 2 && memory.limit > 0; ++pending) {
    if (memory.limit == memory.forward * pending * ranks) result.name = pending == 1 ? "ZB-1p" : "ZB-2p";
  }

  detail::zero_bubble_weaver weaver(result, costs, memory);
  double best = -1;
  for (int answers = 0; answers < 8; ++answers) {
    // As in the paper's program, the first of equally good orders is kept; some of the paper's numbers depend on that.
    if (!weaver.weave({(answers & 4) == 0, (answers & 2) == 0, (answers & 1) == 0})) continue;
    plan_view seen = result.view();
    seen.actions = weaver.order.data;
    double const length = length_of(goal, seen, costs);
    if (best >= 0 && length >= best) continue;
    best = length;
    result.actions = weaver.order;
  }
  if (best < 0)
    return chevron::detail::refused(
        size, result.name,
        chevron::detail::fault(law::description,
                               "the memory limit leaves no place for the next forward though all weight gradients are done; "
                               "microbatches: ",
                               size.units()));
  result.in_flight_limit = peak_in_flight(result);
  return result;
}

}  // namespace chevron::search
