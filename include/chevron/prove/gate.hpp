#pragma once

#include <concepts>

#include <chevron/plan/text.hpp>
#include <chevron/prove/check.hpp>

/// \file
/// The gate: `checked<schedule, shape>` compiles only if every law holds.

namespace chevron {

/// What the compiler names when a law is broken. The sentence is there for people; law, rank and step as plain arguments
/// too, since some compilers print text as numbers.
template <law Broken, int Rank, int Step, fixed_string Sentence>
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

// What the gate asks of a schedule. Descriptions answer in describe/, a function answers here.
template <plan_function Source>
constexpr plan expand(Source const& make, shape size) {
  return make(size);
}
template <plan_function Source>
constexpr int actions_at_most(Source const& make, shape size) {
  plan const p = make(size);
  return p.problem ? 0 : p.view().total();
}
template <plan_function Source>
constexpr int stages_of(Source const& make, shape size) {
  return make(size).stages;
}

namespace detail {

constexpr int at_least_none(int count) { return count > 0 ? count : 0; }

/// Runs once per schedule and shape: works the plan out, proves it, keeps it.
template <auto const& Source, shape Size>
struct gate {
  static constexpr int ranks = at_least_none(Size.ranks);
  static constexpr int stages = at_least_none(stages_of(Source, Size));
  static constexpr int actions = at_least_none(actions_at_most(Source, Size));
  using plan_type = static_plan<ranks, stages, actions>;

  static constexpr plan_type work_out() {
    if constexpr (requires(plan_type & to) { expand(Source, Size, to); }) {
      plan_type made;
      expand(Source, Size, made);
      return made;
    } else {
      plan const made = expand(Source, Size);
      if (!made.problem) return freeze<ranks, stages, actions>(made);
      plan_type nothing{};
      nothing.problem = made.problem;
      return nothing;
    }
  }

  static constexpr plan_type result = work_out();

  /// `check`, with its memory in arrays of known size. A lawful plan has at least as many actions as states.
  static constexpr finding prove() {
    plan_view const plan = result.view();
    if (plan.problem) return plan.problem;
    if (finding const f = check_placement(plan)) return f;
    if (stages * plan.size.micro_batches > actions) return diagnose(plan);
    std::uint8_t state[actions > 0 ? actions : 1]{};
    int next[ranks + 1], ready[ranks + 1];
    return plays_through(result, state, next, ready) ? check_limits(plan) : diagnose(plan);
  }
  static constexpr finding found = prove();
  static constexpr text said = describe(found);
  static constexpr fixed_string<found.broken == law::none ? 0 : said.length> sentence() {
    fixed_string<found.broken == law::none ? 0 : said.length> s;
    if (found.broken != law::none) {
      for (int i = 0; i < said.length; ++i) s.characters[i] = said.characters[i];
    }
    return s;
  }
  static constexpr bool holds = invalid_schedule<found.broken, found.rank, found.position, sentence()>::holds;

  /// The plan, once `holds` has been asked for.
  static constexpr plan_type const& passed() {
    static_assert(holds || !holds);
    return result;
  }
};

}  // namespace detail

/// A proved plan, as a constant. `Source` is a description (or a constexpr function `plan(shape)`) with static storage,
/// passed by reference so that it does not enter symbol names.
///
/// ```cpp
/// constexpr auto const& plan = chevron::checked<chevron::catalogue::zb_v, chevron::shape{.ranks = 4, .micro_batches = 8}>;
/// static_assert(peak_in_flight(plan, 0) == 8);
/// ```
template <auto const& Source, shape Size>
inline constexpr auto const& checked = detail::gate<Source, Size>::passed();

}  // namespace chevron
