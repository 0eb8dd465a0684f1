#pragma once

// Ranks of a test that may share memory, and may not.

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <chevron/transports/gloo/gloo_transport.hpp>

#include "support/thread_ranks.hpp"

#include <doctest/doctest.h>

namespace gloo_ranks {

/// Runs body(transport) on every rank, each with this deadline. \returns the exceptions of the ranks, in words
template <class Body>
std::vector<std::string> run(int pipeline_ranks, int replicas, std::chrono::milliseconds deadline, Body const& body) {
  auto const rank = [&](chevron::topology const& where, auto const& store, auto const& watch) {
    chevron::gloo_transport link(where, store, watch);
    link.deadline(deadline);
    body(link);
    link.close();
  };
  return thread_ranks::said(thread_ranks::run(pipeline_ranks, replicas, rank));
}

/// \returns the exceptions of the ranks, in words \param shared whether a rank shares its memory
inline std::vector<std::string> on_ranks(chevron::topology const& grid, std::function<bool(int)> const& shared,
                                         std::function<void(chevron::gloo_transport&)> const& body) {
  using namespace std::chrono_literals;
  return thread_ranks::said(thread_ranks::run(grid, [&](chevron::topology const& where, auto const& store, auto const& watch) {
    chevron::gloo_transport link(where, store, watch,
                                 {.address = "127.0.0.1", .join = 60s, .shared_memory = shared(where.global_rank)});
    link.deadline(60s);
    link.open({.activation = 0, .receive = 8, .send = 8});
    body(link);
    link.close();
  }));
}
inline std::vector<std::string> on_ranks(int pipeline_ranks, int replicas, std::function<bool(int)> const& shared,
                                         std::function<void(chevron::gloo_transport&)> const& body) {
  return on_ranks(chevron::topology{.pipeline_ranks = pipeline_ranks, .replicas = replicas}, shared, body);
}
inline bool all_share(int) { return true; }

inline void check_all_well(std::vector<std::string> const& thrown) {
  for (auto const& each : thrown) CHECK(each == "");
}

}  // namespace gloo_ranks
