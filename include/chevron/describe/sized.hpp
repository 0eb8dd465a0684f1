#pragma once

#include <cstdint>

#include <chevron/describe/expression.hpp>
#include <chevron/plan/placement.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Checks a shape and places the stages, for all functions that make plans.

namespace chevron {

/// A description that has a placement (`where`) and a name.
template <class Description>
concept placed_description = requires(Description const& what, shape size) {
  stages_in(what.where, size);
  what.name;
};

/// The number of stages of a description at this size.
template <placed_description Description>
constexpr int stages_of(Description const& what, shape size) {
  return stages_in(what.where, size);
}

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

/// a × b, or the largest int if the product does not fit into an int.
constexpr int product_or_most(int a, int b) { return a > 2147483647 / b ? 2147483647 : a * b; }

/// The number of chunks per rank that the placement allows and that is nearest to `asked`.
template <even_placement Placement>
constexpr int nearest_chunks(Placement const& where, int asked) {
  for (int away = 0; away <= max_stages; ++away) {
    if (asked - away >= 1 && where.allows(asked - away)) return asked - away;
    if (where.allows(asked + away)) return asked + away;
  }
  return where.default_chunks;
}

}  // namespace detail

/// The number of chunks per rank at a shape. For an even placement, `size.chunks` or, if 0, the placement's default; for any
/// other placement, the largest number of stages on a rank.
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

/// Each rank's stages, from the input side: rank r's are stage[first[r]], …, stage[first[r + 1] - 1].
struct stages_by_rank {
  buffer<int> first;
  buffer<int> stage;
  int most = 0;  ///< the largest number of stages on one rank

  template <class RankOf>
  constexpr stages_by_rank(int ranks, int stages, RankOf const& rank_of) : first(ranks + 1, zeroed), stage(stages) {
    for (int s = 0; s < stages; ++s) ++first.data[rank_of[s] + 1];
    buffer<int> next(ranks);
    for (int r = 0; r < ranks; ++r) {
      most = first.data[r + 1] > most ? first.data[r + 1] : most;
      next.data[r] = first.data[r];
      first.data[r + 1] += first.data[r];
    }
    for (int s = 0; s < stages; ++s) stage.data[next.data[rank_of[s]]++] = s;
  }
  constexpr int held(int rank) const { return first.data[rank + 1] - first.data[rank]; }
};

/// For a placement that lists its stages: names the rank with the most stages and the rank with the fewest, if they differ.
template <counted_placement Placement>
constexpr void name_uneven_ranks(Placement const& where, shape size, finding& out) {
  buffer<int> held(size.ranks, zeroed);
  for (int s = 0; s < where.stages(size); ++s) {
    int const rank = where.rank_of(s, size);
    if (rank >= 0 && rank < size.ranks) ++held.data[rank];
  }
  int most = 0, least = 0;
  for (int r = 1; r < size.ranks; ++r) {
    if (held.data[r] > held.data[most]) most = r;
    if (held.data[r] < held.data[least]) least = r;
  }
  if (held.data[most] == held.data[least]) return;
  out.other_rank = most;
  out.other_position = least;
  out.links = held.data[least];
}

/// Checks whether a placement exists at this shape. \returns the first fault, if there is one
template <placement_policy Placement>
constexpr finding check_shape(Placement const& where, shape size) {
  if (size.ranks < 1) return fault(law::shape, "ranks must be at least 1, not ", size.ranks);
  if (size.micro_batches < 1) return fault(law::shape, "micro_batches must be at least 1, not ", size.micro_batches);
  if (size.slices < 1) return fault(law::shape, "slices must be at least 1, not ", size.slices);
  if (size.micro_batches > max_micro_batches)
    return fault(law::shape, "micro_batches must be at most 65535, not ", size.micro_batches);
  if (size.slices > max_micro_batches / size.micro_batches)
    return fault(law::shape, "micro_batches x slices must be at most 65535, not ",
                 product_or_most(size.micro_batches, size.slices));
  if (size.chunks < 0) return fault(law::shape, "chunks must be at least 1, not ", size.chunks);
  int fits = size.chunks;
  if constexpr (counted_placement<Placement>) {
    int const stages = where.stages(size);
    if (stages < 1) return fault(law::shape, "the placement must have at least 1 stage, not ", stages);
    if (stages > max_stages) return fault(law::shape, "the placement must have at most 1024 stages, not ", stages);
    if (size.chunks != 0) fits = chunks_of(where, size);
  } else {
    int const per_rank = size.chunks != 0 ? size.chunks : where.default_chunks;
    if (!where.allows(per_rank))
      fits = nearest_chunks(where, per_rank);
    else if (per_rank > max_stages / size.ranks)
      return fault(law::shape, "ranks x chunks must be at most 1024, not ", product_or_most(size.ranks, per_rank));
  }
  if (fits == size.chunks) return {};
  finding out = fault(law::shape, "with this placement chunks can be ", fits, size.chunks);
  if constexpr (counted_placement<Placement>) name_uneven_ranks(where, size, out);
  return out;
}

/// Writes each stage's rank into `rank_of`; the caller has filled in `size.chunks`. \returns a finding if a rank does not exist
template <placement_policy Placement, class RankOf>
constexpr finding place_stages(Placement const& where, shape size, int stages, RankOf& rank_of) {
  for (int s = 0; s < stages; ++s) {
    int const rank = where.rank_of(s, size);
    if (rank < 0 || rank >= size.ranks)
      return fault(law::placement,
                   rank < 0 ? "the placement puts a stage on a negative rank, stage "
                            : "the placement puts a stage on a rank that does not exist, stage ",
                   s, size.ranks);
    rank_of[s] = static_cast<std::int16_t>(rank);
  }
  return {};
}

/// Refuses slices, for functions that make plans of whole sequences only. \param words the finding's words
constexpr finding whole_sequences(char const* words, shape size) {
  return size.slices > 1 ? fault(law::shape, words, size.slices) : finding{};
}

/// Begins a plan: checks the shape, fills in its chunks, and sets the plan's size and each stage's rank.
template <placement_policy Placement, class Plan>
constexpr finding begin_plan(Placement const& where, shape& size, Plan& to) {
  if (finding const f = check_shape(where, size)) return f;
  size.chunks = chunks_of(where, size);
  to.size = size;
  to.stages = stages_in(where, size);
  if constexpr (std::same_as<Plan, plan>) to.rank_of = buffer<std::int16_t>(to.stages);
  if (finding const f = place_stages(where, size, to.stages, to.rank_of)) return f;
  to.size.chunks = most_on_a_rank(to);
  return {};
}

/// Begins a plan of a source with a name and limits (a description, a list schedule …): does all of `begin_plan`, and copies
/// name and limits into the plan.
template <class Source, class Plan>
constexpr finding begin_plan_of(Source const& what, shape& size, Plan& to) {
  to.name = what.name;
  if (finding const f = begin_plan(what.where, size, to)) return f;
  bool by_zero = false;
  finding const problem =
      what.limits.declare(to, rank_parameters{0, size.ranks, size.micro_batches, size.chunks, size.slices, &by_zero});
  return by_zero ? division_by_zero(0) : problem;
}

}  // namespace detail
}  // namespace chevron
