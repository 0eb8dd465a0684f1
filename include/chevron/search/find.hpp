#pragma once

#include <cstdint>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/describe/list.hpp>
#include <chevron/prove/bound.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/search/anneal.hpp>
#include <chevron/search/objective.hpp>
#include <chevron/search/zero_bubble.hpp>

/// \file
/// A schedule made for given costs and memory, on any placement.

namespace chevron::search {

/// How hard to try. The same effort gives the same schedule everywhere.
struct effort {
  int trials = 0;          ///< changes tried; 0: as many as play about 60 million actions, from 200 to 60000
  std::uint64_t seed = 1;  ///< of the random changes
};

/// What a search came to.
struct found {
  plan best;          ///< proved; or, where there is none, `best.problem` says why
  double length = 0;  ///< of the best, in the costs' unit
  double bound = 0;   ///< no schedule on this placement is shorter
  plan_name start;    ///< what the best was made from
  plan published;     ///< the shortest of the catalogue's on this placement within the limit, if `published_length` is not 0
  double published_length = 0;  ///< its length, in the costs' unit
  int trials = 0;               ///< changes tried

  /// Nothing shorter exists.
  constexpr bool optimal() const { return !best.problem && length <= bound * (1 + 1e-12); }
};

namespace detail {

/// The same order one action at a time: no fused pairs and, if wanted, each B as its I and W.
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
      to.actions.data[filled++] = make_action(both ? kind::backward_input : a.kind, stage, micro_batch);
      if (both) to.actions.data[filled++] = make_action(kind::backward_weight, stage, micro_batch);
    }
  }
  to.begin.data[from.size.ranks] = filled;
  return to;
}

/// Looks for the best to begin with: lawful orders on one placement within one limit.
class starting_point {
 public:
  constexpr starting_point(plan_view const& where, cost_view const& costs, activation_limit memory, objective goal, bool split)
      : where_(where), costs_(costs), memory_(memory), goal_(goal), split_(split) {}

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
    take_if_shorter(shortest, shortest_length, made, name);
    take_if_shorter(apart, apart_length, whole ? copy_of(made) : taken_apart(made, split_), name);
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
  constexpr void take_if_shorter(plan& best, double& best_length, plan_view const& made, char const* name) const {
    double const length = length_of(made);
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

/// Average costs, for list scheduling.
constexpr costs average(plan_view const& where, cost_view const& of) {
  costs out{0, 0, 0, 0};
  int crossings = 0;
  for (int s = 0; s < where.stages; ++s) {
    out.forward += of.of(kind::forward, s) / where.stages;
    out.backward_input += of.of(kind::backward_input, s) / where.stages;
    out.backward_weight += of.of(kind::backward_weight, s) / where.stages;
    if (s + 1 == where.stages || where.rank_of[s] == where.rank_of[s + 1]) continue;
    out.communication += of.of_message(s);
    ++crossings;
  }
  if (crossings > 0) out.communication /= crossings;
  return out;
}

/// Costs where a B is never split: as an I that takes as long and leaves nothing for its W.
struct unsplit_costs {
  buffer<double> forward, backward, nothing;

  constexpr unsplit_costs(plan_view const& where, cost_view const& of)
      : forward(where.stages), backward(where.stages), nothing(where.stages, zeroed) {
    for (int s = 0; s < where.stages; ++s) {
      forward.data[s] = of.of(kind::forward, s);
      backward.data[s] = of.of(kind::backward, s);
    }
  }
  constexpr cost_view view(cost_view const& of) const {
    cost_view out = of;
    out.forward = forward.data;
    out.backward_input = backward.data;
    out.backward_weight = nothing.data;
    out.stride = 1;
    out.first_input_gradient = true;  // what a B costs without it is counted already
    return out;
  }
};

/// List schedules with every order of preference and with limits up to the one that is given.
constexpr void add_list_schedules(starting_point& to, plan_view const& placed, cost_view const& costs, activation_limit memory,
                                  bool split) {
  using namespace letters;
  auto const where = placement::mapped([stages = placed.stages](shape) { return stages; },
                                       [rank_of = placed.rank_of](int stage, shape) -> int { return rank_of[stage]; });
  auto const base =
      schedule_of(split ? work_graph::split_backward : work_graph::full_backward).place(where).assuming(average(placed, costs));
  int const all = placed.size.micro_batches * placed.size.chunks;
  double const room = memory.most > 0 ? memory.most / memory.kept_for_weight : all;
  int const most = room < all ? static_cast<int>(room) : all;
  int const least = least_in_flight(placed);
  for (int limit = least; limit <= most;) {
    auto const consider = [&](auto... preferred) {
      to.consider(expand(base.prefer(preferred...).at_most_in_flight(limit), placed.size), "list scheduling");
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
    int const next = limit + 1 > limit * 5 / 4 ? limit + 1 : limit * 5 / 4;
    limit = limit < most && next > most ? most : next;
  }
}

/// The search itself, for a plan without actions that says where the stages are.
constexpr found find(plan const& placed, cost_view const& costs, activation_limit memory, objective goal, effort how_hard,
                     work_graph work) {
  bool const split = work == work_graph::split_backward;
  char const* const name = "searched";
  found result;
  auto const refuse = [&](finding const& f) { result.best = chevron::detail::refused(placed.size, name, f); };
  finding f;
  f.broken = law::description;
  if (int const least = least_in_flight(placed); memory.most > 0 && memory.most < least) {
    f.words = "a microbatch on its way holds a chunk with each stage of a rank: the memory limit must be at least ";
    f.number = least;
    refuse(f);
    return result;
  }
  if (!(memory.kept_for_weight > 0) || memory.kept_for_weight > 1) {
    f.words = "what a chunk keeps for its W must be a share above 0 and at most 1; stages: ";
    f.number = placed.stages;
    refuse(f);
    return result;
  }

  starting_point start(placed, costs, memory, goal, split);
  // Of equals the last one stays: best a schedule that has a name.
  add_list_schedules(start, placed, costs, memory, split);
  bool in_line = split && placed.stages == placed.size.ranks;
  for (int s = 0; s < placed.stages; ++s) in_line = in_line && placed.rank_of.data[s] == s;
  if (in_line) {
    memory_model const model{1, memory.kept_for_weight - 1, -memory.kept_for_weight, memory.most};
    start.consider(zero_bubble(costs, model, placed.size, goal), "zero-bubble rule");
  }
  catalogue::for_each([&](auto const& one) {
    plan made = expand(one, placed.size);
    if (!start.consider(made, one.name)) return;
    double const length = start.length_of(made);
    if (result.published_length > 0 && start.better(result.published, result.published_length, made, length)) return;
    result.published_length = length;
    result.published = static_cast<plan&&>(made);
  });
  if (!start.exists()) {
    f.words = "no order was found that keeps the memory limit; microbatches: ";
    f.number = placed.size.micro_batches;
    refuse(f);
    return result;
  }

  unsplit_costs const whole(placed, costs);
  lower_bounds const least = bounds(placed, split ? costs : whole.view(costs), memory);
  result.bound = goal == objective::makespan ? least.makespan : least.span;
  result.best = static_cast<plan&&>(start.shortest);
  result.length = start.shortest_length;
  result.start = result.best.name;
  if (!result.optimal()) {
    int const by_size = 60'000'000 / start.apart.view().total();
    int const trials = how_hard.trials > 0 ? how_hard.trials : by_size < 200 ? 200 : by_size > 60'000 ? 60'000 : by_size;
    annealing improve(start.apart, costs, memory, goal, how_hard.seed);
    result.trials = improve.run(trials, result.bound);
    if (improve.best_length() < result.length) {
      result.start = start.apart.name;
      result.length = improve.best_length();
      result.best = static_cast<plan&&>(start.apart);
      for (int i = 0; i < result.best.actions.count; ++i) result.best.actions.data[i] = improve.best_order()[i];
    }
  }
  result.best.name = name;
  bool const counted = memory.most > 0 && memory.kept_for_weight == 1;
  result.best.in_flight_limit = counted ? static_cast<int>(memory.most) : peak_in_flight(result.best);
  return result;
}

}  // namespace detail

/// Looks for the shortest schedule of this shape on this placement: from the catalogue's schedules, the zero-bubble paper's
/// orders (with one stage a rank) and list schedules, the best is improved by local search, trial by trial. So the result is
/// never longer than the best of the catalogue that lives on this placement and keeps the limit.
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
  plan placed;
  finding f = chevron::detail::begin_plan(where, size, placed);
  placed.begin = buffer<int>(size.ranks + 1, zeroed);
  if (!f) f = chevron::detail::check_placement(placed);
  if (!f) return detail::find(placed, costs, memory, goal, how_hard, work);
  found nothing;
  nothing.best = chevron::detail::refused(size, "searched", f);
  return nothing;
}

}  // namespace chevron::search
