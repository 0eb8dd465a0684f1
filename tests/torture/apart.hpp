#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>

/// \file
/// A job in processes of its own, watched from outside. The process that calls these computes nothing itself, so that it can be forked.

namespace torture {

struct outcome {
  bool hangs = false;  ///< not over in time, or a process stayed
  int code = 0;        ///< exit code; 128 + the signal that ended it
  double seconds = 0;
  std::string output;  ///< what its processes wrote on stdout and stderr
};

/// Runs `body` in a process group of its own; the result of `body` is the exit code.
/// \param longest then all its processes are killed
/// \param while_it_runs called with the group's number once it has begun, in this process
outcome run_apart(std::function<int()> const& body, std::chrono::milliseconds longest,
                  std::function<void(pid_t)> const& while_it_runs = {});

/// Runs `piece(i)` for each i below `count`, shared by so many processes; `heard` is called in this process
/// with each piece's text, in the order of arrival; not for a piece whose process ends without a text.
void share_out(std::size_t count, std::size_t processes, std::function<std::string(std::size_t)> const& piece,
               std::function<void(std::size_t, std::string const&)> const& heard);

}  // namespace torture
