#pragma once

#include <exception>

#include <chevron/plan/forward_part.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/raise.hpp>
#include <chevron/prove/check.hpp>

/// \file
/// Defines `proved_plan`, the type of plans that are known to break no law.

namespace chevron {

/// The exception that `prove` throws for the first law that a plan breaks. Its text is `describe`'s sentence. Not derived from
/// `chevron::error`, since no run has begun; `run_main` returns exit code 1 for it.
class invalid_schedule_error : public std::exception {
 public:
  /// \param broken the finding \param name the name of a schedule that could not be expanded; empty: none
  explicit invalid_schedule_error(finding const& broken, std::string_view name = {}) : found_(broken) {
    if (!name.empty()) said_.append('`').append(name).append("`: ");
    said_.append(describe(broken).view());
  }
  /// The sentence: rank, step and the fault; of a schedule that could not be expanded, its name and the reason.
  char const* what() const noexcept override { return said_.characters; }
  /// The finding: the broken law, the place and the reason.
  finding const& found() const { return found_; }

 private:
  finding found_;
  text said_;
};

namespace detail {
template <auto const& Source, shape Size>
struct gate;
}

class proved_program;

/// A plan that passed `check`. Only `prove` (at run time) and `checked<>` (while compiling) create such objects. The result of
/// `prove` owns its plan; `checked<>` refers to a constant. All may be stored by value and copied.
class proved_plan {
 public:
  /// The plan, valid as long as this object lives. Deleted for temporaries, whose view would dangle.
  constexpr plan_view view() const& { return owned_.begin.count > 0 ? owned_.view() : constant_; }
  constexpr plan_view view() const&& = delete;
  constexpr operator plan_view() const& { return view(); }
  constexpr operator plan_view() const&& = delete;

 private:
  friend constexpr proved_plan prove(plan source);
  friend constexpr proved_program lower(proved_plan source);
  template <auto const& Source, shape Size>
  friend struct detail::gate;

  constexpr explicit proved_plan(plan source) : owned_(static_cast<plan&&>(source)) {}
  constexpr explicit proved_plan(plan_view constant) : constant_(constant) {}

  plan owned_;            // empty if the object refers to a constant
  plan_view constant_{};  // empty if the plan is owned
};

/// Returns a plan of a proved plan's forwards, which must be proved again: `prove(forward_part(plan))`.
/// \param micro_batches number of microbatches; if larger than the plan's number, all
constexpr plan forward_part(proved_plan const& of, int micro_batches = max_micro_batches) {
  return forward_part(of.view(), micro_batches);
}

/// Proves a plan, in time and memory linear in the number of actions.
/// \param source `catalogue::make_plan(name, shape)`, `expand(schedule, shape)`, a plan read from a file; moved in, not copied
/// \throws invalid_schedule_error if the plan breaks a law; compiled without exceptions, prints the sentence and aborts
constexpr proved_plan prove(plan source) {
  if (finding const f = check(source.view()))
    detail::raise(invalid_schedule_error(f, source.problem ? std::string_view(source.name) : ""));
  return proved_plan(static_cast<plan&&>(source));
}

}  // namespace chevron
