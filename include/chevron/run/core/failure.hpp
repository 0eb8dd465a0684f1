#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <new>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>

#include <chevron/plan/action.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/now_ns.hpp>
#include <chevron/run/core/text_parts.hpp>

/// \file
/// A job's failure, as text that ranks publish, and as the error that each rank throws.

namespace chevron {

/// The first failure of a job, equal on all ranks.
struct failure {
  int code = static_cast<int>(exit_code::peer_lost);  ///< exit code of the ranks' processes; default: a rank was lost
  int rank = -1;                                      ///< global rank at fault; -1: none
  long step = -1;                                     ///< training step of the rank that reported the failure
  std::string action{};                               ///< action of the rank that reported the failure
  std::string reason{};                               ///< a sentence without a full stop: `rank 2 was lost (killed by signal 9)`
  std::vector<int> ranks{};                           ///< ranks that `reason` names besides `rank`; the reason has no places
  bool by_itself = false;                             ///< whether `rank` is lost or late by a fault that `rank` itself found

  /// Whether other ranks found `rank` lost or late, and have given it up.
  bool given_up() const {
    bool const gone = code == static_cast<int>(exit_code::peer_lost) || code == static_cast<int>(exit_code::timeout);
    return gone && !by_itself;
  }
};

/// The description of a rank's wait, turned into text only for errors and for other ranks.
struct awaited {
  int peer = -1;                ///< global rank of the peer; -1 for a collective
  action what{};                ///< the SEND or RECV; meaningful if `words` is null
  char const* words = nullptr;  ///< name of any other wait, a literal: `sum of gradients`; else null
  long step = -1;
  int slices = 1;                ///< slices per microbatch, for the text of `what`
  char const* within = nullptr;  ///< the user's call that sends the message (`evaluate`), a literal; null in a training step

  bool is_send() const { return words == nullptr && (what.kind == kind::send_forward || what.kind == kind::send_backward); }
  std::string action_text() const { return words != nullptr ? words : to_text(what, slices).str(); }
  /// The wait in words: `step 4, evaluate, 1RECV_F0 from rank 2`.
  std::string text() const {
    std::string out = step >= 0 ? "step " + std::to_string(step) + ", " : "";
    if (words == nullptr && within != nullptr) out += std::string(within) + ", ";
    out += action_text();
    if (peer >= 0) out += (is_send() ? " to rank " : " from rank ") + std::to_string(peer);
    return out;
  }
};

namespace detail {

inline constexpr char field_separator = '\x1f';

inline std::vector<std::string> fields_of(std::string const& line) { return parts_of(line + field_separator, field_separator); }

inline long number_of(std::string const& digits) { return std::strtol(digits.c_str(), nullptr, 10); }

inline std::string to_line(failure const& f) {
  std::string const s(1, field_separator);
  std::string ranks;
  for (int const rank : f.ranks) ranks += std::to_string(rank) + " ";
  return std::to_string(f.code) + s + std::to_string(f.rank) + s + std::to_string(f.step) + s + f.action + s + f.reason + s +
         ranks + s + (f.by_itself ? "1" : "0");
}

inline failure failure_of(std::string const& line) {
  auto const field = fields_of(line);
  if (field.size() != 7) return {.reason = "an unreadable failure was published: " + line};
  std::vector<int> ranks;
  std::istringstream in(field[5]);
  for (int rank; in >> rank;) ranks.push_back(rank);
  return {.code = static_cast<int>(number_of(field[0])),
          .rank = static_cast<int>(number_of(field[1])),
          .step = number_of(field[2]),
          .action = field[3],
          .reason = field[4],
          .ranks = std::move(ranks),
          .by_itself = field[6] == "1"};
}

/// The reason text of a timeout of a send or receive.
inline std::string no_answer(int rank, std::chrono::milliseconds waited) {
  return "rank " + std::to_string(rank) + " did not answer within " + std::to_string(waited.count()) + " ms";
}

/// The reason text of a timeout of a collective.
inline std::string not_all_came(std::string const& action, std::chrono::milliseconds waited) {
  return "not all ranks came to " + action + " within " + std::to_string(waited.count()) + " ms";
}

/// The failure of a wait that reached its deadline.
inline failure timeout_of(awaited const& mine, std::chrono::milliseconds waited) {
  return {.code = static_cast<int>(exit_code::timeout),
          .rank = mine.peer,
          .step = mine.step,
          .action = mine.action_text(),
          .reason = mine.peer >= 0 ? no_answer(mine.peer, waited) : not_all_came(mine.action_text(), waited)};
}

/// The reason text of an error: two ranks met in a collective, but made different calls.
inline std::string different_calls(int a, std::string const& of_a, int b, std::string const& of_b) {
  return "rank " + std::to_string(a) + " is in " + of_a + " where rank " + std::to_string(b) + " is in " + of_b +
         ": every rank must make the same calls, in the same order";
}

/// The failure that a rank publishes for its own error.
/// \param message without places in the grid (`error::unplaced`)
inline failure failure_by(int rank, std::string const& message, int code, error_context const& where) {
  // The message may name this rank already.
  auto const name = "rank " + std::to_string(rank);
  bool const names_it =
      message.starts_with(name + ",") || message.starts_with(name + ":") || message.starts_with(name + " ended:");
  return {.code = code,
          .rank = rank,
          .step = where.step,
          .action = where.action,
          .reason = names_it ? message : name + " ended: " + message,
          .ranks = where.ranks};
}
/// The failure that a rank publishes for an error of Chevron. Blames the rank of the error's context: where ranks work together,
/// every rank throws the error of the rank that failed.
/// \param rank blamed if the context has no rank
inline failure failure_by(int rank, error const& e) {
  failure out = failure_by(e.context().rank >= 0 ? e.context().rank : rank, e.unplaced(), e.code(), e.context());
  out.ranks = e.ranks();
  return out;
}

/// A failure's reason with the places of the ranks that the reason names. \param also a further rank to place; -1: none
inline std::string placed_reason(failure const& of, int also = -1) {
  std::vector<int> named = of.ranks;
  named.insert(named.end(), {of.rank, also});
  return of.reason + places_of(named);
}

/// The message of an exception, without LibTorch's stack trace (which takes long to build) and without Gloo's file and line.
inline std::string message_of(std::exception const& e) {
  if (dynamic_cast<std::bad_alloc const*>(&e) != nullptr) return std::string("too little memory (") + e.what() + ")";
  auto const* of_torch = dynamic_cast<c10::Error const*>(&e);
  std::string text = of_torch != nullptr ? of_torch->what_without_backtrace() : e.what();
  if (text.starts_with('[')) {
    if (auto const end = text.find("] "); end != std::string::npos && text.find(".cc:") < end) text.erase(0, end + 2);
  }
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ' || text.back() == '.')) text.pop_back();
  return text;
}

/// A sentence with `#` for each number, which differs where ranks find one fault in stages of their own.
inline std::string without_numbers(std::string const& sentence) {
  std::string out;
  for (char const c : sentence) {
    bool const digit = c >= '0' && c <= '9';
    if (!digit) out += c;
    if (digit && !out.ends_with('#')) out += '#';
  }
  return out;
}

/// Whether a rank's failure says the same as the job's first failure, apart from numbers, and from rank, step and action before
/// the sentence, as where all ranks find one fault.
inline bool same_sentence(failure const& mine, failure const& first) {
  std::string before = words_before({.rank = mine.rank, .step = mine.step, .action = mine.action}, false);
  if (!mine.reason.starts_with(before)) before = "rank " + std::to_string(mine.rank) + " ended: ";
  if (!mine.reason.starts_with(before)) return false;
  std::string const sentence = without_numbers(mine.reason.substr(before.size())), reason = without_numbers(first.reason);
  return reason == sentence || reason.ends_with(": " + sentence);
}

/// The line of a rank whose job's failure another rank prints: `rank 3, step 2, sum of gradients: stopped, as rank 1 is gone;
/// rank 0's message says more`.
/// \param mine this rank's failure, by the same cause or with the same sentence as the job's first failure
/// \param speaker the rank that prints the failure
inline std::string short_line(int rank, failure const& mine, failure const& first, int speaker) {
  auto const code = static_cast<exit_code>(first.code);
  std::string out = words_before({.rank = rank, .step = mine.step, .action = mine.action}, true);
  if (first.rank == rank) {
    out += first.given_up() ? "given up by the other ranks" : "failed";
  } else if (mine.reason.find(first.reason) == std::string::npos) {
    out += "failed";
  } else if (first.rank < 0) {
    out += "stopped with the job";
  } else {
    out += "stopped, as rank " + std::to_string(first.rank) + place_of(first.rank) +
           (!first.given_up()              ? " failed"
            : code == exit_code::peer_lost ? " is gone"
                                           : " does not answer");
  }
  return out + "; rank " + std::to_string(speaker) + "'s message says more";
}

/// This thread's last wait that a failure ended, for the flight log (flight_log.hpp).
struct failed_wait {
  int rank = -1;  // global rank; -1: no wait was ended
  failure cause;
  awaited mine;
  std::int64_t at = 0;  // in ns, by now_ns()
};
inline thread_local failed_wait last_failed_wait;

/// A reason why this thread's rank may be late (little memory), appended to its timeout errors; empty: none is known.
inline thread_local std::string own_shortage;

}  // namespace detail

/// Throws the error type for the cause's exit code. The message has the cause, equal on all ranks, and this rank's wait; the
/// context has the rank at fault (else the wait's peer), and this rank's step and action. Types that only the failing rank
/// itself throws, such as `stage_error`, become a `peer_lost_error` with the cause's code. If the cause calls this rank lost or
/// late, the message says that the other ranks have given this rank up.
/// \param mine the wait that the failure ended \param rank this rank, global
[[noreturn]] inline void throw_failure(failure const& cause, awaited const& mine, int rank) {
  detail::last_failed_wait = {rank, cause, mine, now_ns()};
  auto const code = static_cast<exit_code>(cause.code);
  bool const of_others = cause.rank >= 0 && cause.rank != rank;
  error_context where{.rank = rank,
                      .peer = of_others ? cause.rank : mine.peer,
                      .step = mine.step,
                      .action = mine.action_text(),
                      .ranks = cause.ranks};
  where.ranks.push_back(mine.peer);
  bool const given_up = cause.rank == rank && cause.given_up();
  std::string sentence = (given_up ? "the other ranks have given this one up, and say: " : "") + cause.reason +
                         "; this rank was waiting for " + where.action;
  if (mine.peer >= 0) sentence += (mine.is_send() ? " to rank " : " from rank ") + std::to_string(mine.peer);
  switch (code) {
    case exit_code::timeout:
      if (!detail::own_shortage.empty()) sentence += "; " + detail::own_shortage;
      throw timeout_error(sentence, where);
    case exit_code::preflight:
      throw preflight_error(sentence, where);
    case exit_code::numerical:
      throw numerical_error(sentence, where);
    default:
      throw peer_lost_error(sentence, where, code);
  }
}

}  // namespace chevron
