#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <type_traits>

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/shape.hpp>

/// \file
/// Placements: which rank has which stage. A placement is any object with `int rank_of(int stage, shape)`, the rank of a stage.
/// If every rank has an equal number of stages (ranks × chunks in all), the placement also has
///   `int default_chunks`          stages per rank if `shape::chunks` is 0; `rank_of` receives a shape with this number
///   `bool allows(int chunks)`     whether the placement exists with `chunks` stages per rank
/// If ranks may have different numbers of stages, the placement has instead
///   `int stages(shape)`           number of all stages

namespace chevron {

/// A placement that defines the number of stages, `stages(shape)`; ranks may have different numbers of stages.
template <class Placement>
concept counted_placement = requires(Placement const& p, shape s) {
  { p.stages(s) } -> std::convertible_to<int>;
};

/// A placement with the same number of stages on every rank.
template <class Placement>
concept even_placement = !counted_placement<Placement> && requires(Placement const& p, int n) {
  { p.default_chunks } -> std::convertible_to<int>;
  { p.allows(n) } -> std::convertible_to<bool>;
};

template <class Placement>
concept placement_policy = (counted_placement<Placement> || even_placement<Placement>) &&
    requires(Placement const& p, int n, shape s) {
  { p.rank_of(n, s) } -> std::convertible_to<int>;
};

/// The number of stages of a placement at this size.
template <placement_policy Placement>
constexpr int stages_in(Placement const& where, shape size) {
  if constexpr (counted_placement<Placement>) {
    return where.stages(size);
  } else {
    return size.ranks * (size.chunks != 0 ? size.chunks : where.default_chunks);
  }
}

namespace placement {

/// Stage s on rank s: one stage per rank.
struct linear_t {
  int default_chunks = 1;
  constexpr bool allows(int chunks) const { return chunks == 1; }
  constexpr int rank_of(int stage, shape) const { return stage; }
};

/// Stage s on rank s mod P: the stage after the last rank's is on the first rank again (Megatron's interleaving).
struct loop_t {
  int default_chunks = 2;
  constexpr bool allows(int chunks) const { return chunks >= 1; }
  constexpr int rank_of(int stage, shape size) const { return stage % size.ranks; }
};

/// Stages on ranks 0 … P-1, then P-1 … 0: the first and the last stage share rank 0, and stages P-1 and P need no message
/// between them.
struct vee_t {
  int default_chunks = 2;
  constexpr bool allows(int chunks) const { return chunks == 2; }
  constexpr int rank_of(int stage, shape size) const { return stage < size.ranks ? stage : 2 * size.ranks - 1 - stage; }
};

/// Stages on ranks 0 … P-1, then P-1 … 0, and so on: each wave, there and back, puts two stages on every rank, and needs no
/// message where it turns (Hanayo, arXiv 2308.15762). Allows any whole number of waves.
struct waves_t {
  int default_chunks = 2;
  constexpr bool allows(int chunks) const { return chunks >= 2 && chunks % 2 == 0; }
  static constexpr int rank_of(int stage, shape size) {
    int const across = stage / size.ranks;
    int const along = stage % size.ranks;
    return across % 2 == 0 ? along : size.ranks - 1 - along;
  }
};

/// Stages on ranks 0 … P-1, then P-1 … 0, and so on, `Chunks` times across the ranks; `wave<2>` equals `vee`.
template <int Chunks>
struct wave_t {
  static_assert(Chunks >= 1, "a wave crosses the ranks at least once: wave<n> needs n >= 1");
  int default_chunks = Chunks;
  constexpr bool allows(int chunks) const { return chunks == Chunks; }
  constexpr int rank_of(int stage, shape size) const { return waves_t::rank_of(stage, size); }
};

/// A user's own placement with an equal number of stages on each rank. `map` is any constexpr callable `int(int stage, shape)`
/// that returns a stage's rank.
template <class Map>
struct mapped_t {
  int default_chunks;
  Map map;
  constexpr bool allows(int chunks) const { return chunks >= 1; }
  constexpr int rank_of(int stage, shape size) const { return map(stage, size); }
};

/// A user's own placement with `count(shape)` stages. `count` and `map` are constexpr callables.
template <class Count, class Map>
struct counted_t {
  Count count;
  Map map;
  constexpr int stages(shape size) const { return count(size); }
  constexpr int rank_of(int stage, shape size) const { return map(stage, size); }
};

/// A placement that lists each stage's rank.
template <int Stages>
struct listed_t {
  int rank[array_size(Stages)];
  constexpr int stages(shape) const { return Stages; }
  constexpr int rank_of(int stage, shape) const { return rank[stage]; }
};

inline constexpr linear_t linear{};
inline constexpr loop_t loop{};
inline constexpr vee_t vee{};
inline constexpr waves_t waves{};
template <int Chunks>
inline constexpr wave_t<Chunks> wave{};

/// `placement::mapped(2, [](int stage, shape size) { … })`: a placement of the user's own with two stages on each rank.
template <class Map>
constexpr mapped_t<Map> mapped(int chunks, Map map) {
  return {chunks, map};
}
/// `placement::mapped([](shape size) { return 2 * size.ranks + 1; }, [](int stage, shape size) { … })`: a placement of the
/// user's own, here with 2P + 1 stages; ranks may have different numbers of stages.
template <class Count, class Map>
requires std::is_invocable_r_v<int, Count const&, shape>
constexpr counted_t<Count, Map> mapped(Count count, Map map) {
  return {count, map};
}
/// `placement::of({0, 0, 0, 1, 1})`: the rank of each stage in turn; here three stages on rank 0, two on rank 1.
template <std::size_t Stages>
constexpr listed_t<static_cast<int>(Stages)> of(int const (&rank_of_stage)[Stages]) {
  listed_t<static_cast<int>(Stages)> out{};
  for (std::size_t s = 0; s < Stages; ++s) out.rank[s] = rank_of_stage[s];
  return out;
}
template <std::size_t Stages>
constexpr listed_t<static_cast<int>(Stages)> of(std::array<int, Stages> const& rank_of_stage) {
  listed_t<static_cast<int>(Stages)> out{};
  for (std::size_t s = 0; s < Stages; ++s) out.rank[s] = rank_of_stage[s];
  return out;
}

}  // namespace placement
}  // namespace chevron
