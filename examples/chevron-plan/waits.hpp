#pragma once

#include <optional>
#include <string>
#include <vector>

#include <chevron/plan/plan.hpp>

#include "rings.hpp"

/// \file
/// Who waited for whom when a job failed, and for what in the end: from the rings that its ranks left.

namespace plan_program {

/// What a rank was in when the job failed.
enum class rank_state {
  absent,   ///< it left nothing
  failed,   ///< by what it did itself
  waiting,  ///< for others
  going_on, ///< it did what it had to, and heard of the failure where it started a message
  busy,     ///< in an action, and it waited for nobody
  between   ///< between two actions, or before the first
};

/// One rank, as its ring tells.
struct rank_story {
  rank_state state = rank_state::absent;
  std::optional<ring_action> at;          ///< the action under way
  std::optional<chevron::action> needs;   ///< of a wait for a message: what its peer has to compute
  int waits_for = -1;                     ///< global rank; -1: for nobody, or for none in particular
  double seconds = -1;                    ///< waited, or busy; -1: not known
  bool began = false;                     ///< `at` was computing, not still to begin
};

/// All of it.
struct story {
  std::vector<rank_story> ranks;         ///< by global rank
  int root = -1;                         ///< where all waits lead; -1: nowhere
  std::vector<int> circle;               ///< ranks that wait for each other
  std::optional<chevron::action> awaited;  ///< what of `root` was waited for
  bool awaited_known = false;            ///< `root` said itself that it was in it
  long step = -1;                        ///< in which
  std::string meeting;                   ///< instead of an action: the call in which all met but `root`
  std::vector<int> led;                  ///< ranks whose waits lead to `root`
  std::vector<int> others;               ///< ranks that waits lead to besides
};

/// What a computation on the way of a message is called: for `2RECV_F1`, `1F1`. \param plan null: as one with B
std::optional<chevron::action> needed_for(chevron::action waiting, chevron::plan const* plan);

/// The position of an action in its rank's list; -1 if it has none such.
int position_of(chevron::plan const& plan, int pipeline_rank, chevron::action what);

story follow_waits(rings const& all, chevron::plan const* plan);

}  // namespace plan_program
