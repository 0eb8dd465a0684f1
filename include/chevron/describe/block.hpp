#pragma once

#include <type_traits>

#include <boost/hana/basic_tuple.hpp>
#include <boost/hana/for_each.hpp>

#include <chevron/describe/limits.hpp>
#include <chevron/describe/sized.hpp>
#include <chevron/describe/squeeze.hpp>
#include <chevron/describe/token.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Building blocks: a schedule given by the time slots of one microbatch's actions on each rank. Expansion repeats the block
/// for every microbatch and squeezes out idle slots between blocks (Qi et al., "Pipeline Parallelism with Controllable Memory",
/// arXiv 2405.15362).

namespace chevron {

/// The interval of a block: the number of slots from the start of a microbatch's block to the start of the next microbatch's.
/// Returned by `every`.
template <class Interval>
struct repeat_interval {
  Interval slots;
};
/// The interval of a building block: the next microbatch's block starts `slots` slots later.
template <expression::operand Interval>
constexpr repeat_interval<expression::node_of<Interval>> every(Interval slots) {
  return {expression::as_node(slots)};
}

/// The kind of an item of a block and, in `is_placed`, whether the item has a slot. For other types the kind is one that only
/// programs contain.
template <class Item>
inline constexpr kind kind_of_item = kind::optimizer_step;
template <kind What>
inline constexpr kind kind_of_item<token<What>> = What;
template <kind What, class Slot>
inline constexpr kind kind_of_item<placed<What, Slot>> = What;
template <class Item>
inline constexpr bool is_placed = false;
template <kind What, class Slot>
inline constexpr bool is_placed<placed<What, Slot>> = true;

/// A block, its placement and its interval. Returned by `building_block`.
template <class Placement, class Interval, class Items, class Limits = declared_limits<>>
struct repeated_block : declares_limits<repeated_block<Placement, Interval, Items, Limits>> {
  Placement where;
  Interval interval;
  Items items;
  Limits limits;
  char const* name;

  /// The same block under the name `as`.
  constexpr repeated_block named(char const* as) const { return {{}, where, interval, items, limits, as}; }
  /// The same block with the limits `to`.
  template <class NewLimits>
  constexpr repeated_block<Placement, Interval, Items, NewLimits> limited(NewLimits const& to) const {
    return {{}, where, interval, items, to, name};
  }
};

/// Describes a schedule by one microbatch's pattern, in slots: F, I and W take one slot, B takes two.
///
/// ```cpp
/// using namespace chevron::letters;
/// inline constexpr auto v_min = chevron::building_block(chevron::placement::vee, chevron::every(6),
///     F(0).at(rank), F(1).at(2 * ranks - 1 - rank), I(1).at(2 * ranks + rank), I(0).at(4 * ranks - 1 - rank), W(1), W(0));
/// ```
/// (The paper's V-Min, for any number of ranks that 3 does not divide.)
///
/// Rules. Every stage has F, and B or I and W, each in a slot after the end of its inputs. A W without a slot runs where its
/// rank would idle; of several such W's, the one named first runs first. Tokens may omit the chunk if every rank has a single
/// stage. The blocks of two microbatches must not use the same slot of a rank. (Slots determine only the order: a plan has no
/// times.)
///
/// Expansion (`detail::squeeze`) then runs every action as early as possible. In the steady state each rank runs the block's
/// order. While the pipeline fills and drains, a rank may deviate from this order, but never has more chunks in flight than the
/// block needs in the steady state or, if larger, than `at_most_in_flight` allows.
///
/// \returns a description, for `checked` and `expand`
template <placement_policy Placement, class Interval, class... Items>
constexpr auto building_block(Placement where, repeat_interval<Interval> interval, Items... items) {
  constexpr bool items_are_right = (true && ... && is_compute(kind_of_item<Items>));
  constexpr bool slots_are_there =
      (true && ... && (is_placed<Items> || !is_compute(kind_of_item<Items>) || kind_of_item<Items> == kind::backward_weight));
  static_assert(items_are_right,
                "a building block consists of tokens in their slots, F(0).at(2 * rank), and of W's to run in idle slots, W(0)");
  static_assert(slots_are_there, "only a W can do without a slot: write F(0).at(slot), and so for B and I");
  if constexpr (items_are_right && slots_are_there) {
    return repeated_block<Placement, Interval, hana::basic_tuple<Items...>>{
        {}, where, interval.slots, hana::basic_tuple<Items...>{items...}, {}, ""};
  } else {
    return repeated_block<Placement, Interval, hana::basic_tuple<>>{{}, where, interval.slots, {}, {}, ""};
  }
}
/// Refuses parts in another order: does not compile, and the error says how a building block begins.
/// \returns nothing, since it never compiles
template <class... Parts>
constexpr auto building_block(Parts const&...) {
  static_assert(
      (false && ... && placement_policy<Parts>),
      "a building block begins with its placement and its interval, as in building_block(placement::vee, every(6), F(0).at(0))");
  return repeated_block<placement::linear_t, expression::number, hana::basic_tuple<>>{
      {}, placement::linear, expression::number(1), {}, {}, ""};
}

namespace detail {

/// The order of a block's items for the squeeze: forwards, then other items with a slot, then items without.
template <class Items>
struct item_order;
template <class... Items>
struct item_order<hana::basic_tuple<Items...>> {
  static constexpr int count = sizeof...(Items);
  static constexpr int forwards = (0 + ... + (kind_of_item<Items> == kind::forward ? 1 : 0));
  static constexpr int placed = (0 + ... + (is_placed<Items> ? 1 : 0));
  static constexpr bool splits = (false || ... || (kind_of_item<Items> == kind::backward_weight));

  int position[array_size(count)]{};
  constexpr item_order() {
    [[maybe_unused]] int next[3] = {0, forwards, placed};
    int k = 0;
    ((position[k++] = next[kind_of_item<Items> == kind::forward ? 0 : is_placed<Items> ? 1 : 2]++), ...);
  }
};

template <kind What, class Slot>
constexpr block_action worked_out(placed<What, Slot> const& item, rank_parameters const& s) {
  return {What, item.what.chunk, item.slot(s), false, -1};
}
template <kind What>
constexpr block_action worked_out(token<What> const& item, rank_parameters const&) {
  return {What, item.chunk, 0, true, -1};
}

}  // namespace detail

/// The number of actions of a block at this size.
template <class Placement, class Interval, class Items, class Limits>
constexpr int actions_at_most(repeated_block<Placement, Interval, Items, Limits> const& what, shape size) {
  return (detail::item_order<Items>::splits ? 3 : 2) * stages_in(what.where, size) * size.micro_batches;
}

namespace detail {

/// Expands a block into arrays, which must be long enough. The caller has filled in `size.chunks` and `rank_of`.
template <class Block, class Actions, class Begin, class RankOf>
constexpr finding expand_into(Block const& what, shape size, int declared, Actions& actions, Begin& begin,
                              RankOf const& rank_of) {
  using order = item_order<std::remove_cvref_t<decltype(what.items)>>;
  constexpr order ordered{};
  constexpr int items = order::count;
  if (finding const sliced = whole_sequences("a building block repeats whole microbatches: slices must be 1, not ", size))
    return sliced;
  int const ranks = size.ranks;
  int const stages = stages_of(what, size);

  buffer<block_action> at(ranks * items);
  stages_by_rank const placed_here(ranks, stages, rank_of);
  int const most_held = placed_here.most;
  bool by_zero = false;
  for (int r = 0; r < ranks; ++r) {
    rank_parameters const here{r, ranks, size.micro_batches, placed_here.held(r), 1, &by_zero};
    int const* to = ordered.position;
    hana::for_each(what.items, [&](auto const& item) { at.data[r * items + *to++] = worked_out(item, here); });
    if (by_zero) return division_by_zero(r);
    for (int k = r * items; k < (r + 1) * items; ++k) {
      block_action& a = at.data[k];
      if (a.chunk == any_chunk && most_held > 1)
        return fault(law::description,
                     "a token of a block names its chunk, as in F(0), where a rank has several; here a rank has ", most_held);
      if (a.chunk >= most_held || (a.chunk < 0 && a.chunk != any_chunk))
        return fault(law::description, "a token names a chunk no rank has, chunk ", a.chunk);
      if (a.chunk < 0) a.chunk = 0;
    }
  }
  for (int r = 0; r < ranks; ++r) {
    for (int k = r * items; k < (r + 1) * items; ++k) {
      if (at.data[k].chunk < placed_here.held(r))
        at.data[k].stage = placed_here.stage.data[placed_here.first.data[r] + at.data[k].chunk];
    }
  }
  // By item: whether it is the I before a W without a slot; and, for such a W, the item of its I (otherwise -1).
  bool leaves_weight[array_size(items)]{};
  int gradient_of[array_size(items)]{};
  for (int w = 0; w < items; ++w) {
    gradient_of[w] = -1;
    for (int k = 0; k < items && at.data[w].when_idle; ++k) {
      if (!chevron::leaves_weight(at.data[k].what) || at.data[k].chunk != at.data[w].chunk) continue;
      leaves_weight[k] = true;
      gradient_of[w] = k;
    }
  }

  rank_parameters const anywhere{0, ranks, size.micro_batches, size.chunks, 1, &by_zero};
  block_layout const block{ranks, stages,  size.micro_batches, what.interval(anywhere), order::forwards, order::placed,
                           items, at.data, &rank_of[0]};
  if (by_zero) return division_by_zero(0);
  if (finding const missing = check_block(block)) return missing;
  buffer<int> table(ranks * (block.interval > 0 && block.interval <= longest_interval ? block.interval : 1));
  if (finding const meeting = fill_slots(block, table.data)) return meeting;
  begin[0] = 0;
  for (int r = 0; r < ranks; ++r) {
    begin[r + 1] = begin[r];
    for (int k = r * items; k < (r + 1) * items; ++k) begin[r + 1] += at.data[k].stage >= 0 ? size.micro_batches : 0;
  }
  int const needed = steady_peak(block, table.data, leaves_weight);
  squeeze(block, table.data, leaves_weight, gradient_of, declared > needed ? declared : needed).play(actions, begin);
  return {};
}

}  // namespace detail

/// Makes the plan of a block at this size.
/// \returns a plan; if the block cannot be expanded, an empty plan whose `problem`, which `check` reports, says why
template <class Placement, class Interval, class Items, class Limits>
constexpr plan expand(repeated_block<Placement, Interval, Items, Limits> const& what, shape size) {
  plan result;
  if (finding const f = detail::begin_plan_of(what, size, result)) return detail::refused(size, what.name, f);
  result.begin = buffer<int>(size.ranks + 1);
  result.actions = buffer<action>(actions_at_most(what, size));
  int* const begin = result.begin.data;
  action* const actions = result.actions.data;
  if (finding const f = detail::expand_into(what, size, result.in_flight_limit, actions, begin, result.rank_of.data))
    return detail::refused(size, what.name, f);
  result.actions.count = begin[size.ranks];
  return result;
}

}  // namespace chevron
