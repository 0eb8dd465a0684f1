#pragma once

#include <cstdint>

#include <chevron/plan/action.hpp>
#include <chevron/plan/buffer.hpp>
#include <chevron/plan/channels.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/plan/shape.hpp>

/// \file
/// A plan: for each rank, its compute actions in order. Every description expands to a plan; proof, search, pictures and
/// lowering read plans.

namespace chevron {

/// A plan's name, stored in the plan; a name longer than `capacity` characters is cut off.
struct plan_name {
  static constexpr int capacity = 63;
  char characters[capacity + 1]{};

  constexpr plan_name() = default;
  constexpr plan_name(char const* from) {  // NOLINT: a literal is a name
    for (int i = 0; i < capacity && from[i] != 0; ++i) characters[i] = from[i];
  }
  constexpr operator char const*() const { return characters; }
};

/// The data of a plan except its lists: of actions, of stages' ranks and of stages' bytes.
struct plan_facts {
  shape size{};                    ///< ranks and microbatches; `chunks` is the largest number of stages on a rank
  int stages = 0;                  ///< number of stages
  bool forward_only = false;       ///< evaluation: only F, no gradients
  int in_flight_limit = 0;         ///< declared limit of chunks in flight on any rank; 0: none
  finding problem{};               ///< why the description could not be expanded, if it could not
  std::int64_t message_limit = 0;  ///< declared limit of messages a step sends; 0: none
  std::int64_t byte_limit = 0;     ///< declared limit of bytes in flight on any rank; 0: none
  own_kind own[own_kinds]{};       ///< for X, Y and Z: before and after which kinds they run
  /// With the messages of a file (`csv_source::over`): the channels for which they are proved. `lower` makes messages of its own,
  /// for Chevron's transports.
  channel_rules channels{};
};

/// A plan as functions read it: pointers into a `plan` or a `static_plan`, which must outlive the view. Checks, costs and
/// pictures read views, so that one implementation works while compiling and at run time.
struct plan_view : plan_facts {
  action const* actions = nullptr;            ///< all ranks' actions, rank after rank
  int const* begin = nullptr;                 ///< rank r has actions [begin[r], begin[r + 1])
  std::int16_t const* rank_of = nullptr;      ///< stage -> rank
  std::int64_t const* stage_bytes = nullptr;  ///< with a byte limit: by stage, bytes of one microbatch in flight
  std::int64_t const* input_bytes = nullptr;  ///< the part of `stage_bytes` that is stored from F to R, if the plan has R
  char const* name = "";                      ///< the schedule's name, such as a name in the catalogue; empty: none

  constexpr int total() const { return begin[size.ranks]; }
  constexpr int length(int rank) const { return begin[rank + 1] - begin[rank]; }
  constexpr action at(int rank, int position) const { return actions[begin[rank] + position]; }
  /// Whether the plan declares X, Y or Z.
  constexpr bool has_own_kinds() const { return own[0].declared || own[1].declared || own[2].declared; }
  /// Whether the plan has an action of this kind.
  constexpr bool holds(kind what) const {
    for (int i = 0; i < total(); ++i) {
      if (actions[i].kind == what) return true;
    }
    return false;
  }
  constexpr int rank_of_stage(int stage) const { return rank_of[stage]; }
  /// The index of a stage among its rank's stages, counted from the input side.
  constexpr int chunk_of(int stage) const {
    int chunk = 0;
    for (int s = 0; s < stage; ++s) chunk += rank_of[s] == rank_of[stage] ? 1 : 0;
    return chunk;
  }
};

namespace detail {

template <class Element>
constexpr Element const* data_of(buffer<Element> const& list) {
  return list.data;
}
template <class Element>
constexpr Element const* data_of(Element const* list) {
  return list;
}

/// The lists of a plan whose size is known at run time only.
struct plan_lists {
  buffer<action> actions;
  buffer<int> begin;
  buffer<std::int16_t> rank_of;
  buffer<std::int64_t> stage_bytes, input_bytes;
};

/// The lists of a plan as arrays, whose sizes the compiler knows.
template <int Ranks, int Stages, int Actions>
struct fixed_plan_lists {
  action actions[array_size(Actions)];
  int begin[array_size(Ranks + 1)];
  std::int16_t rank_of[array_size(Stages)];
  std::int64_t stage_bytes[array_size(Stages)]{}, input_bytes[array_size(Stages)]{};
};

}  // namespace detail

/// A plan that owns its lists.
template <class Lists>
struct basic_plan : plan_facts, Lists {
  plan_name name;

  constexpr plan_view view() const& {
    return {*this,
            detail::data_of(this->actions),
            detail::data_of(this->begin),
            detail::data_of(this->rank_of),
            detail::data_of(this->stage_bytes),
            detail::data_of(this->input_bytes),
            name.characters};
  }
  constexpr plan_view view() const&& = delete;  // deleted, since the view of a temporary would dangle: store the plan first
  constexpr operator plan_view() const { return view(); }
};

/// A plan whose lists are allocated: the type that `expand`, searches and readers of files return.
struct plan : basic_plan<detail::plan_lists> {};

/// A plan whose size is part of its type, so that it can be an `inline constexpr` object, as `checked<>` needs.
template <int Ranks, int Stages, int Actions>
using static_plan = basic_plan<detail::fixed_plan_lists<Ranks, Stages, Actions>>;

namespace detail {

/// Copies a plan's facts and its stages' ranks and bytes, but no actions.
constexpr plan without_lists(plan_view const& from) {
  plan to;
  static_cast<plan_facts&>(to) = from;
  to.name = from.name;
  to.rank_of = {from.rank_of, from.stages};
  if (from.byte_limit <= 0) return to;
  to.stage_bytes = {from.stage_bytes, from.stages};
  to.input_bytes = {from.input_bytes, from.stages};
  return to;
}

/// Makes a plan with the facts and stages of `from`, and with actions from `write`.
/// \param most upper bound of the number of actions in all lists
/// \param write write(rank, put): calls put(action) for each action of a rank, in order
template <class Write>
constexpr plan with_lists(plan_view const& from, int most, Write const& write) {
  plan to = without_lists(from);
  to.actions = buffer<action>(most);
  to.begin = buffer<int>(from.size.ranks + 1);
  int filled = 0;
  auto const put = [&](action a) { to.actions.data[filled++] = a; };
  for (int r = 0; r < from.size.ranks; ++r) {
    to.begin.data[r] = filled;
    write(r, put);
  }
  to.begin.data[from.size.ranks] = to.actions.count = filled;
  return to;
}

/// The largest number of stages on one rank. Counted, since a user's placement may give ranks unequal numbers of stages.
constexpr int most_on_a_rank(plan_view const& plan) {
  buffer<int> held(plan.size.ranks, zeroed);
  int most = 0;
  for (int s = 0; s < plan.stages; ++s) {
    int const now = ++held.data[plan.rank_of[s]];
    most = now > most ? now : most;
  }
  return most;
}

}  // namespace detail

/// Copies a plan into memory of its own.
constexpr plan copy_of(plan_view const& from) {
  plan to = detail::without_lists(from);
  to.actions = {from.actions, from.total()};
  to.begin = {from.begin, from.size.ranks + 1};
  return to;
}

/// Copies a plan into a plan of fixed size, into which it must fit.
template <int Ranks, int Stages, int Actions>
constexpr static_plan<Ranks, Stages, Actions> freeze(plan_view from) {
  static_plan<Ranks, Stages, Actions> to;
  static_cast<plan_facts&>(to) = from;
  to.name = from.name;
  for (int s = 0; s < Stages && from.byte_limit > 0; ++s) {
    to.stage_bytes[s] = from.stage_bytes[s];
    to.input_bytes[s] = from.input_bytes[s];
  }
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
