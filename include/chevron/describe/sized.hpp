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

/// Whether a placement exists at this shape.
template <placement_policy Placement>
constexpr finding check_shape(Placement const& where, shape size) {
  if (size.ranks < 1) return shape_problem("ranks must be at least 1, not ", size.ranks);
  if (size.micro_batches < 1) return shape_problem("micro_batches must be at least 1, not ", size.micro_batches);
  if (size.micro_batches > max_micro_batches)
    return shape_problem("micro_batches must be at most 65535, not ", size.micro_batches);
  int const per_rank = chunks_of(where, size);
  if (per_rank < 1) return shape_problem("chunks must be at least 1, not ", per_rank);
  if (!where.allows(per_rank))
    return shape_problem("this placement does not exist with that many chunks per rank; the shape asks for ", per_rank);
  if (per_rank > max_stages / size.ranks)
    return shape_problem("ranks x chunks must be at most 2048, not ", product_or_most(size.ranks, per_rank));
  return {};
}

/// Fills in each stage's rank; `size.chunks` is already known.
template <placement_policy Placement>
constexpr finding place_stages(Placement const& where, shape size, std::int16_t* rank_of) {
  for (int s = 0; s < size.ranks * size.chunks; ++s) {
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
