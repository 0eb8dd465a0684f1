#pragma once

#include <concepts>

#include <chevron/plan/shape.hpp>

/// \file
/// Where stages live: stage -> rank. A placement is any object with
///   `int default_chunks`                    stages per rank when the shape does not say;
///   `bool allows(int chunks)`               whether it exists with that many stages per rank;
///   `int rank_of(int stage, shape)`         the rank of a stage; the shape's `chunks` is filled in.
/// The number of stages is ranks × chunks.

namespace chevron {

template <class Placement>
concept placement_policy = requires(Placement const& p, int n, shape s) {
  { p.default_chunks } -> std::convertible_to<int>;
  { p.allows(n) } -> std::convertible_to<bool>;
  { p.rank_of(n, s) } -> std::convertible_to<int>;
};

/// Stages per rank under a placement: what the shape says, else the placement's own.
template <placement_policy Placement>
constexpr int chunks_of(Placement const& where, shape size) {
  return size.chunks != 0 ? size.chunks : where.default_chunks;
}

namespace placement {

/// Stage s on rank s: one stage per rank.
struct linear_t {
  int default_chunks = 1;
  constexpr bool allows(int chunks) const { return chunks == 1; }
  constexpr int rank_of(int stage, shape) const { return stage; }
};

/// Stage s on rank s mod P: what is left of the last rank goes round to the first (Megatron's interleaving).
struct loop_t {
  int default_chunks = 2;
  constexpr bool allows(int chunks) const { return chunks >= 1; }
  constexpr int rank_of(int stage, shape size) const { return stage % size.ranks; }
};

/// 0..P-1 and back, P-1..0: the last and the first stage share rank 0, and the turn needs no communication.
struct vee_t {
  int default_chunks = 2;
  constexpr bool allows(int chunks) const { return chunks == 2; }
  constexpr int rank_of(int stage, shape size) const { return stage < size.ranks ? stage : 2 * size.ranks - 1 - stage; }
};

/// Turns at both ends, `Chunks` times across (Hanayo's waves); `wave<2>` is `vee`.
template <int Chunks>
struct wave_t {
  static_assert(Chunks >= 1, "a wave crosses the ranks at least once: wave<n> needs n >= 1");
  int default_chunks = Chunks;
  constexpr bool allows(int chunks) const { return chunks == Chunks; }
  constexpr int rank_of(int stage, shape size) const {
    int const across = stage / size.ranks;
    int const along = stage % size.ranks;
    return across % 2 == 0 ? along : size.ranks - 1 - along;
  }
};

/// The user's own map: any constexpr callable `int(int stage, shape)`.
template <class Map>
struct mapped_t {
  int default_chunks;
  Map map;
  constexpr bool allows(int chunks) const { return chunks >= 1; }
  constexpr int rank_of(int stage, shape size) const { return map(stage, size); }
};

inline constexpr linear_t linear{};
inline constexpr loop_t loop{};
inline constexpr vee_t vee{};
template <int Chunks>
inline constexpr wave_t<Chunks> wave{};

/// `placement::mapped(2, [](int stage, shape size) { … })`: a placement of your own with two stages per rank.
template <class Map>
constexpr mapped_t<Map> mapped(int chunks, Map map) {
  return {chunks, map};
}

}  // namespace placement
}  // namespace chevron
