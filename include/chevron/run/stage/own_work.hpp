#pragma once

#include <functional>

#include <chevron/run/stage/stage.hpp>

/// \file
/// The call of a user's handler for an action of a user's own kind (X, Y or Z).

namespace chevron {

/// The arguments of a handler: describes one X, Y or Z of the schedule.
struct own_work {
  char letter;         ///< 'X', 'Y' or 'Z'
  int stage_number;    ///< the action's stage, on this rank
  int micro_batch;     ///< index within this run of the schedule, from 0
  long step;           ///< the step's number, from 0
  chevron::stage& of;  ///< the action's stage, with parameters and buffers
};

/// Runs one X, Y or Z in the rank's thread and stream, without autograd. Random numbers come from a stream of the action's own,
/// selected by seed, step, replica, stage, microbatch and letter: equal under every schedule, and for all shards. An exception
/// becomes the step's error; rank and action are added to it.
using own_handler = std::function<void(own_work const&)>;

}  // namespace chevron
