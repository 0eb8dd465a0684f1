#pragma once

#include <functional>

#include <chevron/run/model/stage.hpp>

/// \file
/// The call of a user's handler for an action of a user's own kind (X, Y or Z).

namespace chevron {

/// The arguments of a handler: one X, Y or Z, when the schedule runs it.
struct own_work {
  char letter;         ///< 'X', 'Y' or 'Z'
  int stage_number;    ///< of a stage on this rank
  int micro_batch;     ///< of this step, counted from 0
  long step;           ///< counted from 0
  chevron::stage& of;  ///< the stage itself, with its parameters and buffers
};

/// Runs one own action, on the rank's thread and stream, without autograd. An exception becomes the step's error, with rank and
/// action.
using own_handler = std::function<void(own_work const&)>;

}  // namespace chevron
