#pragma once

// The errors with which the ranks of a failing job end, over every transport.

#include "support/gloo_ranks.hpp"
#include "support/thread_ranks.hpp"

#include <chrono>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include <chevron/run/comm/threads/run_threads.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/transports/streams/stream_transport.hpp>
#include "host_streams.hpp"

#include <doctest/doctest.h>

namespace rank_ends {

using job = std::function<void(chevron::transport&)>;

/// The exception of each rank, in words, and its exit code.
struct ends {
  std::vector<std::string> said;
  std::vector<int> codes;
};

enum class over { threads, gloo, streams };

inline ends run(over which, int ranks, int replicas, job const& body) {
  auto const world = static_cast<std::size_t>(ranks * replicas);
  ends out{std::vector<std::string>(world), std::vector<int>(world, 0)};
  // A failed rank waits for all ranks, so that each rank reports the failure that it found itself.
  auto const guarded = [&](chevron::transport& comm) {
    auto const me = static_cast<std::size_t>(comm.topology().global_rank);
    try {
      body(comm);
    } catch (chevron::error const& e) {
      out.said[me] = e.what();
      out.codes[me] = e.code();
    }
    comm.all_gather_text("over");
  };
  if (which == over::threads) {
    chevron::run_threads({.pipeline_ranks = ranks, .replicas = replicas, .deadline = std::chrono::seconds(60)}, guarded);
  } else if (which == over::gloo) {
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(ranks, replicas, gloo_ranks::all_share, guarded));
  } else {
    gloo_ranks::check_all_well(thread_ranks::said(
        thread_ranks::run(ranks, replicas, [&](chevron::topology const& where, auto const& store, auto const& watch) {
          chevron::stream_transport<chevron::host_streams> comm(where, store, watch, std::chrono::seconds(60));
          guarded(comm);
          comm.close();
        })));
  }
  return out;
}

inline void check_all_say(ends const& e, std::string const& words, int code = 5) {
  for (std::size_t r = 0; r < e.said.size(); ++r) {
    CAPTURE(r);
    CHECK_MESSAGE(e.said[r].find(words) != std::string::npos, e.said[r]);
    CHECK(e.codes[r] == code);
  }
}
inline void check_all_well(ends const& e) {
  for (auto const& each : e.said) CHECK(each == "");
}

}  // namespace rank_ends
