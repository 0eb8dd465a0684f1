#pragma once

#include <chevron/lower/program.hpp>

#include "recorder_dumps.hpp"

/// \file
/// The actions of a schedule beside the messages that a job recorded.

namespace plan_program {

/// Writes into each recorded send and receive the action of the schedule, such as `1SEND_F0`. In a process group with as many
/// members as the schedule has ranks, the k-th message from a rank to another is the k-th message between them in the schedule,
/// step after step. Messages before the first step, as PyTorch sends to set up its communicators, are passed over: those of
/// another size at the beginning. Remarks name messages between ranks that have none in the schedule, and buffers that have
/// wrapped, in which the number of a message is lost.
/// \throws usage where no process group of this size has messages
void write_planned_actions(recorder_dumps& dumps, chevron::program_view const& program);

}  // namespace plan_program
