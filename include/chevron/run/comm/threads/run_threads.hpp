#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/threads/threads_hub.hpp>
#include <chevron/run/comm/threads/threads_transport.hpp>
#include <chevron/run/core/end_process.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/flight_log.hpp>
#include <chevron/run/core/vector_math.hpp>

/// \file
/// Runs ranks as threads of this process.

namespace chevron {

namespace detail {

/// Returns the exception of the rank that published first, or else the exception thrown first; null if no body has thrown.
inline threads_hub::thrown_failure const* cause_among(threads_hub const& hub) {
  for (auto const& each : hub.failures) {
    if (each.rank == hub.finder) return &each;
  }
  return hub.failures.empty() ? nullptr : &hub.failures.front();
}

/// Waits until all bodies have ended. If a body has failed and the other bodies do not end within the grace time, ends this
/// process: a thread that hangs cannot be ended alone, and without an end the failure would never be reported.
inline void wait_for_all_ranks(threads_hub& hub) {
  constexpr auto nap = std::chrono::milliseconds(10);  // counts naps: no grace time passes while the machine is paused
  std::unique_lock hold(hub.mutex);
  for (int naps = 0; hub.ended < static_cast<int>(hub.ranks.size());) {
    bool const failing = !hub.failures.empty() || (hub.first_failure && hub.ended > 0);
    if (!failing) {
      hub.some_ended.wait(hold);
      continue;
    }
    hub.some_ended.wait_for(hold, nap);
    if (hub.ended == static_cast<int>(hub.ranks.size()) || ++naps * nap < hub.options.grace) continue;
    auto const* const cause = cause_among(hub);
    failure about = cause != nullptr ? cause->about : *hub.first_failure;
    std::string missing;
    for (std::size_t r = 0; r < hub.ranks.size(); ++r) {
      if (hub.ranks[r]->ended) continue;
      missing += (missing.empty() ? "rank " : ", ") + std::to_string(r);
      about.ranks.push_back(static_cast<int>(r));
    }
    write_flight_logs(hub.first_failure ? *hub.first_failure : about, -1);
    about.reason += "; " + missing + " did not come back within " + std::to_string(hub.options.grace.count()) +
                    " ms after that, and so this process ends";
    end_process(placed_reason(about), about.code);
  }
}

}  // namespace detail

/// Runs `body(transport&)` once for each rank, in a separate thread, and waits for all threads. If a body throws, waits of
/// other ranks throw `peer_lost_error` or an error of the same type, and `run_threads` rethrows the body's exception. If ranks
/// do not return then within `thread_options::grace`, since they compute or hang, the process ends with the message and the
/// exit code of the first failure.
/// \param options the grid of ranks, and the behaviour of the transports
/// \param body called by several threads at once; must not write to data that ranks share
/// \throws usage_error if a size of the grid is below 1; the exception of the first rank that failed
template <class Body>
void run_threads(thread_options const& options, Body const& body) {
  topology const grid{options.pipeline_ranks, options.replicas, 0, options.shards, options.expert_replicas};
  detail::check_grid(grid);
  detail::prepare_vector_math();
  auto const hub = std::make_shared<detail::threads_hub>(options);
  int const world = grid.world();
  int const threads_before = at::get_num_threads();
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      at::set_num_threads(options.intra_op_threads);
      std::exception_ptr thrown;
      failure about;
      try {
        threads_transport comm(hub, r);
        body(static_cast<transport&>(comm));
      } catch (error const& e) {
        thrown = std::current_exception();
        about = detail::failure_by(r, e);
      } catch (std::exception const& e) {
        thrown = std::current_exception();
        about = detail::failure_by(r, detail::message_of(e), static_cast<int>(exit_code::other), {});
      } catch (...) {
        thrown = std::current_exception();
        about = detail::failure_by(r, "an object that is no std::exception was thrown", static_cast<int>(exit_code::other), {});
      }
      if (thrown) {
        failure const first = hub->fail(about, r);  // ends the other ranks' waits before the flight log is written
        detail::write_flight_logs(first, r,
                                  {options.pipeline_ranks, options.replicas, r, options.shards, options.expert_replicas});
      }
      hub->end(r, thrown, about);
    });
  }
  detail::wait_for_all_ranks(*hub);
  for (std::thread& t : threads) t.join();
  at::set_num_threads(threads_before);
  if (auto const* const cause = detail::cause_among(*hub)) {
    detail::last_thrown = {cause->what, cause->rank};
    std::rethrow_exception(cause->what);
  }
}

/// Runs a body on the pipeline ranks of a program (`options.pipeline_ranks` is ignored):
///
///     chevron::run_threads(program, {.replicas = 2}, [&](chevron::transport& comm) { … });
template <class Body>
void run_threads(program_view const& program, thread_options options, Body const& body) {
  options.pipeline_ranks = program.plan.size.ranks;
  run_threads(options, body);
}
/// Catches a program that no variable holds: does not compile, and says so.
template <std::same_as<proved_program> Program, class Body>
void run_threads(Program&&, thread_options const&, Body const&) {
  static_assert(
      sizeof(Body) == 0,
      "this program ends at the end of the line: store it in a variable first, auto const program = lower(prove(plan)), and "
      "pass the variable");
}

}  // namespace chevron
