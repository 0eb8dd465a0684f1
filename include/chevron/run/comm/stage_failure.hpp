#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include <c10/util/Exception.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/failure/failure.hpp>

/// \file
/// Turns an exception of a stage, the loss, an own action or the optimizer into an error with rank, step and action, and
/// publishes it to the other ranks.

namespace chevron::detail {

/// The exit code for the exception of user code that is being handled.
inline exit_code code_of_current() {
  try {
    throw;
  } catch (error const& e) {
    return static_cast<exit_code>(e.code());
  } catch (c10::OutOfMemoryError const&) {
    return exit_code::other;
  } catch (c10::Error const& e) {
    // Errors of c10 are the user's to correct, except those of the CPU allocator, which has no type of its own for too little
    // memory.
    bool const no_memory = std::string_view(e.what_without_backtrace()).find("can't allocate memory") != std::string_view::npos;
    return no_memory ? exit_code::other : exit_code::usage;
  } catch (...) {
    return exit_code::other;
  }
}

/// Throws a `stage_error` with the current exception nested, after it was published to the other ranks.
/// \param comm transport that publishes; null: no rank is told
/// \param sentence the error's message
[[noreturn]] inline void throw_stage_error(transport* comm, std::string const& sentence, error_context where) {
  stage_error const found(code_of_current(), sentence, std::move(where));
  if (comm != nullptr) comm->fail(found);
  std::throw_with_nested(found);
}

/// Rethrows the current exception of user code as an error with a place, after it was published to the other ranks. A
/// `usage_error` without a place keeps its type and gets this place, other errors of Chevron pass unchanged, and any other
/// exception becomes a `stage_error`. Called within a `catch`.
/// \param comm transport that publishes; null: no rank is told, since this rank can go on without the failed call
/// \param who  words before the message, as in `stage 1 threw: `
[[noreturn]] inline void rethrow_placed(transport* comm, std::string const& who, error_context where) {
  try {
    throw;
  } catch (usage_error const& e) {
    if (e.context().rank >= 0) throw;
    usage_error const placed(who + e.what(), std::move(where));
    if (comm != nullptr) comm->fail(placed);
    throw placed;
  } catch (error const&) {
    throw;
  } catch (std::exception const& e) {
    throw_stage_error(comm, who + message_of(e), std::move(where));
  } catch (...) {
    throw_stage_error(comm, who + "something that is no std::exception", std::move(where));
  }
}

}  // namespace chevron::detail
