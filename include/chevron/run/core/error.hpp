#pragma once

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <chevron/plan/action.hpp>
#include <chevron/run/core/job_grid.hpp>
#include <chevron/run/core/topology.hpp>

/// \file
/// Errors of a run. Each stores the reporting rank, the rank at fault or peer, the action, the step and the exit code.

namespace chevron {

/// Exit codes of programs: `run_main` exits with the code of the error that the program's body throws. Causes and remedies:
/// docs/reference/errors.md.
enum class exit_code : int {
  ok = 0,
  other = 1,      ///< a stage threw, or the exception is no `chevron::error`
  usage = 2,      ///< `usage_error`; `stage_error` if LibTorch refused a stage's arguments
  peer_lost = 3,  ///< `peer_lost_error`
  timeout = 4,    ///< `timeout_error`
  preflight = 5,  ///< `preflight_error`
  numerical = 6,  ///< `numerical_error`
  checkpoint = 7  ///< `checkpoint_error`
};

/// The place of an error in a run. Ranks are global (topology.hpp); -1: none.
struct error_context {
  int rank = -1;         ///< the rank that reports the error
  int peer = -1;         ///< the rank at fault, or at the other end of the message
  long step = -1;        ///< training step, from 0
  std::string action{};  ///< the rank's action: `3RECV_F1`, `sum of gradients`, …
  /// Further ranks that the sentence names. With several shards `what()` ends with the places of these ranks and of `peer`.
  std::vector<int> ranks{};
};

namespace detail {

/// The words before an error's sentence: `rank 1, step 4, 3RECV_F1: `; empty without rank, step and action.
/// \param placed whether the rank's place in the grid follows its number
inline std::string words_before(error_context const& where, bool placed) {
  std::string out;
  if (where.rank >= 0) out += "rank " + std::to_string(where.rank) + (placed ? place_of(where.rank) : "");
  if (where.step >= 0) out += (out.empty() ? "step " : ", step ") + std::to_string(where.step);
  if (!where.action.empty()) out += (out.empty() ? "" : ", ") + where.action;
  return out.empty() ? out : out + ": ";
}

}  // namespace detail

/// Rewrites the sentence of each error before its message is made; null: sentences stay as they are. A program with flags names
/// its flags in place of C++ options. Set once, before any rank runs.
inline std::string (*error_wording)(std::string sentence) = nullptr;

/// Base of all errors of a run: catch `error`, print `what()`, exit with `code()`.
class error : public std::runtime_error {
 public:
  /// \param sentence the fault and the remedy; `what()` puts the context before it \param where rank, peer, step and action
  error(exit_code code, std::string const& sentence, error_context where)
      : error(worded{error_wording == nullptr ? sentence : error_wording(sentence)}, code, std::move(where)) {}

  /// The exit code as a number, for `return` or `exit`.
  int code() const { return static_cast<int>(code_); }
  /// The message without places in the grid. An error or a failure that quotes the message adds the places of its own ranks.
  std::string const& unplaced() const { return unplaced_; }
  /// The ranks that the message names: the context's rank, peer and ranks.
  std::vector<int> ranks() const {
    std::vector<int> out = named(context_);
    if (context_.rank >= 0) out.push_back(context_.rank);
    return out;
  }
  /// The rank, peer, step and action.
  error_context const& context() const { return context_; }

 private:
  struct worded {
    std::string sentence;
  };
  error(worded const& text, exit_code code, error_context where)
      : std::runtime_error(detail::words_before(where, true) + text.sentence + detail::places_of(named(where), where.rank)),
        code_(code),
        unplaced_(detail::words_before(where, false) + text.sentence),
        context_(std::move(where)) {}

  static std::vector<int> named(error_context const& where) {
    std::vector<int> out = where.ranks;
    if (where.peer >= 0) out.push_back(where.peer);
    return out;
  }

  exit_code code_;
  std::string unplaced_;
  error_context context_;
};

/// A flag, a file, an environment variable, a shape or a module that cannot be used as given. Nothing was changed, so the
/// program may continue. Exit code 2.
struct usage_error : error {
  /// \param sentence, where as in `error`
  explicit usage_error(std::string const& sentence, error_context where = {})
      : error(exit_code::usage, sentence, std::move(where)) {}
};
/// A stage, the loss, the optimizer or the function that builds stages threw on this rank; the original exception is nested
/// (`std::rethrow_if_nested`). Exit code: that of the original if it is a `chevron::error`, 2 if LibTorch refused the arguments
/// (such as shapes that do not fit), otherwise 1 (such as for too little memory).
struct stage_error : error {
  /// \param code, sentence, where as in `error`
  stage_error(exit_code code, std::string const& sentence, error_context where) : error(code, sentence, std::move(where)) {}
};
/// Another rank ended, closed its connections, or failed. Exit code: that of the other rank's error; 3 if the other rank ended
/// without an error.
struct peer_lost_error : error {
  /// \param sentence, where as in `error` \param of_the_other exit code of the other rank's error
  peer_lost_error(std::string const& sentence, error_context where, exit_code of_the_other = exit_code::peer_lost)
      : error(of_the_other, sentence, std::move(where)) {}
};
/// Another rank runs but did not answer within the deadline (`transport::deadline`, 300 s unless set), or a rank did not join
/// within `launch_options::join`. Exit code 4.
struct timeout_error : error {
  /// \param sentence, where as in `error`
  timeout_error(std::string const& sentence, error_context where) : error(exit_code::timeout, sentence, std::move(where)) {}
};
/// The ranks run different programs, were given different data, expect different messages, or wait for each other in different
/// calls. Exit code 5.
struct preflight_error : error {
  /// \param sentence, where as in `error`
  preflight_error(std::string const& sentence, error_context where = {})
      : error(exit_code::preflight, sentence, std::move(where)) {}
};
/// A loss or a gradient is not finite, and no parameter was changed in that step; or an earlier step made a parameter infinite or
/// NaN. Thrown on every rank. Exit code 6.
struct numerical_error : error {
  /// \param sentence, where as in `error`
  numerical_error(std::string const& sentence, error_context where) : error(exit_code::numerical, sentence, std::move(where)) {}
};

/// A checkpoint cannot be written, or its content is not the expected one; the message names the file, the tensor and the
/// remedy. Saving and loading throw on every rank, and training may continue. Exit code 7.
struct checkpoint_error : error {
  /// \param sentence, where as in `error`
  explicit checkpoint_error(std::string const& sentence, error_context where = {})
      : error(exit_code::checkpoint, sentence, std::move(where)) {}
};

namespace detail {

/// A context with further ranks that the sentence names.
inline error_context naming(error_context where, std::vector<int> const& ranks) {
  where.ranks.insert(where.ranks.end(), ranks.begin(), ranks.end());
  return where;
}

/// Checks a grid of ranks. \throws usage_error unless `grid.is_valid()`
inline void check_grid(topology const& grid) {
  if (grid.is_valid()) return;
  throw usage_error("cannot run " + words_of(grid) + ": each must be at least 1" +
                    (grid.expert_replicas > 1 ? ", and the replicas a multiple of those that hold experts together" : ""));
}

}  // namespace detail
}  // namespace chevron
