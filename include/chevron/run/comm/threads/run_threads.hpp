#pragma once

#include <chrono>
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
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/vector_math.hpp>
#include <chevron/run/failure/end_process.hpp>
#include <chevron/run/failure/failure.hpp>
#include <chevron/run/failure/flight_log.hpp>

/// \file
/// Runs ranks as threads of this process.

namespace chevron {

namespace detail {

/// The failure of the rank that published first, among the failures that bodies have thrown; null if no body has thrown.
inline threads_hub::thrown_failure const* cause_among(threads_hub const& hub) {
  for (auto const& each : hub.failures) {
    if (each.rank == hub.finder) return &each;
  }
  return hub.failures.empty() ? nullptr : &hub.failures.front();
}

/// Waits until all bodies have ended. Once a body has failed, the others have their grace time; then this process ends, since a
/// thread that hangs cannot be ended alone, and the failure would never be reported.
inline void wait_for_all_ranks(threads_hub& hub) {
  constexpr auto nap = std::chrono::milliseconds(10);  // naps are counted: while the machine stands still, no grace passes
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
    failure const& about = cause != nullptr ? cause->about : *hub.first_failure;
    std::string missing;
    for (std::size_t r = 0; r < hub.ranks.size(); ++r) {
      if (!hub.ranks[r]->ended) missing += (missing.empty() ? "rank " : ", ") + std::to_string(r);
    }
    write_flight_logs(hub.first_failure ? *hub.first_failure : about, -1);
    end_process(about.reason + "; " + missing + " did not come back within " + std::to_string(hub.options.grace.count()) +
                    " ms after that, and so this process ends",
                about.code);
  }
}

}  // namespace detail

/// Runs `body(transport&)` once for each rank, each in a thread of its own, and waits for all of them. When a body throws, the
/// waits of the other ranks end with `peer_lost_error` or the type of its error, and its exception is rethrown here. Ranks that
/// do not return then, since they compute or hang, have `thread_options::grace`: after that the process ends, with the message
/// and the exit code of the first failure.
/// \param options the grid of ranks, and the behaviour of the transports
/// \param body called by several threads at once; must not write to data that it shares with other ranks
/// \throws usage_error for no rank, replica or shard; the exception of the first rank that failed
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
        about = detail::failure_by(r, e.what(), e.code(), e.context());
      } catch (std::exception const& e) {
        thrown = std::current_exception();
        about = detail::failure_by(r, detail::message_of(e), static_cast<int>(exit_code::other), {});
      } catch (...) {
        thrown = std::current_exception();
        about = detail::failure_by(r, "something was thrown that is no std::exception", static_cast<int>(exit_code::other), {});
      }
      if (thrown) {
        hub->fail(about, r);  // the other ranks' waits end before anything is written
        detail::write_flight_logs(about, r,
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

}  // namespace chevron
