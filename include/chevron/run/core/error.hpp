#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include <chevron/plan/action.hpp>
#include <chevron/run/core/job_grid.hpp>
#include <chevron/run/core/topology.hpp>

/// \file
/// What can go wrong while a program runs. Each error knows who, with whom, at which action and in which step, and the exit
/// code a program should end with.

namespace chevron {

/// What a program ends with: `run_main` makes it of the error that leaves the program's body. docs/training.md has causes and
/// remedies.
enum class exit_code : int {
  ok = 0,
  other = 1,           ///< a stage threw, or an exception that is no `chevron::error`
  usage = 2,           ///< `usage_error`; `stage_error` where LibTorch refuses what a stage gives it
  peer_lost = 3,       ///< `peer_lost_error`
  timeout = 4,         ///< `timeout_error`
  preflight = 5,       ///< `preflight_error`
  numerical = 6,       ///< `numerical_error`
  checkpoint = 7,      ///< `checkpoint_error`
  corrupt_message = 8  ///< `corrupt_message_error`
};

/// Where in a run something happened. Ranks are global (topology.hpp); -1 where it does not apply.
struct error_context {
  int rank = -1;         ///< who reports
  int peer = -1;         ///< the other rank
  long step = -1;        ///< training step, from 0
  std::string action{};  ///< as text: `3RECV_F1`, `sum of gradients`, …
};

/// Base of all errors of a run: catch this one, print `what()`, end with `code()`.
class error : public std::runtime_error {
 public:
  /// \param sentence what is wrong, and the remedy; `what()` puts the context before it
  error(exit_code code, std::string const& sentence, error_context where)
      : std::runtime_error(with_context(sentence, where)), code_(code), context_(std::move(where)) {}

  /// The exit code as a number, for `return` or `exit`.
  int code() const { return static_cast<int>(code_); }
  /// Which rank, peer, step and action.
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

/// A flag, a file, an environment variable, a shape or a module that cannot be used as given. Nothing was changed: who catches it
/// may go on. Exit code 2.
struct usage_error : error {
  explicit usage_error(std::string const& sentence, error_context where = {})
      : error(exit_code::usage, sentence, std::move(where)) {}
};
/// What a stage, the loss, the optimizer or the function that builds stages threw on this rank: the original is nested
/// (`std::rethrow_if_nested`). The exit code is 2 if LibTorch refused what it was given, such as shapes that do not fit, that of
/// the original if it has one, and 1 for anything else, such as too little memory.
struct stage_error : error {
  stage_error(exit_code code, std::string const& sentence, error_context where) : error(code, sentence, std::move(where)) {}
};
/// Another rank ended, closed its connections, or failed. A rank that ends because another failed takes over its exit code, else
/// the exit code is 3.
struct peer_lost_error : error {
  peer_lost_error(std::string const& sentence, error_context where, exit_code of_the_other = exit_code::peer_lost)
      : error(of_the_other, sentence, std::move(where)) {}
};
/// Another rank is there but did not answer within the deadline (`transport::deadline`, 300 s unless set), or did not come to the
/// meeting of ranks within `launch_options::join`. Exit code 4.
struct timeout_error : error {
  timeout_error(std::string const& sentence, error_context where) : error(exit_code::timeout, sentence, std::move(where)) {}
};
/// The ranks do not run the same program, were given different data, disagree about what crosses between them, or wait for each
/// other in different calls. Exit code 5.
struct preflight_error : error {
  preflight_error(std::string const& sentence, error_context where = {})
      : error(exit_code::preflight, sentence, std::move(where)) {}
};
/// A loss or a gradient is not finite; no parameter was changed in that step. Thrown on every rank. Exit code 6.
struct numerical_error : error {
  numerical_error(std::string const& sentence, error_context where) : error(exit_code::numerical, sentence, std::move(where)) {}
};

/// A checkpoint that cannot be written, or is not what was expected: names the file, the tensor and the remedy.
/// Saving and loading throw it on every rank, and training may go on. Exit code 7.
struct checkpoint_error : error {
  explicit checkpoint_error(std::string const& sentence, error_context where = {})
      : error(exit_code::checkpoint, sentence, std::move(where)) {}
};

/// With `trainer_options::check_messages`: what came from `context().peer` is not what that rank sent. Nothing was computed
/// with it. Exit code 8.
struct corrupt_message_error : error {
  corrupt_message_error(std::string const& sentence, error_context where)
      : error(exit_code::corrupt_message, sentence, std::move(where)) {}
};

namespace detail {

/// \throws usage_error for a grid that no ranks make
inline void check_grid(topology const& grid) {
  if (grid.is_valid()) return;
  throw usage_error("cannot run " + words_of(grid) + ": each must be at least 1" +
                    (grid.expert_replicas > 1 ? ", and the replicas a multiple of those that hold experts together" : ""));
}

}  // namespace detail
}  // namespace chevron
