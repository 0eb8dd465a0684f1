#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <chevron/plan/plan.hpp>
#include <chevron/tools/show/picture.hpp>

#include "flight_logs.hpp"

/// \file
/// Who waited for whom when a job failed, and for what in the end: from the flight logs that its ranks left.

namespace plan_program {

/// What a rank was in when the job failed.
enum class rank_state {
  absent,    ///< it left nothing
  failed,    ///< by what it did itself
  waiting,   ///< for others
  going_on,  ///< it did what it had to, and heard of the failure where it started a message
  busy,      ///< in an action, and it waited for nobody
  between    ///< between two actions, or before the first
};

/// One rank, as its flight log tells.
struct rank_story {
  rank_state state = rank_state::absent;
  std::optional<ring_action> at;         ///< the action under way
  std::optional<chevron::action> needs;  ///< of a wait for a message: what its peer has to compute
  int waits_for = -1;                    ///< global rank; -1: for nobody, or for none in particular
  double seconds = -1;                   ///< waited, or busy; -1: not known
  bool began = false;                    ///< `at` was computing, not still to begin
};

/// All of it.
struct story {
  std::vector<rank_story> ranks;           ///< by global rank
  int root = -1;                           ///< where all waits lead; -1: nowhere
  std::vector<int> circle;                 ///< ranks that wait for each other
  std::optional<chevron::action> awaited;  ///< what of `root` was waited for
  long step = -1;                          ///< in which
  std::string meeting;                     ///< instead of an action: the call in which all met but `root`
  std::vector<int> led;                    ///< ranks whose waits lead to `root`
  std::vector<int> others;                 ///< ranks that waits lead to besides
};

/// Where actions stand in a plan.
class plan_index {
 public:
  /// \param plan outlives this
  explicit plan_index(chevron::plan const& plan);
  chevron::plan const& plan() const { return plan_; }
  /// In the list of its rank; -1 if it is not there, or that is another rank than `on`.
  int position_of(chevron::action what, int on = -1) const;

 private:
  chevron::plan const& plan_;
  std::unordered_map<std::uint32_t, int> positions_;
};

/// The computation of its peer that a wait for a message needs: for `2RECV_F1`, `1F1`.
/// \param plan null: backwards are taken to be whole
std::optional<chevron::action> needed_for(chevron::action waiting, plan_index const* plan);

/// \param plan null: none of the flight logs holds it
story follow_waits(flight_logs const& all, plan_index const* plan);

/// How far each action of a step had come, by pipeline rank and position, as far as is known: of a rank that left nothing, what
/// others show that it had done.
/// \param first_rank of a pipeline; global
std::vector<std::vector<chevron::show::progress>> how_far(flight_logs const& all, story const& what, plan_index const& plan,
                                                          int first_rank, long step);

}  // namespace plan_program
