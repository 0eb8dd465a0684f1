#pragma once

#include <cstdint>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/describe/list.hpp>
#include <chevron/plan/factors.hpp>
#include <chevron/plan/gradient_order.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/prove/bound.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/search/held.hpp>
#include <chevron/search/problem/objective.hpp>
#include <chevron/search/problem/problem.hpp>
#include <chevron/search/zero_bubble.hpp>

/// \file
/// The start of a search: the shortest of the orders that are known without one.

namespace chevron::search::detail {

/// A plan's order one action at a time: no fused pairs and, if wanted, each B as its I and W.
constexpr plan taken_apart(plan_view const& from, bool split) {
  plan to = copy_of(from);
  int total = from.total();
  for (int i = 0; i < from.total(); ++i) total += split && from.actions[i].kind == kind::backward ? 1 : 0;
  to.actions = buffer<action>(total);
  int filled = 0;
  for (int r = 0; r < from.size.ranks; ++r) {
    to.begin.data[r] = filled;
    for (int i = from.begin[r]; i < from.begin[r + 1]; ++i) {
      action const a = from.actions[i];
      bool const both = split && a.kind == kind::backward;
      int const stage = static_cast<int>(a.stage);
      int const micro_batch = static_cast<int>(a.micro_batch);
      to.actions.data[filled++] = make_action(both ? gradient_kind(true) : a.kind, stage, micro_batch);
      if (both) to.actions.data[filled++] = make_action(kind::backward_weight, stage, micro_batch);
    }
  }
  to.begin.data[from.size.ranks] = filled;
  return to;
}

/// Whether stage s is on rank s, for all of them.
constexpr bool in_line(plan_view const& placed) {
  bool out = placed.stages == placed.size.ranks;
  for (int s = 0; s < placed.stages; ++s) out = out && placed.rank_of[s] == s;
  return out;
}

/// Gives a plan that was found the name and the limit that it goes by.
constexpr void finish(plan& made, activation_limit memory) {
  bool const counted = memory.most > 0 && memory.kept_for_weight == 1;
  made.name = "searched";
  made.in_flight_limit = counted ? memory.chunks() : peak_in_flight(made);
}

/// A plan to begin with. Puts microbatches of equal length in ascending order; of unequal length, another order would change
/// how long the plan is, and local search keeps the plan's order. Slices have an order already.
constexpr plan to_begin_with(plan made, cost_view const& costs) {
  if (costs.lengths.alike() || made.size.slices > 1 || made.problem || check(made)) return made;
  return in_ascending_order(made);
}

/// Looks for the best to begin with: lawful orders on one placement within one limit.
class starting_point {
 public:
  /// \param asked outlives it
  constexpr explicit starting_point(problem const& asked)
      : where_(asked.where), costs_(asked.costs), memory_(asked.memory), goal_(asked.goal), split_(asked.split()) {}

  /// Looks at one plan; true if it is lawful, on this placement and within the limit.
  constexpr bool consider(plan const& made, char const* name) {
    if (made.problem || made.forward_only || made.stages != where_.stages) return false;
    for (int s = 0; s < made.stages; ++s) {
      if (made.rank_of.data[s] != where_.rank_of[s]) return false;
    }
    bool whole = true;  // nothing that is taken apart for local search
    for (int i = 0; i < made.view().total(); ++i) {
      action const a = made.actions.data[i];
      if (!split_ && a.kind == kind::backward_weight) return false;
      whole = whole && a.fused == 0 && (!split_ || a.kind != kind::backward);
    }
    if (!keeps(memory_, made) || check(made)) return false;
    double const length = length_of(made);
    take_if_shorter(shortest, shortest_length, made, length, name);
    // Not one call with `whole ? … : …`: GCC 12's constant evaluator frees a new object of ?: twice.
    if (whole) {
      take_if_shorter(apart, apart_length, made, length, name);
    } else {
      plan const parts = taken_apart(made, split_);
      take_if_shorter(apart, apart_length, parts, length_of(parts), name);
    }
    return true;
  }
  constexpr double length_of(plan_view const& made) const { return search::length_of(goal_, made, costs_); }
  /// Whether a plan is shorter than another, or as short with fewer chunks in flight.
  static constexpr bool better(plan_view const& made, double length, plan_view const& best, double best_length) {
    if (length < best_length * (1 - 1e-12)) return true;
    return length <= best_length * (1 + 1e-12) && peak_in_flight(made) < peak_in_flight(best);
  }
  constexpr bool exists() const { return shortest_length >= 0; }

  plan shortest;  ///< as it came
  double shortest_length = -1;
  plan apart;  ///< without fused pairs and, where backwards are split, without B
  double apart_length = -1;

 private:
  static constexpr void take_if_shorter(plan& best, double& best_length, plan_view const& made, double length, char const* name) {
    if (best_length >= 0 && better(best, best_length, made, length)) return;
    best = copy_of(made);
    best.name = name;
    best_length = length;
  }

  plan_view where_;
  cost_view costs_;
  activation_limit memory_;
  objective goal_;
  bool split_;
};

/// Calls `visit(description)` for the schedules of the catalogue that a search begins with: with slices also those made for
/// them.
template <class Visit>
constexpr void for_each_start(shape size, Visit const& visit) {
  catalogue::for_each(visit);
  if (size.slices > 1) hana::for_each(catalogue::sliced, [&](auto const* one) { visit(*one); });
}

/// Average costs, for list scheduling, of the mean microbatch.
constexpr costs average(plan_view const& where, cost_view const& of) {
  costs out{0, 0, 0, 0};
  int crossings = 0;
  for (int s = 0; s < where.stages; ++s) {
    out.forward += of.of(kind::forward, s) / where.stages;
    out.backward_input += of.of_input(s) / where.stages;
    out.backward_weight += of.of(kind::backward_weight, s) / where.stages;
    if (s + 1 == where.stages || where.rank_of[s] == where.rank_of[s + 1]) continue;
    out.communication += of.of_delay(s);
    ++crossings;
  }
  if (crossings > 0) out.communication /= crossings;
  if (of.lengths.alike()) return out;
  chevron::detail::mean_factors const mean(of.lengths, where.size.units());
  for (double* one : {&out.forward, &out.backward_input, &out.backward_weight}) *one *= mean.computation;
  out.communication *= mean.transfer;
  return out;
}

/// List schedules with every order of preference that keep so many chunks in flight, counted until W: as many as the limit
/// takes in the worst case and, where I lets go of some of it, more.
constexpr void add_list_schedules(starting_point& to, problem const& asked) {
  using namespace letters;
  plan_view const placed = asked.where;
  activation_limit const memory = asked.memory;
  bool const split = asked.split();
  auto const where = placement::mapped([stages = placed.stages](shape) { return stages; },
                                       [rank_of = placed.rank_of](int stage, shape) -> int { return rank_of[stage]; });
  auto const base = schedule_of(asked.work).place(where).assuming(average(placed, asked.costs));
  int const all = placed.size.units() * placed.size.chunks;
  bool const limited = memory.most > 0 && memory.most < all;
  int const most = limited && memory.waiting_chunks() < all ? memory.waiting_chunks() : all;
  int const least = limited ? memory.chunks() : all;
  int const middle = least + (most - least) / 2;
  for (int limit = least; limit <= most; limit = limit < middle ? middle : limit < most ? most : most + 1) {
    auto const consider = [&](auto... preferred) {
      to.consider(to_begin_with(expand(base.prefer(preferred...).at_most_in_flight(limit), placed.size), asked.costs),
                  "list scheduling");
    };
    if (split) {
      consider(I, F, W);
      consider(F, I, W);
      consider(I, W, F);
      consider(F, W, I);
      consider(W, I, F);
      consider(W, F, I);
    } else {
      consider(B, F);
      consider(F, B);
    }
  }
}

/// Calls `visit(plan)` for the catalogue's schedules with the slack that slow links need, as far as memory allows it, with one
/// stage a rank.
template <class Visit>
constexpr void for_each_with_slack(problem const& asked, Visit const& visit) {
  shape const size = asked.where.size;
  cost_view const& costs = asked.costs;
  activation_limit const& memory = asked.memory;
  int const room = memory.most > 0 ? memory.chunks() - size.ranks : size.units();
  chevron::detail::mean_factors const factors(costs.lengths, size.units());
  int const counted = costs.lengths.alike() ? 0 : size.ranks;
  owned_costs const mean = scaled(costs, counted, factors.computation, factors.transfer);
  buffer<catalogue::slack> const needed =
      catalogue::slack_for(costs.lengths.alike() ? costs : mean.view(), size.ranks, asked.split(), room);
  if (needed.count == 0) return;
  catalogue::for_each_with_slack(catalogue::slack_view{needed.begin(), needed.end()}, [&](char const* of, auto const& one) {
    plan made = expand(one, size);
    made.name = catalogue::name_with_slack(of, needed.begin(), needed.end());
    visit(made);
  });
}

/// The zero-bubble paper's orders, with one stage a rank.
constexpr void add_zero_bubble(starting_point& to, problem const& asked) {
  memory_model const model{1, asked.memory.kept_for_weight - 1, -asked.memory.kept_for_weight, asked.memory.most};
  to.consider(zero_bubble(asked.costs, model, asked.where.size, asked.goal), "zero-bubble rule");
}

}  // namespace chevron::search::detail
