#pragma once

#include <type_traits>

#include <chevron/describe/schedule.hpp>

/// \file
/// Refuses common mistakes in descriptions, each with an error that names the remedy. Overload resolution selects these
/// functions only if no other candidate fits; without them a compiler would list every candidate and why it does not fit.

namespace chevron {

namespace misuse {

/// False. Depends on template parameters, so that a static_assert fails only in an instantiated template.
template <class... Parts>
inline constexpr bool right = false;

template <class Item>
inline constexpr bool is_phase = false;
template <phase_kind Role, class... Items>
inline constexpr bool is_phase<phase<Role, Items...>> = true;
template <phase_kind Last, class... Phases>
inline constexpr bool is_phase<phases<Last, Phases...>> = true;

template <class Item>
inline constexpr bool is_repeated = false;
template <class Count, class... Tokens>
inline constexpr bool is_repeated<repeated<Count, Tokens...>> = true;

template <class Item>
concept a_phase = is_phase<std::remove_cvref_t<Item>>;
template <class Item>
concept a_repeated_item = is_repeated<std::remove_cvref_t<Item>>;

// Types of the expected kind for refused phases, so that one mistake causes only one error.
using some_phase = phase<phase_kind::steady, token<kind::forward>>;
using some_phases = phases<phase_kind::steady, some_phase>;

}  // namespace misuse

// ---- counts

template <phase_item Item, class Count>
requires(!expression::operand<Count> && !misuse::a_repeated_item<Item>) constexpr Item operator*(Item item, Count const&) {
  if constexpr (phase_item<Count>)
    static_assert(misuse::right<Item, Count>,
                  "only a count follows *, as in F * 2; put tokens one after another with +, as in F + B");
  else
    static_assert(misuse::right<Item, Count>,
                  "a count is an int, or a rank expression made of rank, ranks, micro_batches, chunks and ints: F * 2, "
                  "F * (ranks - 1 - rank), F * max_of(0, rank - 1)");
  return item;
}
template <misuse::a_repeated_item Item, class Count>
constexpr Item operator*(Item item, Count const&) {
  static_assert(misuse::right<Item, Count>, "this has a count already: multiply the counts instead, as in (F + B) * (2 * rank)");
  return item;
}
template <expression::operand Count, phase_item Item>
constexpr Item operator*(Count, Item item) {
  static_assert(misuse::right<Count, Item>, "the count stands behind: F * rank, not rank * F");
  return item;
}

// C++ reads F * ranks - rank as (F * ranks) - rank.
template <phase_item Item, expression::operand Count>
constexpr Item operator-(Item item, Count const&) {
  static_assert(misuse::right<Item, Count>, "a count stands in brackets: F * (ranks - rank), not F * ranks - rank");
  return item;
}

namespace misuse {
template <class Value>
concept not_in_expressions = !expression::operand<Value> && !phase_item<Value>;

template <class Left, class Right>
constexpr Left no_expression(Left left) {
  static_assert(right<Right>, "rank expressions are made of rank, ranks, micro_batches, chunks and ints; this is none");
  return left;
}
}  // namespace misuse

namespace expression {
template <rank_expression Left, misuse::not_in_expressions Right>
constexpr Left operator+(Left left, Right const&) {
  return misuse::no_expression<Left, Right>(left);
}
template <rank_expression Left, misuse::not_in_expressions Right>
constexpr Left operator-(Left left, Right const&) {
  return misuse::no_expression<Left, Right>(left);
}
template <rank_expression Left, misuse::not_in_expressions Right>
constexpr Left operator*(Left left, Right const&) {
  return misuse::no_expression<Left, Right>(left);
}
template <rank_expression Left, misuse::not_in_expressions Right>
constexpr Left operator/(Left left, Right const&) {
  return misuse::no_expression<Left, Right>(left);
}
template <rank_expression Left, misuse::not_in_expressions Right>
constexpr Left operator%(Left left, Right const&) {
  return misuse::no_expression<Left, Right>(left);
}
template <class Left, class Right>
requires(!operand<Left> || !operand<Right>) constexpr number max_of(Left const&, Right const&) {
  static_assert(misuse::right<Left, Right>, "max_of takes ints and rank expressions: max_of(0, rank - 1)");
  return number(0);
}
template <class Left, class Right>
requires(!operand<Left> || !operand<Right>) constexpr number min_of(Left const&, Right const&) {
  static_assert(misuse::right<Left, Right>, "min_of takes ints and rank expressions: min_of(micro_batches, ranks)");
  return number(0);
}
}  // namespace expression
using expression::max_of;
using expression::min_of;

// ---- sequences

template <class Left, class Right>
requires((phase_item<Left> != phase_item<Right>)&&!misuse::a_phase<Left> && !misuse::a_phase<Right>) constexpr auto operator+(
    Left left, Right right) {
  static_assert(misuse::right<Left, Right>,
                "+ puts tokens one after another, as in F + B; counts are written with *, as in F * 2");
  if constexpr (phase_item<Left>)
    return left;
  else
    return right;
}
template <class Left, class Right>
requires(misuse::a_phase<Left> || misuse::a_phase<Right>) constexpr misuse::some_phase operator+(Left, Right) {
  static_assert(misuse::right<Left, Right>, "phases are joined with |, as in warmup(F) | steady(F, B) | cooldown(B)");
  return {};
}
// ---- phases

template <class Left, class Right>
requires(misuse::a_phase<Left> != misuse::a_phase<Right> || (phase_item<Left> && phase_item<Right>)) constexpr misuse::some_phase
operator|(Left, Right) {
  static_assert(misuse::right<Left, Right>,
                "| joins phases and nothing else, as in steady(F, B) | cooldown(B); in a phase, items are separated by commas");
  return {};
}

namespace misuse {
template <class... Items>
constexpr some_phase no_phase_of() {
  if constexpr ((a_phase<Items> || ...))
    static_assert(right<Items...>, "a phase holds no phases: join them with |, as in warmup(F) | steady(F, B)");
  else
    static_assert(
        right<Items...>,
        "a phase is made of tokens (F, B, I, W), sequences (F + B), fused pairs (overlap(F, B)) and repeated ones (F * rank)");
  return {};
}
}  // namespace misuse

template <class... Items>
requires(!phase_item<Items> || ...) constexpr misuse::some_phase warmup(Items...) { return misuse::no_phase_of<Items...>(); }
template <class... Items>
requires(!phase_item<Items> || ...) constexpr misuse::some_phase steady(Items...) { return misuse::no_phase_of<Items...>(); }
template <class... Items>
requires(!phase_item<Items> || ...) constexpr misuse::some_phase cooldown(Items...) { return misuse::no_phase_of<Items...>(); }

// ---- pairs

template <class... Halves>
constexpr token<kind::forward> overlap(Halves...) {
  static_assert(misuse::right<Halves...>,
                "a fused pair is two tokens, a forward and a backward: overlap(F, B), overlap(F(0), I(1))");
  return {};
}

// ---- orders

template <class Group>
requires(!expression::operand<Group>) constexpr auto depth_first(Group const&) {
  static_assert(misuse::right<Group>, "the size of a round is an int or a rank expression: depth_first(4), depth_first(ranks)");
  return depth_first(1);
}
template <class Group>
requires(!expression::operand<Group>) constexpr auto round_of(Group const&) {
  static_assert(misuse::right<Group>, "the size of a round is an int or a rank expression: round_of(4), round_of(ranks)");
  return round_of(1);
}

// ---- schedules

namespace misuse {
template <class... Parts>
struct first_of {
  using type = void;
};
template <class First, class... Rest>
struct first_of<First, Rest...> {
  using type = First;
};
template <class... Parts>
struct last_of {
  using type = void;
};
template <class First, class... Rest>
struct last_of<First, Rest...> : std::conditional_t<sizeof...(Rest) == 0, first_of<First>, last_of<Rest...>> {};
}  // namespace misuse

template <class... Parts>
constexpr auto schedule(Parts const&...) {
  if constexpr (sizeof...(Parts) == 0 || !placement_policy<typename misuse::first_of<Parts...>::type>)
    static_assert(
        misuse::right<Parts...>,
        "a schedule begins with its placement: linear, loop, vee, wave<n>, or your own map, placement::mapped(chunks, map)");
  else if constexpr (!misuse::a_phase<typename misuse::last_of<Parts...>::type>)
    static_assert(
        misuse::right<Parts...>,
        "a schedule ends with its phases, as in schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) "
        "| cooldown(B))");
  else
    static_assert(
        misuse::right<Parts...>,
        "between placement and phases stands at most an order: depth_first(group) or breadth_first; phases are joined with |");
  // Returns GPipe, which is lawful at every shape, so that no error about a broken law follows.
  return schedule(placement::linear, steady(token<kind::forward>{}) | cooldown(token<kind::backward>{}));
}

namespace placement {
template <class... Parts>
constexpr linear_t mapped(Parts const&...) {
  static_assert(
      misuse::right<Parts...>,
      "a placement of your own is mapped(chunks, map): how many stages each rank has (or a function of the shape that counts "
      "all stages), then a function int(int stage, shape) that gives a stage's rank");
  return {};
}
}  // namespace placement

}  // namespace chevron
