// The forwards of all forms of a training schedule, as constants: a plan, a checked plan, a program, a lowered one.
#include <chevron/schedule.hpp>

#include <string_view>

namespace {

using namespace chevron;

constexpr shape size{.ranks = 3, .micro_batches = 5};
constexpr auto proved = checked<catalogue::dual_pipe_v, size>;
constexpr auto program_of_it = lowered<catalogue::dual_pipe_v, size>;

/// Lawful, on the same ranks, and nothing but the forwards of the first `micro_batches`.
constexpr bool right(plan const& made, int micro_batches) {
  if (check(made) || !made.forward_only || made.stages != proved.view().stages || made.size.micro_batches != micro_batches) return false;
  owned_program const lowered_again = lower(prove(made)).copy();
  if (check(lowered_again.view()) || std::string_view(made.name) != "DualPipeV") return false;
  for (int s = 0; s < proved.view().stages; ++s) {
    if (made.rank_of.data[s] != proved.view().rank_of[s]) return false;
  }
  return made.view().total() == proved.view().stages * micro_batches;
}

static_assert(right(forward_part(expand(catalogue::dual_pipe_v, size)), 5));
static_assert(right(forward_part(proved), 5));
static_assert(right(forward_part(proved.view(), 2), 2));
static_assert(right(forward_part(program_of_it), 5));
static_assert(right(forward_part(program_of_it.view(), 1), 1));
static_assert(right(forward_part(lower(prove(expand(catalogue::dual_pipe_v, size))), 3), 3));

// A schedule that evaluates, to be checked and lowered by name.
constexpr plan forwards(shape of) { return forward_part(expand(catalogue::zb_v, of)); }
static_assert(lowered<forwards, size>.view().plan.forward_only);

// A plan that could not be expanded keeps its problem.
static_assert(check(forward_part(expand(catalogue::one_f_one_b, {.ranks = 2, .micro_batches = 2, .chunks = 3}))).broken ==
              law::shape);

}  // namespace
