#pragma once

#include <cstdint>

#include <chevron/plan/action.hpp>
#include <chevron/plan/buffer.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/plan/shape.hpp>

/// \file
/// A plan: for each rank, its compute actions in order. The one value between every description and everything after it.

namespace chevron {

/// A plan's name, which the plan owns: at most `capacity` characters, longer ones are cut off.
struct plan_name {
  static constexpr int capacity = 63;
  char characters[capacity + 1]{};

  constexpr plan_name() = default;
  constexpr plan_name(char const* from) {  // NOLINT: a literal is a name
    for (int i = 0; i < capacity && from[i] != 0; ++i) characters[i] = from[i];
  }
  constexpr operator char const*() const { return characters; }
};

/// A plan seen from outside: pointers into a `plan` or a `static_plan` that outlives it. Every law, cost and picture takes
/// this, so the same code serves the compiler and the running program.
struct plan_view {
  shape size{};                               ///< ranks and microbatches; `chunks` is the largest number of stages on a rank
  int stages = 0;                             ///< S, pieces the model is cut into
  bool forward_only = false;                  ///< evaluation: only F, no gradients
  int in_flight_limit = 0;                    ///< declared limit of chunks in flight on any rank; 0: none
  action const* actions = nullptr;            ///< all ranks' actions, rank after rank
  int const* begin = nullptr;                 ///< rank r owns actions [begin[r], begin[r + 1])
  std::int16_t const* rank_of = nullptr;      ///< stage -> rank
  char const* name = "";                      ///< as the catalogue spells it; empty for a user's own
  finding problem{};                          ///< what kept the description from being worked out, if anything
  std::int64_t message_limit = 0;             ///< declared limit of messages a step sends; 0: none
  std::int64_t byte_limit = 0;                ///< declared limit of bytes in flight on any rank; 0: none
  std::int64_t const* stage_bytes = nullptr;  ///< with a byte limit: what each stage keeps of a microbatch in flight

  constexpr int total() const { return begin[size.ranks]; }
  constexpr int length(int rank) const { return begin[rank + 1] - begin[rank]; }
  constexpr action at(int rank, int position) const { return actions[begin[rank] + position]; }
  constexpr int rank_of_stage(int stage) const { return rank_of[stage]; }
  /// Which of its rank's stages this is, counted from the input side.
  constexpr int chunk_of(int stage) const {
    int chunk = 0;
    for (int s = 0; s < stage; ++s) chunk += rank_of[s] == rank_of[stage] ? 1 : 0;
    return chunk;
  }
};

/// A plan that owns its memory: what every generator returns.
struct plan {
  shape size{};
  int stages = 0;
  bool forward_only = false;
  int in_flight_limit = 0;
  buffer<action> actions;
  buffer<int> begin;
  buffer<std::int16_t> rank_of;
  plan_name name;
  finding problem{};
  std::int64_t message_limit = 0;
  std::int64_t byte_limit = 0;
  buffer<std::int64_t> stage_bytes;

  constexpr plan_view view() const& {
    return {size,         stages,          forward_only, in_flight_limit, actions.data, begin.data,
            rank_of.data, name.characters, problem,      message_limit,   byte_limit,   stage_bytes.data};
  }
  constexpr plan_view view() const&& = delete;  // it would point to what is gone: keep the plan
  constexpr operator plan_view() const { return view(); }
};

/// A plan whose size is part of its type, so that it can be an `inline constexpr` object: what `checked<>` gives.
template <int Ranks, int Stages, int Actions>
struct static_plan {
  shape size{};
  int stages = Stages;
  bool forward_only = false;
  int in_flight_limit = 0;
  action actions[array_size(Actions)];
  int begin[array_size(Ranks + 1)];
  std::int16_t rank_of[array_size(Stages)];
  plan_name name;
  finding problem{};
  std::int64_t message_limit = 0;
  std::int64_t byte_limit = 0;
  std::int64_t stage_bytes[array_size(Stages)]{};

  constexpr plan_view view() const& {
    return {size,    stages,          forward_only, in_flight_limit, actions,    begin,
            rank_of, name.characters, problem,      message_limit,   byte_limit, stage_bytes};
  }
  constexpr plan_view view() const&& = delete;  // it would point to what is gone: keep the plan
  constexpr operator plan_view() const { return view(); }
};

namespace detail {

/// All of a plan but its arrays and the number of its stages, which is a constant of some.
template <class Plan>
constexpr void copy_facts(plan_view const& from, Plan& to) {
  to.size = from.size;
  to.forward_only = from.forward_only;
  to.in_flight_limit = from.in_flight_limit;
  to.name = from.name;
  to.problem = from.problem;
  to.message_limit = from.message_limit;
  to.byte_limit = from.byte_limit;
}

}  // namespace detail

/// A plan of its own memory, like this one.
constexpr plan copy_of(plan_view const& from) {
  plan to;
  detail::copy_facts(from, to);
  to.stages = from.stages;
  to.actions = buffer<action>(from.total());
  to.begin = buffer<int>(from.size.ranks + 1);
  to.rank_of = buffer<std::int16_t>(from.stages);
  for (int i = 0; i < from.total(); ++i) to.actions.data[i] = from.actions[i];
  for (int r = 0; r <= from.size.ranks; ++r) to.begin.data[r] = from.begin[r];
  for (int s = 0; s < from.stages; ++s) to.rank_of.data[s] = from.rank_of[s];
  if (from.byte_limit > 0) to.stage_bytes = buffer<std::int64_t>(from.stages);
  for (int s = 0; s < to.stage_bytes.count; ++s) to.stage_bytes.data[s] = from.stage_bytes[s];
  return to;
}

/// Copies a plan that fits into one of fixed size.
template <int Ranks, int Stages, int Actions>
constexpr static_plan<Ranks, Stages, Actions> freeze(plan_view from) {
  static_plan<Ranks, Stages, Actions> to;
  detail::copy_facts(from, to);
  for (int s = 0; s < Stages && from.byte_limit > 0; ++s) to.stage_bytes[s] = from.stage_bytes[s];
  action const* source = from.actions;
  int const total = from.begin[Ranks];
  action* const target = to.actions;
  for (int i = 0; i < total; ++i) target[i] = source[i];
  for (int i = total; i < (Actions > 0 ? Actions : 1); ++i) target[i] = action{};
  for (int r = 0; r <= Ranks; ++r) to.begin[r] = from.begin[r];
  for (int s = 0; s < Stages; ++s) to.rank_of[s] = from.rank_of[s];
  if (Stages == 0) to.rank_of[0] = 0;
  return to;
}

}  // namespace chevron
