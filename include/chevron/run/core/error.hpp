#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include <chevron/plan/action.hpp>

/// \file
/// What can go wrong while a program runs. Each error knows who, with whom, at which action and in which step, and the exit
/// code a program should end with.

namespace chevron {

enum class exit_code : int {
  ok = 0,
  other = 1,
  usage = 2,
  peer_lost = 3,
  timeout = 4,
  preflight = 5,
  numerical = 6,
  checkpoint = 7
};

/// Where in a run something happened. Ranks are global (replica × P + pipeline rank); -1 where it does not apply.
struct error_context {
  int rank = -1;         ///< who reports
  int peer = -1;         ///< the other rank
  long step = -1;        ///< training step, from 0
  std::string action{};  ///< as text: `3RECV_F1`, `sum of gradients`, …
};

/// Base of all errors of a run: catch this one, print `what()`, end with `code()`.
class error : public std::runtime_error {
 public:
  error(exit_code code, std::string const& sentence, error_context where)
      : std::runtime_error(with_context(sentence, where)), code_(code), context_(std::move(where)) {}

  int code() const { return static_cast<int>(code_); }
  error_context const& context() const { return context_; }

 private:
  static std::string with_context(std::string const& sentence, error_context const& where) {
    std::string out;
    if (where.rank >= 0) out += "rank " + std::to_string(where.rank);
    if (where.step >= 0) out += (out.empty() ? "step " : ", step ") + std::to_string(where.step);
    if (!where.action.empty()) out += (out.empty() ? "" : ", ") + where.action;
    return out.empty() ? sentence : out + ": " + sentence;
  }

  exit_code code_;
  error_context context_;
};

/// A flag, a file, an environment variable, a shape or a module that cannot be used as given.
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
/// Another rank ended, closed its connections, or failed. A rank that ends because another failed takes over its exit code.
struct peer_lost_error : error {
  peer_lost_error(std::string const& sentence, error_context where, exit_code of_the_other = exit_code::peer_lost)
      : error(of_the_other, sentence, std::move(where)) {}
};
/// Another rank is there but did not answer within the deadline.
struct timeout_error : error {
  timeout_error(std::string const& sentence, error_context where) : error(exit_code::timeout, sentence, std::move(where)) {}
};
/// The ranks do not run the same program, were given different data, or disagree about what crosses between them.
struct preflight_error : error {
  preflight_error(std::string const& sentence, error_context where = {})
      : error(exit_code::preflight, sentence, std::move(where)) {}
};
/// A loss or a gradient is not finite.
struct numerical_error : error {
  numerical_error(std::string const& sentence, error_context where) : error(exit_code::numerical, sentence, std::move(where)) {}
};

/// A checkpoint that cannot be written, or is not what was expected: names the file, the tensor and the remedy.
struct checkpoint_error : error {
  explicit checkpoint_error(std::string const& sentence, error_context where = {})
      : error(exit_code::checkpoint, sentence, std::move(where)) {}
};

}  // namespace chevron
