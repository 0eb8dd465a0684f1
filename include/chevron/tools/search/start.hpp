#pragma once

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/describe/list.hpp>
#include <chevron/plan/factors.hpp>
#include <chevron/plan/gradient_order.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/tools/search/held.hpp>
#include <chevron/tools/search/problem/objective.hpp>
#include <chevron/tools/search/problem/problem.hpp>
#include <chevron/tools/search/zero_bubble.hpp>

/// \file
/// The start of a search: the shortest plan among the catalogue's schedules, list schedules and the zero-bubble paper's orders.

namespace chevron::search::detail {

/// The plan without fused pairs and, if `split`, with each B replaced by its I and W.
constexpr plan taken_apart(plan_view const& from, bool split) {
  return chevron::detail::with_lists(from, 2 * from.total(), [&](int rank, auto const& put) {
    for (int i = from.begin[rank]; i < from.begin[rank + 1]; ++i) {
      action const a = from.actions[i];
      bool const both = split && a.kind == kind::backward;
      int const stage = static_cast<int>(a.stage);
      int const micro_batch = static_cast<int>(a.micro_batch);
      put(make_action(both ? gradient_kind(true) : a.kind, stage, micro_batch));
      if (both) put(make_action(kind::backward_weight, stage, micro_batch));
    }
  });
}

/// Whether there is one stage on each rank, stage s on rank s.
constexpr bool in_line(plan_view const& placed) {
  bool out = placed.stages == placed.size.ranks;
  for (int s = 0; s < placed.stages; ++s) out = out && placed.rank_of[s] == s;
  return out;
}

/// Sets the name ("searched") and the `in_flight_limit` of a plan that a search found.
constexpr void finish(plan& made, activation_limit memory) {
  bool const counted = memory.most > 0 && memory.kept_for_weight == 1;
  made.name = "searched";
  made.in_flight_limit = counted ? memory.chunks() : peak_in_flight(made);
}

/// Prepares a plan as a starting point. Where microbatches have unequal lengths, sorts those of each stage and kind in
/// ascending order: local search does not change their order. Plans with equal lengths, with slices or with a fault are
/// returned unchanged.
constexpr plan to_begin_with(plan made, cost_view const& costs) {
  if (costs.lengths.alike() || made.size.slices > 1 || made.problem || check(made)) return made;
  return in_ascending_order(made);
}

/// Stores the shortest of the plans passed to `consider` that are lawful, on the problem's placement and within its memory
/// limit.
class starting_point {
 public:
  /// \param asked must outlive this object
  constexpr explicit starting_point(problem const& asked)
      : where_(asked.where), costs_(asked.costs), memory_(asked.memory), goal_(asked.goal), split_(asked.split()) {}

  /// Compares a plan with the shortest so far. \returns whether the plan is lawful, on the problem's placement and within its
  /// memory limit
  constexpr bool consider(plan const& made, char const* name) {
    if (made.problem || made.forward_only || made.stages != where_.stages) return false;
    for (int s = 0; s < made.stages; ++s) {
      if (made.rank_of.data[s] != where_.rank_of[s]) return false;
    }
    bool whole = true;  // local search can start from the plan unchanged: no fused pair, no B that must be split
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

  plan shortest;  ///< the shortest plan, with its fused pairs and B
  double shortest_length = -1;
  plan apart;  ///< the shortest plan for local search: no fused pairs and, where backwards are split, no B
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

/// Calls `visit(description)` for each schedule of the catalogue; with slices also for the schedules made for slices.
template <class Visit>
constexpr void for_each_start(shape size, Visit const& visit) {
  catalogue::for_each(visit);
  if (size.slices > 1) hana::for_each(catalogue::sliced, [&](auto const* one) { visit(*one); });
}

/// Average costs over all stages and microbatches, for list scheduling.
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

/// Passes list schedules to `to`, with every order of preference of F, B, I and W, for several limits of chunks in flight, a
/// chunk counted until its W: from the number that fits the memory limit in any case to the number that fits where I frees a
/// part of a chunk.
/// \param to has `consider` as `starting_point` has
template <class Starts>
constexpr void add_list_schedules(Starts& to, problem const& asked) {
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

/// Calls `visit(plan)` for variants of the catalogue's schedules that run some forwards earlier to hide slow messages, as far as
/// memory allows. One stage a rank.
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

/// Passes the zero-bubble paper's order (`zero_bubble`), for one stage a rank, to `to`.
constexpr void add_zero_bubble(starting_point& to, problem const& asked) {
  memory_model const model{1, asked.memory.kept_for_weight - 1, -asked.memory.kept_for_weight, asked.memory.most};
  to.consider(zero_bubble(asked.costs, model, asked.where.size, asked.goal), "zero-bubble rule");
}

}  // namespace chevron::search::detail
