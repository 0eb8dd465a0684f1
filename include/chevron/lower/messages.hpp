#pragma once

#include <chevron/lower/program.hpp>
#include <chevron/plan/finding.hpp>

/// \file
/// Which instructions of a program belong together: a send, its wait and its receive, and what a computation consumes.

namespace chevron::detail {

/// An action of another kind for the same microbatch, `stages` stages further.
constexpr action beside(action a, kind what, int stages = 0) {
  return make_action(what, static_cast<int>(a.stage) + stages, static_cast<int>(a.micro_batch));
}
constexpr action receive_of(action send) {
  return send.kind == kind::send_forward ? beside(send, kind::receive_forward, 1) : beside(send, kind::receive_backward, -1);
}
constexpr action send_of(action receive) {
  return receive.kind == kind::receive_forward ? beside(receive, kind::send_forward, -1)
                                               : beside(receive, kind::send_backward, 1);
}
/// The receive of a computation's input or gradient, if that comes from another rank.
constexpr action receive_for(action computation) {
  return beside(computation, computation.kind == kind::forward ? kind::receive_forward : kind::receive_backward);
}
/// The send that `wait` waits for; `wait_for_send` is the inverse.
constexpr action send_of_wait(action wait) {
  return beside(wait, wait.kind == kind::wait_send_forward ? kind::send_forward : kind::send_backward);
}
constexpr action wait_for_send(action send) {
  return beside(send, send.kind == kind::send_forward ? kind::wait_send_forward : kind::wait_send_backward);
}

constexpr finding program_finding(law broken, int rank, int position, action what, char const* words = "", action other = {}) {
  return {.broken = broken, .rank = rank, .position = position, .what = what, .other = other, .words = words};
}

}  // namespace chevron::detail
