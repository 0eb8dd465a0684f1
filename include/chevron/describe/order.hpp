#pragma once

#include <chevron/describe/expression.hpp>
#include <chevron/plan/finding.hpp>

/// \file
/// Orders: the sequence of (chunk, microbatch) pairs that a rank's tokens without a chunk run, for forwards and for backwards.
/// Backwards run the chunks in reverse.

namespace chevron {

/// One entry of an order: the chunk and microbatch of an action.
struct drawn {
  int chunk;
  int micro_batch;
};

namespace detail {

/// Writes a round of microbatches [first, last), chunk after chunk, from index `next` on; backwards run the last chunk first.
/// \returns the index after the round
constexpr int fill_round(int chunks, int first, int last, int next, drawn* forward, drawn* backward) {
  for (int chunk = 0; chunk < chunks; ++chunk) {
    for (int m = first; m < last; ++m) {
      forward[next] = {chunk, m};
      backward[next] = {chunks - 1 - chunk, m};
      ++next;
    }
  }
  return next;
}

}  // namespace detail

/// Microbatches run in rounds, and within a round chunk after chunk (Megatron's interleaving, arXiv 2104.04473 §2.2). There are M
/// / group rounds, rounded down and at least one, filled evenly, larger rounds first: if `group` divides M, every round has
/// `group` microbatches, otherwise some have more. Backwards run the last chunk first, microbatches in the same order.
template <class Group>
struct depth_first_t {
  Group group;

  constexpr int rounds(rank_parameters const& s) const {
    int const per_round = group(s);
    int const wanted = per_round > 0 ? s.micro_batches / per_round : 1;
    return wanted > 1 ? wanted : 1;
  }
  /// The number of microbatches of the first (largest) round.
  constexpr int first_group(rank_parameters const& s) const { return (s.micro_batches + rounds(s) - 1) / rounds(s); }
  constexpr void fill(rank_parameters const& s, drawn* forward, drawn* backward) const {
    int const all = rounds(s);
    int next = 0;
    for (int round = 0, first = 0; round < all; ++round) {
      int const last = first + s.micro_batches / all + (round < s.micro_batches % all ? 1 : 0);
      next = detail::fill_round(s.chunks, first, last, next, forward, backward);
      first = last;
    }
  }
};

/// Microbatches run in groups, and within a group chunk after chunk (Megatron's microbatch_group_size_per_vp_stage). Every
/// group has `group` microbatches, the last group the rest. If the rest is fewer than the ranks, which Megatron refuses, the
/// first group includes the rest. Backwards run the last chunk first, microbatches in the same order.
template <class Group>
struct in_groups_of_t {
  Group group;

  /// The number of microbatches of the first (largest) group.
  constexpr int first_group(rank_parameters const& s) const {
    int const asked = group(s);
    int const size = asked < 1 ? 1 : asked < s.micro_batches ? asked : s.micro_batches;
    int const rest = s.micro_batches % size;
    return rest > 0 && rest < s.ranks ? size + rest : size;
  }
  constexpr void fill(rank_parameters const& s, drawn* forward, drawn* backward) const {
    int const size = group(s) < 1 ? 1 : group(s);
    int next = 0;
    for (int first = 0, last = first_group(s); first < s.micro_batches; first = last, last += size) {
      if (last > s.micro_batches) last = s.micro_batches;
      next = detail::fill_round(s.chunks, first, last, next, forward, backward);
    }
  }
  /// Returns a finding if a group has too few microbatches to occupy all ranks from chunk to chunk.
  constexpr finding problem(rank_parameters const& s) const {
    int const least = s.ranks < s.micro_batches ? s.ranks : s.micro_batches;
    int const asked = group(s);
    if (asked >= least) return {};
    return detail::fault(law::description, "a group must have a microbatch for each rank, at least ", least, asked);
  }
};

/// All microbatches of a chunk run before the next chunk; backwards run chunks and microbatches in reverse (arXiv 2211.05953).
struct breadth_first_t {
  constexpr void fill(rank_parameters const& s, drawn* forward, drawn* backward) const {
    int next = 0;
    for (int chunk = 0; chunk < s.chunks; ++chunk) {
      for (int m = 0; m < s.micro_batches; ++m) {
        forward[next] = {chunk, m};
        backward[next] = {s.chunks - 1 - chunk, s.micro_batches - 1 - m};
        ++next;
      }
    }
  }
};

template <expression::operand Group>
constexpr depth_first_t<expression::node_of<Group>> depth_first(Group group) {
  return {expression::as_node(group)};
}
template <expression::operand Group>
constexpr in_groups_of_t<expression::node_of<Group>> in_groups_of(Group group) {
  return {expression::as_node(group)};
}
inline constexpr breadth_first_t breadth_first{};

namespace expression {
/// The number of microbatches of an order's first (largest) round or group.
template <class Order>
struct first_group_t : node {
  Order order;
  constexpr explicit first_group_t(Order o) : order(o) {}
  constexpr int operator()(rank_parameters const& s) const { return order.first_group(s); }
};
}  // namespace expression

/// The size of the first round of `depth_first(group)`, for warm-up counts.
template <expression::operand Group>
constexpr auto round_of(Group group) {
  return expression::first_group_t(depth_first(group));
}
/// The size of the first group of `in_groups_of(group)`, for warm-up counts.
template <expression::operand Group>
constexpr auto first_group_of(Group group) {
  return expression::first_group_t(in_groups_of(group));
}

/// An order, whose `fill` writes the sequences of forwards and backwards. An order may also have `problem(rank_parameters)`,
/// which returns a finding for sizes at which the order does not exist.
template <class Order>
concept forward_order = requires(Order const& o, rank_parameters const& s, drawn* d) {
  o.fill(s, d, d);
};

}  // namespace chevron
