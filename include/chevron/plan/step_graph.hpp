#pragma once

#include <chevron/plan/plan.hpp>

/// \file
/// The dependencies of actions: which result an action needs, which stage computes the result, and which boundary between ranks
/// the result crosses. These rules and the order of a stage's actions for one microbatch follow from the rows of kinds.hpp. The
/// loops of the proof (prove/walk.hpp) and of the timeline (prove/timeline.hpp) contain the rules a second time, since such
/// loops compile faster; tests/unit/plan/step_graph_test.cpp compares the loops with the graph.

namespace chevron {

/// The dependency graph of a step's actions, independent of the order in which ranks run them. A *cell* is the number of a pair
/// (stage, unit). A *result* is the number of a tensor that a stage computes for a neighbouring stage: for cell c, the output
/// is result c, the input gradient result `cells() + c`.
class step_graph {
 public:
  static constexpr int none = -1;

  constexpr explicit step_graph(plan_view const& plan)
      : step_graph(plan.rank_of, plan.stages, plan.size.units(), plan.size.slices) {}
  /// \param units number of microbatches or, if sequences are sliced, of slices of all microbatches
  constexpr step_graph(std::int16_t const* rank_of, int stages, int units, int slices = 1)
      : rank_of_(rank_of), stages_(stages), units_(units), slices_(slices) {}

  constexpr int cells() const { return stages_ * units_; }
  constexpr int results() const { return 2 * cells(); }
  constexpr int cell_of(int stage, int unit) const { return stage * units_ + unit; }
  constexpr int cell_of(action a) const { return cell_of(static_cast<int>(a.stage), static_cast<int>(a.micro_batch)); }

  /// The stage whose result an action needs, or `none`. For a receive, the stage that sends.
  constexpr int from(action a) const { return beside(a, row_of(a.kind).from); }
  /// The stage that needs an action's result, or `none`. For a send and its wait, the stage that receives.
  constexpr int to(action a) const { return beside(a, row_of(a.kind).to); }
  /// For a send, a receive or a wait: the stage on the other rank, or `none`.
  constexpr int other_end(action message) const { return beside(message, row_of(message.kind).from + row_of(message.kind).to); }

  /// The result that an action computes, even if no stage needs it; or `none`.
  constexpr int makes(action a) const {
    int const to = row_of(a.kind).to;
    return to == 0 ? none : to > 0 ? cell_of(a) : cells() + cell_of(a);
  }
  /// The result of another stage that an action needs, or `none`.
  constexpr int needs(action a) const {
    int const stage = from(a);
    if (stage == none) return none;
    int const cell = cell_of(stage, static_cast<int>(a.micro_batch));
    return row_of(a.kind).from < 0 ? cell : cells() + cell;
  }
  /// The result of an action's own cell that must exist before the action runs, or `none`: for B, I and R the F's, for W the
  /// I's.
  constexpr int needs_of_cell(action a) const {
    int const after = row_of(a.kind).after;
    if (after == 0) return none;
    return (after & kind_bit(kind::forward)) != 0 ? cell_of(a) : cells() + cell_of(a);
  }
  /// The unit whose carry (tensors passed from slice to slice) an action needs on its own stage, or `none`: for F the previous
  /// slice, for B and I the next slice.
  constexpr int carries_from(action a) const {
    int const unit = static_cast<int>(a.micro_batch);
    int const slice = unit % slices_ + row_of(a.kind).carry;
    return row_of(a.kind).carry == 0 || slice < 0 || slice >= slices_ ? none : unit + row_of(a.kind).carry;
  }

  /// Numbers the F's, B's, I's and W's: the number of an action's result; for a W, `results()` + its cell. Not for R and own
  /// kinds.
  constexpr int number_of(action a) const {
    int const result = makes(a);
    return result == none ? results() + cell_of(a) : result;
  }
  /// The number of the action on which an action depends directly: the action of another stage whose result is needed; without
  /// such a result, the previous action of the action's own cell (for W and R, and for the last stage's B or I); or `none`.
  constexpr int source_of(action a) const {
    int const result = needs(a);
    return result != none ? result : needs_of_cell(a);
  }

  /// The boundary over which an action's result goes to another rank (s: between the stages s and s + 1), or `none`.
  constexpr int crosses(action a) const { return boundary(a, to(a)); }
  /// The boundary over which an action's input comes from another rank, or `none`.
  constexpr int comes_over(action a) const { return boundary(a, from(a)); }

 private:
  constexpr int beside(action a, int way) const {
    int const stage = static_cast<int>(a.stage) + way;
    return way == 0 || stage < 0 || stage >= stages_ ? none : stage;
  }
  constexpr int boundary(action a, int other) const {
    int const stage = static_cast<int>(a.stage);
    if (other == none || rank_of_[other] == rank_of_[stage]) return none;
    return other < stage ? other : stage;
  }

  std::int16_t const* rank_of_;
  int stages_, units_, slices_;
};

}  // namespace chevron
