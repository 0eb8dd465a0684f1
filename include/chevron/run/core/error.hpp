#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include <chevron/plan/action.hpp>
#include <chevron/run/core/job_grid.hpp>
#include <chevron/run/core/topology.hpp>

/// \file
/// Errors of a run. Each holds the rank that reports it, the other rank, the action, the step, and the program's exit code.

namespace chevron {

/// The exit code of a program: `run_main` takes the code of the error that leaves the program's body. docs/training.md lists
/// causes and remedies.
enum class exit_code : int {
  ok = 0,
  other = 1,           ///< a stage threw, or an exception that is no `chevron::error`
  usage = 2,           ///< `usage_error`; `stage_error` where LibTorch refuses a stage's arguments
  peer_lost = 3,       ///< `peer_lost_error`
  timeout = 4,         ///< `timeout_error`
  preflight = 5,       ///< `preflight_error`
  numerical = 6,       ///< `numerical_error`
  checkpoint = 7,      ///< `checkpoint_error`
  corrupt_message = 8  ///< `corrupt_message_error`
};

/// The place of an error in a run. Ranks are global (topology.hpp); -1: none.
struct error_context {
  int rank = -1;         ///< the rank that reports
  int peer = -1;         ///< the other rank
  long step = -1;        ///< training step, from 0
  std::string action{};  ///< as text: `3RECV_F1`, `sum of gradients`, …
};

/// Base of all errors of a run: catch this one, print `what()`, end with `code()`.
class error : public std::runtime_error {
 public:
  /// \param sentence the fault and the remedy; `what()` puts the context before them
  error(exit_code code, std::string const& sentence, error_context where)
      : std::runtime_error(with_context(sentence, where)), code_(code), context_(std::move(where)) {}

  /// The exit code as a number, for `return` or `exit`.
  int code() const { return static_cast<int>(code_); }
  /// The rank, peer, step and action.
  error_context const& context() const { return context_; }

 private:
  static std::string with_context(std::string const& sentence, error_context const& where) {
    std::string out;
    if (where.rank >= 0) out += "rank " + std::to_string(where.rank) + detail::job_grid::place_of(where.rank);
    if (where.step >= 0) out += (out.empty() ? "step " : ", step ") + std::to_string(where.step);
    if (!where.action.empty()) out += (out.empty() ? "" : ", ") + where.action;
    return detail::job_grid::with_places(out.empty() ? sentence : out + ": " + sentence, where.peer);
  }

  exit_code code_;
  error_context context_;
};

/// A flag, a file, an environment variable, a shape or a module that cannot be used as given. Nothing was changed, so the caller
/// may go on. Exit code 2.
struct usage_error : error {
  /// \param sentence, where as of `error`
  explicit usage_error(std::string const& sentence, error_context where = {})
      : error(exit_code::usage, sentence, std::move(where)) {}
};
/// An exception of a stage, the loss, the optimizer or the function that builds stages on this rank, with the original nested
/// (`std::rethrow_if_nested`). The exit code is 2 if LibTorch refused the arguments, such as shapes that do not fit, the
/// original's if it has one, and 1 otherwise, such as for too little memory.
struct stage_error : error {
  /// \param code, sentence, where as of `error`
  stage_error(exit_code code, std::string const& sentence, error_context where) : error(code, sentence, std::move(where)) {}
};
/// Another rank ended, closed its connections, or failed. The exit code is that of the other rank's error, and 3 if the rank
/// ended without one.
struct peer_lost_error : error {
  /// \param sentence, where as of `error` \param of_the_other exit code of the other rank's error
  peer_lost_error(std::string const& sentence, error_context where, exit_code of_the_other = exit_code::peer_lost)
      : error(of_the_other, sentence, std::move(where)) {}
};
/// Another rank runs but did not answer within the deadline (`transport::deadline`, 300 s unless set), or a rank did not join
/// within `launch_options::join`. Exit code 4.
struct timeout_error : error {
  /// \param sentence, where as of `error`
  timeout_error(std::string const& sentence, error_context where) : error(exit_code::timeout, sentence, std::move(where)) {}
};
/// The ranks run different programs, were given different data, expect different messages, or wait for each other in different
/// calls. Exit code 5.
struct preflight_error : error {
  /// \param sentence, where as of `error`
  preflight_error(std::string const& sentence, error_context where = {})
      : error(exit_code::preflight, sentence, std::move(where)) {}
};
/// A loss or a gradient is not finite; no parameter was changed in that step. Thrown on every rank. Exit code 6.
struct numerical_error : error {
  /// \param sentence, where as of `error`
  numerical_error(std::string const& sentence, error_context where) : error(exit_code::numerical, sentence, std::move(where)) {}
};

/// A checkpoint cannot be written, or does not hold the expected content: names the file, the tensor and the remedy.
/// Saving and loading throw it on every rank, and training may go on. Exit code 7.
struct checkpoint_error : error {
  /// \param sentence, where as of `error`
  explicit checkpoint_error(std::string const& sentence, error_context where = {})
      : error(exit_code::checkpoint, sentence, std::move(where)) {}
};

/// With `trainer_options::check_messages`: a message from `context().peer` differs from the one that rank sent, and was not used
/// in a computation. Exit code 8.
struct corrupt_message_error : error {
  /// \param sentence, where as of `error`
  corrupt_message_error(std::string const& sentence, error_context where)
      : error(exit_code::corrupt_message, sentence, std::move(where)) {}
};

namespace detail {

/// Checks a grid of ranks. \throws usage_error unless `is_valid`
inline void check_grid(topology const& grid) {
  if (grid.is_valid()) return;
  throw usage_error("cannot run " + words_of(grid) + ": each must be at least 1" +
                    (grid.expert_replicas > 1 ? ", and the replicas a multiple of those that hold experts together" : ""));
}

}  // namespace detail
}  // namespace chevron
