#pragma once

#include <cstdint>
#include <type_traits>

#include <chevron/describe/misuse.hpp>
#include <chevron/describe/schedule.hpp>
#include <chevron/describe/score.hpp>
#include <chevron/describe/sized.hpp>
#include <chevron/describe/unroll.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Expands a description to a plan at a shape: plays the phases for each rank.

namespace chevron {

/// An upper bound of the number of actions of a description's plan at this shape.
template <class Placement, class Order, class Phases, class Limit, class AtLeast>
constexpr int actions_at_most(description<Placement, Order, Phases, Limit, AtLeast> const& what, shape size) {
  return detail::kinds_in<Phases> * stages_in(what.where, size) * size.units();
}

namespace detail {

/// Replaces each microbatch of an order by its slices, in ascending order or, if `from_last`, in descending order.
constexpr void into_slices(drawn* order, int count, int slices, bool from_last) {
  for (int i = count - 1; i >= 0; --i) {
    drawn const one = order[i];
    for (int s = 0; s < slices; ++s)
      order[i * slices + s] = {one.chunk, one.micro_batch * slices + (from_last ? slices - 1 - s : s)};
  }
}

/// Expands a description into arrays, which must be long enough. The caller has filled in `size.chunks` and `rank_of`.
template <class Description, class Actions, class Begin, class RankOf>
constexpr finding expand_into(Description const& what, shape size, Actions& actions, Begin& begin, RankOf const& rank_of,
                              own_kind* own) {
  int const ranks = size.ranks;
  int const stages = stages_of(what, size);
  int const slices = size.slices;
  stages_by_rank const placed(ranks, stages, rank_of);
  int const most_held = placed.most;

  bool by_zero = false;
  rank_parameters const anywhere{0, ranks, size.micro_batches, size.chunks, slices, &by_zero};
  if constexpr (requires { what.order.problem(anywhere); }) {
    finding const f = what.order.problem(anywhere);
    if (f && !by_zero) return f;
  }
  int const wanted = what.at_least(anywhere);
  if (by_zero) return division_by_zero(0);
  int const played_batches = wanted > size.micro_batches ? wanted : size.micro_batches;
  int const played = played_batches * slices;
  int const most_cells = most_held * played;
  using phases_type = std::remove_cvref_t<decltype(what.how)>;
  constexpr int drawn_from = families_in<phases_type>;
  if constexpr (holds_own_kinds<phases_type>) note_own_kinds_of(what.how, own);
  buffer<int> length_of(drawn_from * (most_held + 1)), next_of(drawn_from * (most_held + 1));
  buffer<drawn> forward_order(most_cells), backward_order(most_cells), queue(most_cells);
  buffer<std::uint8_t> whole(most_cells);
  int ordered_for = -1;
  bool in_sequence[2] = {false, false};

  begin[0] = 0;
  int filled = 0;
  for (int r = 0; r < ranks; ++r) {
    int const held_here = placed.held(r);
    rank_parameters const here{r, ranks, played_batches, held_here, slices, &by_zero};
    int const cells = held_here * played;
    if (held_here != ordered_for) {
      what.order.fill(here, forward_order.data, backward_order.data);
      if (slices > 1) {
        into_slices(forward_order.data, cells / slices, slices, false);
        into_slices(backward_order.data, cells / slices, slices, true);
      }
      ordered_for = held_here;
      in_sequence[0] = in_sequence[1] = held_here == 1;
      for (int m = 0; held_here == 1 && m < played; ++m) {
        in_sequence[0] = in_sequence[0] && forward_order.data[m].micro_batch == m;
        in_sequence[1] = in_sequence[1] && backward_order.data[m].micro_batch == m;
      }
    }
    for (int stream = 0; stream < drawn_from * (held_here + 1); ++stream) {
      length_of.data[stream] = stream % (held_here + 1) == held_here ? cells : played;
      next_of.data[stream] = 0;
    }
    auto score = score_of(what.how, here);
    if (by_zero) return division_by_zero(r);
    int const* const stages_here = placed.stage.data + placed.first.data[r];
    if (finding const f = ready(score, r, held_here, played, stages_here, in_sequence, own)) return f;
    streams const from{size.units(),        played,     held_here,  slices,     length_of.data, next_of.data, forward_order.data,
                       backward_order.data, queue.data, whole.data, stages_here};
    filled = slices > 1 ? unroll<true>(score, from, actions, filled) : unroll<false>(score, from, actions, filled);
    begin[r + 1] = filled;
  }
  return {};
}

}  // namespace detail

/// Makes the plan of a description at this size.
/// \returns a plan; if the description cannot be expanded, an empty plan whose `problem`, which `check` reports, says why
template <class Placement, class Order, class Phases, class Limit, class AtLeast>
constexpr plan expand(description<Placement, Order, Phases, Limit, AtLeast> const& what, shape size) {
  plan result;
  if (finding const f = detail::begin_plan_of(what, size, result)) return detail::refused(size, what.name, f);
  result.forward_only = what.forward_only;
  result.begin = buffer<int>(size.ranks + 1);
  result.actions = buffer<action>(actions_at_most(what, size));
  action* const actions = result.actions.data;
  int* const begin = result.begin.data;
  if (finding const f = detail::expand_into(what, size, actions, begin, result.rank_of.data, result.own))
    return detail::refused(size, what.name, f);
  result.actions.count = begin[size.ranks];
  return result;
}

/// Expands a description into a plan of fixed size, without a copy, for `checked`.
template <class Placement, class Order, class Phases, class Limit, class AtLeast, int Ranks, int Stages, int Actions>
constexpr void expand(description<Placement, Order, Phases, Limit, AtLeast> const& what, shape size,
                      static_plan<Ranks, Stages, Actions>& result) {
  finding why = detail::begin_plan_of(what, size, result);
  if (!why) why = detail::expand_into(what, size, result.actions, result.begin, result.rank_of, result.own);
  if (why) {
    result = {};
    result.problem = why;
    return;
  }
  result.forward_only = what.forward_only;
  for (int i = result.begin[Ranks]; i < Actions; ++i) result.actions[i] = action{};
}

}  // namespace chevron
