#pragma once

#include <cstdint>

#include <chevron/plan/finding.hpp>
#include <chevron/plan/placement.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// What every generator asks first: is this a size one can plan for, and where do the stages live?

namespace chevron {

namespace detail {

constexpr plan refused(shape size, char const* name, finding problem) {
  plan nothing;
  nothing.size = size;
  nothing.size.ranks = 0;
  nothing.name = name;
  nothing.begin = buffer<int>(1, zeroed);
  nothing.problem = problem;
  return nothing;
}

/// a × b, or the largest int where that does not fit.
constexpr int product_or_most(int a, int b) { return a > 2147483647 / b ? 2147483647 : a * b; }

constexpr finding shape_problem(char const* words, int value) {
  finding f;
  f.broken = law::shape;
  f.words = words;
  f.number = value;
  return f;
}

/// The number of chunks a placement allows that is nearest to the one asked for.
template <even_placement Placement>
constexpr int nearest_chunks(Placement const& where, int asked) {
  for (int away = 0; away <= max_stages; ++away) {
    if (asked - away >= 1 && where.allows(asked - away)) return asked - away;
    if (where.allows(asked + away)) return asked + away;
  }
  return where.default_chunks;
}

}  // namespace detail

/// The chunks of a shape at which the placement exists, filled in: those per rank, or the most that any rank has.
template <placement_policy Placement>
constexpr int chunks_of(Placement const& where, shape size) {
  if constexpr (even_placement<Placement>) {
    return size.chunks != 0 ? size.chunks : where.default_chunks;
  } else {
    buffer<int> held(size.ranks, zeroed);
    int most = 0;
    int const stages = stages_in(where, size);
    for (int s = 0; s < stages; ++s) {
      int const rank = where.rank_of(s, size);
      if (rank < 0 || rank >= size.ranks) continue;
      int const now = ++held.data[rank];
      most = now > most ? now : most;
    }
    return most;
  }
}

namespace detail {

/// The most stages on a rank, counted: a map of the user's own may be lopsided though it speaks of chunks per rank.
constexpr int most_on_a_rank(plan_view const& plan) {
  buffer<int> held(plan.size.ranks, zeroed);
  int most = 0;
  for (int s = 0; s < plan.stages; ++s) {
    int const now = ++held.data[plan.rank_of[s]];
    most = now > most ? now : most;
  }
  return most;
}

/// Whether a placement exists at this shape.
template <placement_policy Placement>
constexpr finding check_shape(Placement const& where, shape size) {
  if (size.ranks < 1) return shape_problem("ranks must be at least 1, not ", size.ranks);
  if (size.micro_batches < 1) return shape_problem("micro_batches must be at least 1, not ", size.micro_batches);
  if (size.micro_batches > max_micro_batches)
    return shape_problem("micro_batches must be at most 65535, not ", size.micro_batches);
  if (size.chunks < 0) return shape_problem("chunks must be at least 1, not ", size.chunks);
  int fits = size.chunks;
  if constexpr (counted_placement<Placement>) {
    int const stages = where.stages(size);
    if (stages < 1) return shape_problem("the placement must have at least 1 stage, not ", stages);
    if (stages > max_stages) return shape_problem("the placement must have at most 2048 stages, not ", stages);
    if (size.chunks != 0) fits = chunks_of(where, size);
  } else {
    int const per_rank = size.chunks != 0 ? size.chunks : where.default_chunks;
    if (!where.allows(per_rank))
      fits = nearest_chunks(where, per_rank);
    else if (per_rank > max_stages / size.ranks)
      return shape_problem("ranks x chunks must be at most 2048, not ", product_or_most(size.ranks, per_rank));
  }
  if (fits == size.chunks) return {};
  finding f = shape_problem("with this placement chunks can be ", fits);
  f.limit = size.chunks;
  return f;
}

/// Fills in each stage's rank; `size.chunks` is already known.
template <placement_policy Placement, class RankOf>
constexpr finding place_stages(Placement const& where, shape size, RankOf& rank_of) {
  int const stages = stages_in(where, size);
  for (int s = 0; s < stages; ++s) {
    int const rank = where.rank_of(s, size);
    if (rank < 0 || rank >= size.ranks) {
      finding f;
      f.broken = law::placement;
      f.words = rank < 0 ? "the placement puts a stage on a negative rank, stage "
                         : "the placement puts a stage on a rank that does not exist, stage ";
      f.number = s;
      f.limit = size.ranks;
      return f;
    }
    rank_of[s] = static_cast<std::int16_t>(rank);
  }
  return {};
}

}  // namespace detail
}  // namespace chevron
