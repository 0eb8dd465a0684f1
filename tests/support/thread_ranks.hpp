#pragma once

// Ranks as threads of a test, each with its rank in the job, a store and a failure monitor, as a process has.

#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/plan/action.hpp>
#include <chevron/run/comm/transport.hpp>

namespace thread_ranks {

inline chevron::action send_f(int stage, int m) { return make_action(chevron::kind::send_forward, stage, m); }
inline chevron::action recv_f(int stage, int m) { return make_action(chevron::kind::receive_forward, stage, m); }
inline chevron::action send_b(int stage, int m) { return make_action(chevron::kind::send_backward, stage, m); }
inline chevron::action recv_b(int stage, int m) { return make_action(chevron::kind::receive_backward, stage, m); }

/// Runs rank(where, store, watch) on every rank. \returns each rank's exception; null: none
template <class Rank>
std::vector<std::exception_ptr> run(chevron::topology const& grid, Rank const& rank) {
  auto const store = c10::make_intrusive<c10d::HashStore>();
  int const world = grid.world();
  std::vector<std::exception_ptr> thrown(static_cast<std::size_t>(world));
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      at::set_num_threads(1);
      auto const watch = std::make_shared<chevron::failure_monitor>(store, r, world);
      try {
        rank(chevron::topology{grid.pipeline_ranks, grid.replicas, r, grid.shards}, store, watch);
      } catch (...) {
        thrown[static_cast<std::size_t>(r)] = std::current_exception();
      }
    });
  }
  for (auto& each : threads) each.join();
  return thrown;
}

template <class Rank>
std::vector<std::exception_ptr> run(int pipeline_ranks, int replicas, Rank const& rank) {
  return run(chevron::topology{.pipeline_ranks = pipeline_ranks, .replicas = replicas}, rank);
}

/// In words; empty where nothing was thrown.
inline std::vector<std::string> said(std::vector<std::exception_ptr> const& thrown) {
  std::vector<std::string> out;
  for (auto const& each : thrown) {
    out.emplace_back();
    try {
      if (each) std::rethrow_exception(each);
    } catch (std::exception const& e) {
      out.back() = e.what();
    } catch (...) {
      out.back() = "an exception that is no std::exception";
    }
  }
  return out;
}

}  // namespace thread_ranks
