#pragma once

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <tuple>

#include <chevron/describe/token.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Schedules that list every action, in a table with a row for each rank. For schedules as text see `from_csv` in
/// csv/csv_source.hpp.

namespace chevron {

/// A fused pair in a row of a table.
struct action_pair {
  action forward_half;
  action backward_half;
};

/// `overlap(F(0, 7), B(7, 3))`: two actions that run as one.
constexpr action_pair overlap(action forward_half, action backward_half) {
  forward_half.fused = 1;
  return {forward_half, backward_half};
}

/// An item of a table's row: an action, or a fused pair.
template <class Item>
concept table_item = std::same_as<Item, action> || std::same_as<Item, action_pair>;

/// One rank's actions in order.
template <std::size_t Actions>
using table_row = std::array<action, Actions>;

/// A rank's row of a table, of these items in order, each an action or a pair: `row(F(0, 0), F(0, 1), B(0, 0), B(0, 1))`.
template <table_item... Items>
constexpr auto row(Items... items) {
  constexpr std::size_t count = (std::size_t{0} + ... + (std::same_as<Items, action_pair> ? 2 : 1));
  table_row<count> out{};
  std::size_t filled = 0;
  [[maybe_unused]] auto const put = [&](auto item) {
    if constexpr (std::same_as<decltype(item), action>) {
      out[filled++] = item;
    } else {
      out[filled++] = item.forward_half;
      out[filled++] = item.backward_half;
    }
  };
  (put(items), ...);
  return out;
}

namespace detail {

/// Places each stage on the first rank whose list names it, and counts chunks. A stage that no action names is placed on the
/// previous stage's rank, and `check` reports the missing actions.
constexpr void place_by_actions(plan& made) {
  made.rank_of = buffer<std::int16_t>(made.stages, std::int16_t{-1});
  for (int r = 0; r < made.size.ranks; ++r) {
    for (int i = made.begin.data[r]; i < made.begin.data[r + 1]; ++i) {
      std::int16_t& home = made.rank_of.data[made.actions.data[i].stage];
      if (home < 0) home = static_cast<std::int16_t>(r);
    }
  }
  for (int s = 0; s < made.stages; ++s) {
    if (made.rank_of.data[s] < 0) made.rank_of.data[s] = s > 0 ? made.rank_of.data[s - 1] : std::int16_t{0};
  }
  made.size.chunks = most_on_a_rank(made);
}

}  // namespace detail

/// Returns the plan of listed actions, of which rank r has [begin[r], begin[r + 1]). The numbers of stages and of microbatches
/// are the largest indices that occur plus one; a stage is placed on the first rank that names it. Does not check the plan:
/// call `check`.
constexpr plan plan_of_actions(action const* actions, int const* begin, int ranks, char const* name = "") {
  plan made;
  made.size.ranks = ranks;
  made.name = name;
  made.forward_only = true;
  int const total = begin[ranks];
  for (int i = 0; i < total; ++i) {
    action const a = actions[i];
    if (static_cast<int>(a.stage) >= made.stages) made.stages = static_cast<int>(a.stage) + 1;
    if (static_cast<int>(a.micro_batch) >= made.size.micro_batches) made.size.micro_batches = static_cast<int>(a.micro_batch) + 1;
    made.forward_only = made.forward_only && a.kind == kind::forward;
    if (is_own(a.kind)) made.own[own_number(a.kind)].declared = true;
  }
  made.actions = {actions, total};
  made.begin = {begin, ranks + 1};
  detail::place_by_actions(made);
  return made;
}

/// A schedule as a table, for `checked`. Returned by `table`. A finding at `rank r, step k` is about row r, column k, both
/// counted from 0.
template <int Ranks, int Actions>
struct schedule_table {
  action actions[array_size(Actions)]{};
  int begin[array_size(Ranks + 1)]{};
  char const* name = "";

  /// The same table under the name `as`.
  constexpr schedule_table named(char const* as) const {
    schedule_table out = *this;
    out.name = as;
    return out;
  }

  /// The table's plan, for `checked`; `size` must be the table's own.
  constexpr plan operator()(shape size) const {
    plan made = plan_of_actions(actions, begin, Ranks, name);
    auto const differs = [&](char const* words, int has, int asked) {
      made.problem = detail::fault(law::shape, words, has, asked);
    };
    if (size.ranks != Ranks)
      differs("a table has a row for each rank: with this one ranks can be ", Ranks, size.ranks);
    else if (size.slices < 1 || size.units() != made.size.micro_batches)
      differs(size.slices == 1 ? "with this table micro_batches can be " : "with this table micro_batches x slices can be ",
              made.size.micro_batches, size.units());
    else if (size.chunks != 0 && size.chunks != made.size.chunks)
      differs("with this table chunks can be ", made.size.chunks, size.chunks);
    if (made.problem) return made;
    made.size.micro_batches = size.micro_batches;
    made.size.slices = size.slices;
    return made;
  }
  /// The only shape at which the table has a plan, if its actions compute whole microbatches. If they compute slices, use a
  /// shape with fewer microbatches: `shape{.ranks = 2, .micro_batches = 2, .slices = 2}` for units 0 to 3.
  constexpr shape size() const { return plan_of_actions(actions, begin, Ranks, name).size; }
};

/// A schedule written out: a row of actions for each rank, rank 0 first. Rows are `row(…)` or arrays of `action`.
///
/// ```cpp
/// using namespace chevron::letters;
/// inline constexpr auto mine = chevron::table(chevron::row(F(0, 0), F(0, 1), B(0, 0), B(0, 1)),
///                                             chevron::row(F(1, 0), B(1, 0), F(1, 1), B(1, 1)));
/// constexpr auto const& plan = chevron::checked<mine, mine.size()>;
/// ```
template <std::size_t... Actions>
constexpr auto table(std::array<action, Actions> const&... rows) {
  schedule_table<static_cast<int>(sizeof...(Actions)), static_cast<int>((std::size_t{0} + ... + Actions))> out{};
  int filled = 0;
  int r = 0;
  auto const put = [&](auto const& one) {
    for (action const a : one) out.actions[filled++] = a;
    out.begin[++r] = filled;
  };
  (put(rows), ...);
  return out;
}
/// A schedule from rows of equal length.
template <std::size_t Ranks, std::size_t Actions>
constexpr auto table(std::array<std::array<action, Actions>, Ranks> const& rows) {
  return std::apply([](auto const&... each) { return table(each...); }, rows);
}

}  // namespace chevron
