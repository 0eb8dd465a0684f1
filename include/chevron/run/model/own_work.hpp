#pragma once

#include <functional>

#include <chevron/run/model/stage.hpp>

/// \file
/// What runs for an action of a user's own.

namespace chevron {

/// One X, Y or Z that has its turn.
struct own_work {
  char letter;         ///< 'X', 'Y' or 'Z'
  int stage_number;    ///< on this rank
  int micro_batch;     ///< of this step, counted from 0
  long step;           ///< counted from 0
  chevron::stage& of;  ///< the stage itself, with its parameters and buffers
};

/// Runs one, on the rank's thread and its stream, without a graph. Whatever it throws is the step's error, with rank and action.
using own_handler = std::function<void(own_work const&)>;

}  // namespace chevron
