#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "judge.hpp"
#include "program.hpp"

/// \file
/// Programs run in forked processes, so that an abort or a hang is a finding and not the end. The process that forks computes
/// nothing itself.

namespace differential {

/// One process that runs several programs, one after the other.
class child {
 public:
  explicit child(std::vector<program> work);
  ~child();
  child(child const&) = delete;
  child& operator=(child const&) = delete;

  /// The judgements since the last call. Also finds processes that died or hang.
  std::vector<std::pair<program, judgement>> poll();
  bool done() const { return ended_; }
  /// Those that were not begun because an earlier one ended the process.
  std::vector<program> left() const;
  int handle() const { return pipe_; }

 private:
  std::vector<program> work_;
  std::size_t next_ = 0;  // being run
  pid_t id_ = -1;
  int pipe_ = -1;
  std::string heard_, runs_;  // `plain` or `Chevron`
  bool ended_ = false;
  std::chrono::steady_clock::time_point since_;
};

/// Judges one program in a process of its own.
judgement judge_apart(program const& p);

}  // namespace differential
