#pragma once

#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Time for which memory places must be unused in any order: a part of `bounds`.

namespace chevron::detail {

/// The least time that a rank's places for chunks are lost. A place is taken from the start of an F to the end of that chunk's
/// W. At any time u places are free, and p chunks only wait for their W. Both are whole numbers, and only the rank's own
/// actions change them:
///   - a W that ends makes u one more, an F that begins one less;
///   - an I that ends makes p one more, a W that begins one less;
///   - so an I makes u + p one more, an F one less, and a W leaves u + p unchanged.
/// At the end of a step u, p and u + p have the values of its beginning. While an action runs, its own chunk counts as neither
/// free nor waiting. So for every j as many I run while u + p = j as F do, as many W while p = j as I, and as many W while u =
/// j as F. Each departure from I, W, F, I, W, F ... costs a whole round: an F that runs while a place is free goes with an I
/// that runs while a place is free or a chunk waits, and with a W that runs while a place is free.
struct free_places {
  double forward = 0, input = 0, weight = 0;  ///< the shortest F, I and W of the rank
  int turns = 0;                              ///< pairs of neighbouring stages that both lie on the rank

  /// \param costs at the least factors of any microbatch
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

  /// The least sum, over a step, of places times the time in which they are free or hold a chunk that waits: for its W, or at a
  /// turn for the F or I of the next stage.
  ///
  /// In the beginning the i-th F leaves places - i free, of which a turn may count one. And at each turn a microbatch loses
  ///   - on its way forwards I + W: with no place free while the first F runs, the second F waits for a W, and with no chunk that
  ///     waits for its W either, for an I, too. A free place, or a waiting chunk, costs a round: its I and the W by u count here;
  ///   - on its way back F + W: with no chunk that waits for its W while the second I runs, a W stood before that I, and with no
  ///     place free either, an F, too. A free place costs a round: its F counts here; a waiting chunk: its F and the W by p.
  /// \param places how many chunks the rank may hold, fewer than a step has
  constexpr double lost(int places, int micro_batches) const {
    return micro_batches * turns * (forward + input + 2 * weight) + (forward + input + weight) * rounds(places);
  }
  /// The least sum of waits of chunks if `places` W, the most that can be, are left to run after the end of the last I: their
  /// chunks wait before that. (If fewer W are left, chunks wait less. But each W more adds less than `places` times the shortest
  /// W to this sum, and lets `places` times its own length run after that end. So a bound has to assume that all are left.)
  constexpr double lost_to_last_weights(int places) const { return weight * rounds(places); }

 private:
  /// 0 + 1 + ... + (places - 1), less one of each where turns count it.
  constexpr double rounds(int places) const { return .5 * (places - 1) * (turns > 0 ? places - 2 : places); }
};

}  // namespace chevron::detail
