#pragma once

#include <chevron/plan/plan.hpp>

/// \file
/// Which result an action needs, from which stage, and which boundary between ranks that result crosses. The rules come from the
/// rows of kinds.hpp, and so does the order of a stage's actions for one microbatch. The proof's loop (prove/walk.hpp) and the
/// timeline (prove/timeline.hpp) repeat the rules by hand, since that compiles faster; tests/unit/plan/step_graph_test.cpp
/// compares both with the graph.

namespace chevron {

/// The actions of a step as a graph, without their order. A *cell* is the number of a (stage, unit). A *result* is the number of
/// a tensor that one stage computes for its neighbour: for cell c, c is the output and `cells() + c` the input gradient.
class step_graph {
 public:
  static constexpr int none = -1;

  constexpr explicit step_graph(plan_view const& plan)
      : step_graph(plan.rank_of, plan.stages, plan.size.units(), plan.size.slices) {}
  /// \param micro_batches number of microbatches; of units, if sequences are sliced
  constexpr step_graph(std::int16_t const* rank_of, int stages, int micro_batches, int slices = 1)
      : rank_of_(rank_of), stages_(stages), micro_batches_(micro_batches), slices_(slices) {}

  constexpr int cells() const { return stages_ * micro_batches_; }
  constexpr int results() const { return 2 * cells(); }
  constexpr int cell_of(int stage, int micro_batch) const { return stage * micro_batches_ + micro_batch; }
  constexpr int cell_of(action a) const { return cell_of(static_cast<int>(a.stage), static_cast<int>(a.micro_batch)); }

  /// The stage whose result an action takes, or `none`. For a receive, the stage that sends.
  constexpr int from(action a) const { return beside(a, row_of(a.kind).from); }
  /// The stage that takes an action's result, or `none`. For a send and its wait, the stage that receives.
  constexpr int to(action a) const { return beside(a, row_of(a.kind).to); }
  /// For a send, a receive or a wait: the stage on the other rank, or `none`.
  constexpr int other_end(action message) const { return beside(message, row_of(message.kind).from + row_of(message.kind).to); }

  /// The result that an action computes, even if no stage takes it; or `none`.
  constexpr int makes(action a) const {
    int const to = row_of(a.kind).to;
    return to == 0 ? none : to > 0 ? cell_of(a) : cells() + cell_of(a);
  }
  /// The other stage's result that an action needs, or `none`.
  constexpr int needs(action a) const {
    int const stage = from(a);
    if (stage == none) return none;
    int const cell = cell_of(stage, static_cast<int>(a.micro_batch));
    return row_of(a.kind).from < 0 ? cell : cells() + cell;
  }
  /// The result of its own cell that an action must come after, or `none`: for B and I the F's, for W the I's.
  constexpr int needs_of_cell(action a) const {
    int const after = row_of(a.kind).after;
    if (after == 0) return none;
    return (after & kind_bit(kind::forward)) != 0 ? cell_of(a) : cells() + cell_of(a);
  }
  /// The unit whose carry (tensors passed from slice to slice) an action takes on its own stage, or `none`: for F the slice
  /// before, for B and I the slice after.
  constexpr int carries_from(action a) const {
    int const unit = static_cast<int>(a.micro_batch);
    int const slice = unit % slices_ + row_of(a.kind).carry;
    return row_of(a.kind).carry == 0 || slice < 0 || slice >= slices_ ? none : unit + row_of(a.kind).carry;
  }

  /// The number of an F, B, I or W: the number of its result; for a W, `results()` + its cell. R and own kinds have none.
  constexpr int number_of(action a) const {
    int const result = makes(a);
    return result == none ? results() + cell_of(a) : result;
  }
  /// The number of the action that must run last before this action can run: the action of another stage whose result it takes;
  /// for a W, and at the ends of the pipeline, the action before it in its cell; or `none`.
  constexpr int source_of(action a) const {
    int const result = needs(a);
    if (result != none || row_of(a.kind).after == 0) return result;
    return (row_of(a.kind).after & kind_bit(kind::forward)) != 0 ? cell_of(a) : cells() + cell_of(a);
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
  int stages_, micro_batches_, slices_;
};

}  // namespace chevron
