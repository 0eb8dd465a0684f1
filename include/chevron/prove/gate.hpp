#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>

#include <chevron/plan/text.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/proved_plan.hpp>

/// \file
/// Defines `checked<schedule, shape>`, which compiles only if the schedule's plan breaks no law.

namespace chevron {

/// The type whose name the compiler prints when a law is broken. Its arguments are law, rank, step and the sentence, divided
/// into pieces if the compiler would cut it short. Law, rank and step are separate arguments, since some compilers print the
/// sentence's characters as numbers.
template <law Broken, int Rank, int Step, fixed_string... Sentence>
struct invalid_schedule {
  static_assert(Broken == law::none,
                "this schedule breaks a law: invalid_schedule<law, rank, step, sentence> above says which, where and why");
  static constexpr bool holds = Broken == law::none;
};

/// A schedule as a constexpr function: `plan mine(shape)`.
template <class Source>
concept plan_function = requires(Source const& make, shape size) {
  { make(size) } -> std::same_as<plan>;
};

// `checked` calls the next three functions with a schedule. These overloads are for constexpr functions; describe/ has
// overloads for descriptions.
/// Returns the plan of a function at this size.
template <plan_function Source>
constexpr plan expand(Source const& make, shape size) {
  return make(size);
}
/// The number of actions of a function's plan at this size; 0 where the plan has a problem.
template <plan_function Source>
constexpr int actions_at_most(Source const& make, shape size) {
  plan const p = make(size);
  return p.problem ? 0 : p.view().total();
}
/// The number of stages of a function's plan at this size.
template <plan_function Source>
constexpr int stages_of(Source const& make, shape size) {
  return make(size).stages;
}

/// A schedule: anything that `expand` turns into a plan at a shape.
template <class Source>
concept plan_source = requires(Source const& source, shape size) {
  expand(source, size);
};

/// Refuses a schedule without a shape: does not compile, and the error says how to prove a schedule.
/// \returns nothing, since it never compiles
template <plan_source Source>
constexpr proved_plan prove(Source const&) {
  static_assert(!plan_source<Source>,
                "a schedule is proved at a shape: prove(expand(schedule, shape{.ranks = 4, .micro_batches = 8})), or while "
                "compiling checked<schedule, shape{.ranks = 4, .micro_batches = 8}>");
  return prove(plan());
}
/// Refuses a schedule without a shape: does not compile, and the error says how to check a schedule.
/// \returns nothing, since it never compiles
template <plan_source Source>
constexpr finding check(Source const&) {
  static_assert(!plan_source<Source>,
                "a schedule is checked at a shape: check(expand(schedule, shape{.ranks = 4, .micro_batches = 8}))");
  return {};
}

namespace detail {

constexpr int at_least_none(int count) { return count > 0 ? count : 0; }

/// The largest number of the sentence's characters in one template argument: for clang as many as it prints, otherwise all.
#ifdef __clang__
inline constexpr int longest_piece = 32;
#else
inline constexpr int longest_piece = text::capacity;
#endif

/// The end of the piece that begins at `first`: after the last space within the allowed length, if the piece has a space.
constexpr int piece_end(text const& said, int first) {
  int const reach = first + longest_piece;
  if (reach >= said.length) return said.length;
  for (int end = reach; end > first; --end) {
    if (said.characters[end - 1] == ' ') return end;
  }
  return reach;
}

template <int Length>
constexpr fixed_string<static_cast<std::size_t>(Length)> piece_of(text const& said, int first) {
  fixed_string<static_cast<std::size_t>(Length)> piece;
  for (int i = 0; i < Length; ++i) piece.characters[i] = said.characters[first + i];
  piece.characters[Length] = 0;  // clang prints numbers unless each character was written
  return piece;
}

/// Makes, proves and stores the plan of a schedule at a shape, once for each pair of schedule and shape.
template <auto const& Source, shape Size>
struct gate {
  static constexpr int ranks = at_least_none(Size.ranks);
  static constexpr int stages = at_least_none(stages_of(Source, Size));
  static constexpr int actions = at_least_none(actions_at_most(Source, Size));
  using plan_type = static_plan<ranks, stages, actions>;

  // `size` is a parameter, since clang would evaluate `made` twice if its initialiser used only constants.
  static constexpr plan_type work_out(shape size) {
    if constexpr (requires(plan_type & to) { expand(Source, size, to); }) {
      plan_type made;
      expand(Source, size, made);
      return made;
    } else {
      plan const made = expand(Source, size);
      if (!made.problem) return freeze<ranks, stages, actions>(made);
      plan_type nothing{};
      nothing.problem = made.problem;
      return nothing;
    }
  }

  static constexpr plan_type result = work_out(Size);

  /// Does the work of `check` with arrays of fixed size. `actions` elements are enough for the states, since a lawful plan has
  /// at least one action for each state.
  static constexpr finding prove() {
    return proof_of(result.view(), [] {
      if (stages * result.size.units() > actions) return false;
      std::uint8_t state[array_size(actions)]{};
      int next[array_size(ranks + 1)], after[array_size(ranks + 1)];
      return plays_through<true>(result, state, next, after);
    });
  }
  static constexpr finding found = prove();
  static constexpr text said = describe(found);

  // Names the verdict's type without using its value, so that the compiler reports an error about the verdict only.
  template <int First, fixed_string... Before>
  static constexpr auto verdict_from() {
    if constexpr (found.broken == law::none || First == said.length) {
      return static_cast<invalid_schedule<found.broken, found.rank, found.position, Before...>*>(nullptr);
    } else {
      constexpr int end = piece_end(said, First);
      return verdict_from<end, Before..., piece_of<end - First>(said, First)>();
    }
  }
  using verdict = std::remove_pointer_t<decltype(verdict_from<0>())>;
  static constexpr bool holds = verdict::holds;

  /// Returns the proved plan. Evaluates `holds` first, so that a broken law is a compile error.
  static constexpr proved_plan passed() {
    static_assert(holds || !holds);
    return proved_plan(result.view());
  }
};

template <auto const& Source, shape Size>
constexpr proved_plan through_the_gate() {
  if constexpr (requires { expand(Source, Size); }) {
    return gate<Source, Size>::passed();
  } else {
    static_assert(
        requires { expand(Source, Size); },
        "checked takes a schedule: a description, a list schedule, a building block, from_csv, or a constexpr function "
        "plan(shape)");
    return prove(plan());
  }
}

}  // namespace detail

/// A proved plan, as a constant: a handle that may be copied. `Source` is a description (or a constexpr function `plan(shape)`)
/// with static storage, passed by reference so that symbol names do not contain it.
///
/// ```cpp
/// constexpr auto plan = chevron::checked<chevron::catalogue::zb_v, chevron::shape{.ranks = 4, .micro_batches = 8}>;
/// static_assert(peak_in_flight(plan, 0) == 8);
/// ```
template <auto const& Source, shape Size>
inline constexpr proved_plan checked = detail::through_the_gate<Source, Size>();

}  // namespace chevron
