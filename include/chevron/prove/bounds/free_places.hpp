#pragma once

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// A part of `bounds`: the time for which a rank's memory must be partly unused, in any order of the actions.

namespace chevron::detail {

/// The least time for which a rank's places are not used. A place is memory for one chunk, used from the start of the chunk's F
/// to the end of its W. At any time u places are free, and p chunks wait between their I and their W. Only the rank's own
/// actions change the whole numbers u and p:
///   - the end of a W adds 1 to u, the start of an F subtracts 1;
///   - the end of an I adds 1 to p, the start of a W subtracts 1;
///   - so an I adds 1 to u + p, an F subtracts 1, and a W leaves u + p unchanged.
/// At the end of a step u and p have the values of the step's start. While an action runs, its own chunk counts as neither free
/// nor waiting. So for every j, as many I's as F's run while u + p = j, as many W's as I's while p = j, and as many W's as F's
/// while u = j. Hence each deviation from I, W, F, I, W, F ... costs a whole round: for each F that runs while a place is free,
/// an I runs while a place is free or a chunk waits, and a W runs while a place is free.
struct free_places {
  double forward = 0, input = 0, weight = 0;  ///< the shortest F, I and W of the rank
  int turns = 0;                              ///< pairs of neighbouring stages that are both on the rank

  /// \param costs costs with the least factors of any microbatch
  constexpr free_places(plan_view const& plan, cost_view const& costs, int rank) {
    bool first = true;
    for (int s = 0; s < plan.stages; ++s) {
      if (plan.rank_of[s] != rank) continue;
      auto const lower = [&](double& least, double takes) { least = first || takes < least ? takes : least; };
      lower(forward, costs.of(kind::forward, s));
      lower(input, costs.of_input(s));
      lower(weight, costs.of(kind::backward_weight, s));
      turns += s + 1 < plan.stages && plan.rank_of[s + 1] == rank ? 1 : 0;
      first = false;
    }
  }

  /// The least sum, over places, of the time in a step for which a place is free or its chunk waits: for its W or, at a turn,
  /// for the F or I of the neighbouring stage.
  ///
  /// At the step's start the i-th F leaves places - i free, of which a turn may already count one. At each turn a microbatch
  /// loses
  ///   - on its way forwards I + W: if no place is free while the first F runs, the second F waits for a W and, if no chunk
  ///     waits for its W either, for an I, too. A free place or a waiting chunk costs a round instead, of which I and the W
  ///     that changes u count here;
  ///   - on its way back F + W: if no chunk waits for its W while the second I runs, a W ran before the I and, if no place is
  ///     free either, an F, too. A free place costs a round instead, of which F counts here; a waiting chunk costs a round, of
  ///     which F and the W that changes p count here.
  /// \param places number of chunks that the rank may have in flight, fewer than a step has
  constexpr double lost(int places, int micro_batches) const {
    return micro_batches * turns * (forward + input + 2 * weight) + (forward + input + weight) * rounds(places);
  }
  /// The least sum of the times for which chunks wait for their W before the end of the last I, if `places` W's, the largest
  /// possible number, run after this end. (If fewer W's run after it, chunks wait less. But each further W adds less than
  /// `places` times the shortest W to the sum, and moves `places` times its own length behind the end. So a bound must assume
  /// `places` W's.)
  constexpr double lost_to_last_weights(int places) const { return weight * rounds(places); }

 private:
  /// 0 + 1 + ... + (places - 1); with turns, every term above 0 is 1 less, since a turn already counts one free place.
  constexpr double rounds(int places) const { return .5 * (places - 1) * (turns > 0 ? places - 2 : places); }
};

}  // namespace chevron::detail
