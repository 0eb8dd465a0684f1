#pragma once

#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include <c10/util/Exception.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>

/// \file
/// Turns an exception of a stage, the loss, a user-defined action or the optimizer into an error with rank, step and action,
/// and publishes the error to the other ranks.

namespace chevron::detail {

/// The exit code for the current exception, which user code threw.
inline exit_code code_of_current() {
  try {
    throw;
  } catch (error const& e) {
    return static_cast<exit_code>(e.code());
  } catch (c10::OutOfMemoryError const&) {
    return exit_code::other;
  } catch (c10::AcceleratorError const&) {  // a call of CUDA failed
    return exit_code::other;
  } catch (c10::Error const& e) {
    // Other errors of c10 are usage errors, except too little memory on the CPU, for which the allocator has no special type.
    bool const no_memory = std::string_view(e.what_without_backtrace()).find("can't allocate memory") != std::string_view::npos;
    return no_memory ? exit_code::other : exit_code::usage;
  } catch (...) {
    return exit_code::other;
  }
}

/// Publishes a `stage_error` to the other ranks, then throws it with the current exception nested.
/// \param comm transport that publishes; null: nothing is published
/// \param sentence the error's message
[[noreturn]] inline void throw_stage_error(transport* comm, std::string const& sentence, error_context where) {
  stage_error const found(code_of_current(), sentence, std::move(where));
  if (comm != nullptr) comm->fail(found);
  std::throw_with_nested(found);
}

/// Rethrows the current exception of user code as an error with rank, step and action, after publishing the error to the other
/// ranks. A `usage_error` without a rank becomes a `usage_error` with context `where`; any other error of Chevron is rethrown
/// unchanged; any other exception becomes a `stage_error`. Called within a `catch`.
/// \param comm transport that publishes; null: nothing is published, since this rank can continue without the failed call
/// \param who  words before the message, as in `stage 1 threw: `
[[noreturn]] inline void rethrow_placed(transport* comm, std::string const& who, error_context where) {
  try {
    throw;
  } catch (usage_error const& e) {
    if (e.context().rank >= 0) throw;
    usage_error const placed(who + e.unplaced(), naming(std::move(where), e.ranks()));
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
