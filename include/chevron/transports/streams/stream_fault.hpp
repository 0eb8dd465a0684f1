#pragma once

#include <string>

#include <chevron/run/core/failure.hpp>

/// \file
/// Faults of a rank's streams, and the rank at fault.

namespace chevron::detail {

/// A fault that a rank's streams report: a failed call of the rank, a failed operation, or a lost peer.
struct stream_fault {
  std::string what{};      ///< the failed part of the rank: `call of ncclSend on channel 'edge from 1 to 0'`
  std::string text{};      ///< the library's text: `NCCL: unhandled system error, …`; empty: no fault
  bool of_others = false;  ///< whether the library reports that another rank, or the network to it, is lost
  std::string place{};     ///< of a lost peer: ` on channel 'edge from 0 to 1'`
  int peer = -1;           ///< of a lost peer: global rank of the channel's other end; -1: the channel has several other ends

  explicit operator bool() const { return !text.empty(); }
};

/// The failure of a rank by a fault of the rank's streams. Blames the rank itself, except where the library reports a lost peer.
/// \param about the rank's wait, or no wait \param rank this rank, global
inline failure failure_of(awaited const& about, stream_fault const& fault, int rank) {
  failure out{.rank = fault.of_others ? fault.peer : rank, .step = about.step, .action = about.action_text()};
  std::string const name = "rank " + std::to_string(out.rank);
  out.by_itself = !fault.of_others;
  out.reason = fault.of_others ? (fault.peer >= 0 ? name : "a rank") + " was lost (" + fault.text + ")" + fault.place
                               : name + "'s " + fault.what + " failed (" + fault.text + ")";
  return out;
}

}  // namespace chevron::detail
