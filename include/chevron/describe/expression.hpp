#pragma once

#include <concepts>
#include <type_traits>

#include <chevron/plan/finding.hpp>

/// \file
/// Rank expressions: arithmetic and comparisons over `rank`, `ranks`, `micro_batches`, `chunks` and `slices`, evaluated
/// for each rank.

namespace chevron {

/// The variables of rank expressions.
struct rank_parameters {
  int rank = 0;
  int ranks = 0;
  int micro_batches = 0;
  int chunks = 0;
  int slices = 1;
  bool* divided_by_zero = nullptr;  ///< set if an expression divides by 0; null: not checked
};

/// The finding about a rank expression that divides by 0 on this rank.
constexpr finding division_by_zero(int rank) {
  return detail::fault(
      law::description,
      "a rank expression divides by 0, or takes a remainder of it: give that rank another divisor, as in max_of(rank, 1); rank ",
      rank);
}

namespace expression {

template <class Value>
inline constexpr bool is_condition = false;

struct node {
  /// Refuses a rank expression as a condition, as in `rank % 2 == 0 ? 2 : 1`: it has no value before a rank evaluates it.
  template <std::same_as<bool> Bool>
  constexpr explicit operator Bool() const {
    static_assert(is_condition<Bool>,
                  "a rank expression is no condition for ?:, && or ||: compute with comparisons, which are 1 or 0, in brackets: "
                  "1 + (rank % 2 == 0) for rank % 2 == 0 ? 2 : 1");
    return false;
  }
};

template <class Node>
concept rank_expression = std::derived_from<std::remove_cvref_t<Node>, node>;

// A concept whose name the compiler prints if a count or limit is neither an int nor a rank expression.
template <class Value>
concept int_or_rank_expression = rank_expression<Value> || std::same_as<std::remove_cvref_t<Value>, int>;

template <class Value>
concept operand = int_or_rank_expression<Value>;

struct number : node {
  int value;
  constexpr explicit number(int v) : value(v) {}
  constexpr int operator()(rank_parameters const&) const { return value; }
};
struct rank_t : node {
  constexpr int operator()(rank_parameters const& s) const { return s.rank; }
};
struct ranks_t : node {
  constexpr int operator()(rank_parameters const& s) const { return s.ranks; }
};
struct micro_batches_t : node {
  constexpr int operator()(rank_parameters const& s) const { return s.micro_batches; }
};
struct chunks_t : node {
  constexpr int operator()(rank_parameters const& s) const { return s.chunks; }
};
struct slices_t : node {
  constexpr int operator()(rank_parameters const& s) const { return s.slices; }
};

/// Two operands joined by an operation. Operations are named types, since a compiler prints their names when an expression is
/// wrong.
template <class Operation, class Left, class Right>
struct binary : node {
  Left left;
  Right right;
  constexpr binary(Left l, Right r) : left(l), right(r) {}
  constexpr int operator()(rank_parameters const& s) const {
    int const l = left(s), r = right(s);
    if constexpr (Operation::divides) {
      if (r == 0 && s.divided_by_zero != nullptr) *s.divided_by_zero = true;
      if (r == 0) return 0;
    }
    return Operation::of(l, r);
  }
};
template <bool Divides = false>
struct operation {
  static constexpr bool divides = Divides;
};
struct plus : operation<> {
  static constexpr int of(int l, int r) { return l + r; }
};
struct minus : operation<> {
  static constexpr int of(int l, int r) { return l - r; }
};
struct times : operation<> {
  static constexpr int of(int l, int r) { return l * r; }
};
/// A quotient, rounded towards 0.
struct over : operation<true> {
  static constexpr int of(int l, int r) { return l / r; }
};
struct remainder : operation<true> {
  static constexpr int of(int l, int r) { return l % r; }
};
/// 1 if the comparison holds, otherwise 0.
struct less : operation<> {
  static constexpr int of(int l, int r) { return l < r ? 1 : 0; }
};
struct equal : operation<> {
  static constexpr int of(int l, int r) { return l == r ? 1 : 0; }
};
struct larger : operation<> {
  static constexpr int of(int l, int r) { return l > r ? l : r; }
};
struct smaller : operation<> {
  static constexpr int of(int l, int r) { return l < r ? l : r; }
};

template <rank_expression Node>
constexpr Node as_node(Node n) {
  return n;
}
constexpr number as_node(int n) { return number(n); }

template <class Value>
using node_of = decltype(as_node(std::declval<Value>()));

template <operand L, operand R>
requires(rank_expression<L> || rank_expression<R>) constexpr binary<plus, node_of<L>, node_of<R>> operator+(L l, R r) {
  return {as_node(l), as_node(r)};
}
template <operand L, operand R>
requires(rank_expression<L> || rank_expression<R>) constexpr binary<minus, node_of<L>, node_of<R>> operator-(L l, R r) {
  return {as_node(l), as_node(r)};
}
template <operand L, operand R>
requires(rank_expression<L> || rank_expression<R>) constexpr binary<times, node_of<L>, node_of<R>> operator*(L l, R r) {
  return {as_node(l), as_node(r)};
}
template <operand L, operand R>
requires(rank_expression<L> || rank_expression<R>) constexpr binary<over, node_of<L>, node_of<R>> operator/(L l, R r) {
  return {as_node(l), as_node(r)};
}
template <operand L, operand R>
requires(rank_expression<L> || rank_expression<R>) constexpr binary<remainder, node_of<L>, node_of<R>> operator%(L l, R r) {
  return {as_node(l), as_node(r)};
}
template <operand L, operand R>
requires(rank_expression<L> || rank_expression<R>) constexpr binary<less, node_of<L>, node_of<R>> operator<(L l, R r) {
  return {as_node(l), as_node(r)};
}
template <operand L, operand R>
requires(rank_expression<L> || rank_expression<R>) constexpr binary<less, node_of<R>, node_of<L>> operator>(L l, R r) {
  return {as_node(r), as_node(l)};
}
template <operand L, operand R>
requires(rank_expression<L> || rank_expression<R>) constexpr auto operator<=(L l, R r) {
  return 1 - (r < l);
}
template <operand L, operand R>
requires(rank_expression<L> || rank_expression<R>) constexpr auto operator>=(L l, R r) {
  return 1 - (l < r);
}
template <operand L, operand R>
requires(rank_expression<L> || rank_expression<R>) constexpr binary<equal, node_of<L>, node_of<R>> operator==(L l, R r) {
  return {as_node(l), as_node(r)};
}
template <operand L, operand R>
requires(rank_expression<L> || rank_expression<R>) constexpr auto operator!=(L l, R r) {
  return 1 - (l == r);
}
/// The larger of two rank expressions.
template <operand L, operand R>
constexpr binary<larger, node_of<L>, node_of<R>> max_of(L l, R r) {
  return {as_node(l), as_node(r)};
}
/// The smaller of two rank expressions.
template <operand L, operand R>
constexpr binary<smaller, node_of<L>, node_of<R>> min_of(L l, R r) {
  return {as_node(l), as_node(r)};
}

}  // namespace expression

using expression::max_of;
using expression::min_of;

/// The terms of rank expressions, which `letters` and `words` include.
namespace terms {
inline constexpr expression::rank_t rank{};                    ///< this rank, from 0
inline constexpr expression::ranks_t ranks{};                  ///< P, number of ranks
inline constexpr expression::micro_batches_t micro_batches{};  ///< M, microbatches in a step
inline constexpr expression::chunks_t chunks{};                ///< V, stages on this rank
inline constexpr expression::slices_t slices{};                ///< k, slices of each microbatch
}  // namespace terms

}  // namespace chevron
