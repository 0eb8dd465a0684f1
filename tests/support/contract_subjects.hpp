#pragma once

// Transports that the contract is asked of, each with a name and a way to run its ranks in this process.

#include <chrono>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <chevron/lower/edges.hpp>
#include <chevron/run/comm/threads/run_threads.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>
#include <chevron/transports/streams/stream_transport.hpp>
#include "host_streams.hpp"

#include "support/thread_ranks.hpp"

#include <doctest/doctest.h>

namespace transport_contract {

using chevron::transport;
using body = std::function<void(transport&)>;

/// The exception of one rank, in words.
struct outcome {
  std::string text;  // empty: nothing
  int code = 0;
  chevron::error_context where{};
};

/// A transport, and the parts of the contract that the transport leaves open.
struct subject {
  std::string name;
  /// Runs `body` on each rank of a grid; returns the exception of each rank. Messages may go both ways between neighbours,
  /// with eight slots for each direction.
  std::function<std::vector<outcome>(chevron::topology const&, body const&)> run_grid;
  bool keeps_every_stride = true;  // else: those of the first time, and of an expanded tensor none that are 0
  bool sends_wait = true;          // a send is over only when its receive was posted
  bool sums_in_order = true;       // of a group: ((r0 + r1) + r2) …
  bool compares_collectives = true;  // members that start different collectives are refused; else the result is undefined
  bool sees_sizes = true;          // gathers of different sizes are refused; else the result is undefined
  bool tells_waits = true;         // ranks that wait for each other end with an error at once; else at the deadline

  std::vector<outcome> run(chevron::topology const& grid, body const& work) const { return run_grid(grid, work); }
  std::vector<outcome> run(int pipeline_ranks, int replicas, body const& work) const {
    return run({.pipeline_ranks = pipeline_ranks, .replicas = replicas}, work);
  }
};

inline outcome outcome_of(std::exception_ptr const& thrown) {
  outcome out;
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (chevron::error const& e) {
    out = {e.what(), e.code(), e.context()};
  } catch (std::exception const& e) {
    out.text = e.what();
  } catch (...) {
    out.text = "a check of the test failed";
  }
  return out;
}

inline void get_ready(transport& comm) {
  std::vector<chevron::edge> edges;
  for (int r = 0; r + 1 < comm.topology().pipeline_ranks; ++r) {
    edges.push_back({r, r + 1});
    edges.push_back({r + 1, r});
  }
  comm.connect(edges);
  comm.open({.activation = 0, .receive = 8, .send = 8});
}

/// Calls `work()` on a rank's thread, with `told` beside each check that fails there. INFO's scope ends before an error is
/// thrown on: doctest writes down the scopes that an exception leaves in one list of all threads, without a lock.
template <class Work>
void with_info(std::string const& told, Work const& work) {
  std::exception_ptr thrown;
  {
    INFO(told);
    try {
      work();
    } catch (...) {
      thrown = std::current_exception();
    }
  }
  if (thrown) std::rethrow_exception(thrown);
}

/// Ranks as threads.
inline subject threads(std::string const& name, chevron::thread_options options = {}) {
  using namespace std::chrono_literals;
  options.deadline = 100s;
  options.grace = 100s;
  return {.name = name,
          .run_grid =
              [options, name](chevron::topology const& grid, body const& work) {
                auto how = options;
                how.pipeline_ranks = grid.pipeline_ranks;
                how.replicas = grid.replicas;
                how.shards = grid.shards;
                std::vector<outcome> out(static_cast<std::size_t>(grid.world()));
                try {
                  chevron::run_threads(how, [&](transport& comm) {
                    int const me = comm.topology().global_rank;
                    try {
                      with_info("over " + name + ", rank " + std::to_string(me), [&] {
                        get_ready(comm);
                        work(comm);
                      });
                    } catch (...) {
                      out[static_cast<std::size_t>(me)] = outcome_of(std::current_exception());
                      throw;
                    }
                  });
                } catch (...) {
                  // Known by rank.
                }
                return out;
              },
          .sends_wait = options.rendezvous};
}

/// Ranks that join through a store.
/// \param make make(where, store, watch) gives a transport with `close()`
template <class Make>
subject joined(std::string const& name, Make make) {
  using namespace std::chrono_literals;
  return {.name = name, .run_grid = [make, name](chevron::topology const& grid, body const& work) {
            std::vector<outcome> out;
            auto const thrown =
                thread_ranks::run(grid, [&](chevron::topology const& where, auto const& store, auto const& watch) {
                  with_info("over " + name + ", rank " + std::to_string(where.global_rank), [&] {
                    auto const comm = make(where, store, watch);
                    comm->deadline(100s);
                    get_ready(*comm);
                    work(*comm);
                    comm->close();
                  });
                });
            for (auto const& each : thrown) out.push_back(outcome_of(each));
            return out;
          }};
}

/// All transports. A new transport is one entry here, with the parts of the contract that it leaves open.
inline std::vector<subject> const& subjects() {
  using namespace std::chrono_literals;
  auto const gloo = [](std::string const& name, std::function<bool(int)> const& shares) {
    return joined(name, [=](chevron::topology const& where, auto const& store, auto const& watch) {
      return std::make_unique<chevron::gloo_transport>(where, store, watch,
                                                       chevron::gloo_options{.shared_memory = shares(where.global_rank)});
    });
  };
  static std::vector<subject> const all = [&] {
    std::vector<subject> out;
    out.push_back(threads("threads"));
    out.push_back(threads("threads with rendezvous", {.rendezvous = true, .longest_delay = 300us}));
    out.push_back(gloo("Gloo", [](int) { return false; }));
    out.back().sums_in_order = false;  // Gloo's ring
    out.back().compares_collectives = false;
    out.push_back(gloo("Gloo with shared memory", [](int) { return true; }));
    out.push_back(gloo("Gloo with shared memory but for one rank", [](int rank) { return rank != 1; }));
    out.back().sums_in_order = false;
    out.back().compares_collectives = false;
    out.push_back(joined("streams", [](chevron::topology const& where, auto const& store, auto const& watch) {
      return std::make_unique<chevron::stream_transport<chevron::host_streams>>(where, store, watch, 60000ms);
    }));
    out.back().keeps_every_stride = false;
    out.back().sees_sizes = false;
    out.back().compares_collectives = false;
    out.back().tells_waits = false;  // only of gathers and texts
    return out;
  }();
  return all;
}

/// Calls `check(transport)` for each of them.
template <class Check>
void for_each_transport(Check const& check) {
  for (subject const& each : subjects()) {
    INFO("over " << each.name);
    check(each);
  }
}

}  // namespace transport_contract
