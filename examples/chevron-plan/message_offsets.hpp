#pragma once

#include <string>
#include <vector>

#include "recorder_dumps.hpp"

/// \file
/// Which send and which receive are one message, where ring buffers have lost older operations.

namespace plan_program {

/// The messages of a group from a rank to another, as far as the dumps have them: indices into the ranks' `operations`.
struct recorded_wire {
  std::string group;
  int from = -1, to = -1;
  std::vector<int> sends, receives;
};

/// Receive k and send k + offset of a wire are one message.
struct wire_offsets {
  int likeliest = 0;
  int other = 0;  ///< differs from `likeliest` where the dumps fit more than one offset: the least of these offsets

  bool is_decided() const { return likeliest == other; }
};

/// The offsets that the dumps of a wire's ranks fit.
///
/// Where neither rank has lost a message of the group, the offset is 0. Otherwise an offset is possible if each completed receive
/// has a send that was called before the receive's end, no pending send of an ordered channel has a completed receive, and no
/// receive is pending that could run: whose send has equal sizes and the same type, both first in their channels. An operation of
/// a batch may have ended though it is pending, as the batch is. Of the possible
/// offsets the program's order decides: a collective that both ranks completed divides the messages of both ranks into the same
/// parts.
/// \param dumps as read; both ranks have a dump
wire_offsets offsets_of(recorder_dumps const& dumps, recorded_wire const& wire);

}  // namespace plan_program
