#pragma once

#include <vector>

#include <chevron/lower/program.hpp>

#include "hang.hpp"
#include "recorder_dumps.hpp"

/// \file
/// The actions of a schedule beside the messages that a job recorded.

namespace plan_program {

/// Writes into each recorded send and receive the action of the schedule, such as `1SEND_F0`. In a process group with as many
/// members as the schedule has ranks, the k-th message from a rank to another is the k-th message between them in the schedule,
/// step after step. Messages before the first step, as PyTorch sends to set up its communicators, are passed over: those of
/// another size at the beginning. Where a buffer has wrapped, a step begins behind a collective that is as many messages behind
/// the one before as a step has. Remarks name messages between ranks that have none in the schedule, dumps in which no whole
/// step is left, and a rank whose rounds have another number of messages than the schedule's steps.
/// \param rounds by rank, as `find_cause` found them
/// \throws usage where no process group of this size has messages
void write_planned_actions(recorder_dumps& dumps, chevron::program_view const& program,
                           std::vector<recorded_rounds> const& rounds);

}  // namespace plan_program
