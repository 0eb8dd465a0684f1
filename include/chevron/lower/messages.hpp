#pragma once

#include <cstdint>

#include <chevron/lower/program.hpp>
#include <chevron/plan/finding.hpp>

/// \file
/// Which instructions of a program belong together: a send, its wait and its receive, and what a computation consumes.

namespace chevron::detail {

constexpr action receive_of(action send) {
  return send.kind == kind::send_forward
             ? make_action(kind::receive_forward, static_cast<int>(send.stage) + 1, static_cast<int>(send.micro_batch))
             : make_action(kind::receive_backward, static_cast<int>(send.stage) - 1, static_cast<int>(send.micro_batch));
}
constexpr action send_of(action receive) {
  return receive.kind == kind::receive_forward
             ? make_action(kind::send_forward, static_cast<int>(receive.stage) - 1, static_cast<int>(receive.micro_batch))
             : make_action(kind::send_backward, static_cast<int>(receive.stage) + 1, static_cast<int>(receive.micro_batch));
}
/// The receive that brings what a computation consumes, where that comes from another rank.
constexpr action receive_for(action computation) {
  return make_action(computation.kind == kind::forward ? kind::receive_forward : kind::receive_backward,
                     static_cast<int>(computation.stage), static_cast<int>(computation.micro_batch));
}
/// The send that a wait is for.
constexpr action send_of_wait(action wait) {
  return make_action(wait.kind == kind::wait_send_forward ? kind::send_forward : kind::send_backward,
                     static_cast<int>(wait.stage), static_cast<int>(wait.micro_batch));
}

constexpr finding program_finding(law broken, int rank, int position, action what, char const* words = "", action other = {}) {
  return {.broken = broken, .rank = rank, .position = position, .what = what, .other = other, .words = words};
}

constexpr bool is_send(kind what) { return what == kind::send_forward || what == kind::send_backward; }
constexpr bool is_receive(kind what) { return what == kind::receive_forward || what == kind::receive_backward; }
constexpr bool is_wait(kind what) { return what == kind::wait_send_forward || what == kind::wait_send_backward; }

}  // namespace chevron::detail
