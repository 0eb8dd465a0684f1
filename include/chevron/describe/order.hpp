#pragma once

#include <chevron/describe/expression.hpp>

/// \file
/// Orders: how plain tokens draw their next (chunk, microbatch). The backward order mirrors the forward one.

namespace chevron {

/// One entry of a stream.
struct drawn {
  int chunk;
  int micro_batch;
};

/// Microbatches in rounds; within a round chunk after chunk (Megatron's interleaving, arXiv 2104.04473 §2.2). There are
/// M / group rounds, rounded down and at least one, filled evenly, larger ones first: when `group` divides M every round has
/// `group` microbatches, otherwise a few more, never fewer. Backward: the last chunk first, microbatches in the same order.
template <class Group>
struct depth_first_t {
  Group group;

  constexpr void fill(situation const& s, drawn* forward, drawn* backward) const {
    int const per_round = group(s);
    int const wanted = per_round > 0 ? s.micro_batches / per_round : 1;
    int const rounds = wanted > 1 ? wanted : 1;
    int next = 0;
    int first = 0;
    for (int round = 0; round < rounds; ++round) {
      int const size = s.micro_batches / rounds + (round < s.micro_batches % rounds ? 1 : 0);
      for (int chunk = 0; chunk < s.chunks; ++chunk) {
        for (int m = first; m < first + size; ++m) {
          forward[next] = {chunk, m};
          backward[next] = {s.chunks - 1 - chunk, m};
          ++next;
        }
      }
      first += size;
    }
  }
};

/// All microbatches of a chunk before the next chunk; backward: chunks and microbatches reversed (arXiv 2211.05953).
struct breadth_first_t {
  constexpr void fill(situation const& s, drawn* forward, drawn* backward) const {
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
inline constexpr breadth_first_t breadth_first{};

namespace expression {
/// How many microbatches the first (largest) round of `depth_first(group)` has.
template <class Group>
struct round_t : node {
  Group group;
  constexpr explicit round_t(Group g) : group(g) {}
  constexpr int operator()(situation const& s) const {
    int const per_round = group(s);
    int const wanted = per_round > 0 ? s.micro_batches / per_round : 1;
    int const rounds = wanted > 1 ? wanted : 1;
    return (s.micro_batches + rounds - 1) / rounds;
  }
};
}  // namespace expression

/// The size of the first round of `depth_first(group)`, for warm-up counts.
template <expression::operand Group>
constexpr expression::round_t<expression::node_of<Group>> round_of(Group group) {
  return expression::round_t<expression::node_of<Group>>(expression::as_node(group));
}

template <class Order>
concept forward_order = requires(Order const& o, situation const& s, drawn* d) {
  o.fill(s, d, d);
};

}  // namespace chevron
