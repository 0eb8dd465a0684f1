#include <ATen/ATen.h>

#include <chevron/run/comm/threads/run_threads.hpp>

#include <atomic>
#include <chrono>
#include <thread>

#include "support/retry.hpp"

#include <doctest/doctest.h>

namespace {

using chevron::action;
using chevron::kind;
using chevron::make_action;
using chevron::transport;
using namespace std::chrono_literals;

action const sent_forward = make_action(kind::send_forward, 0, 3), received_forward = make_action(kind::receive_forward, 1, 3);
action const sent_backward = make_action(kind::send_backward, 1, 3),
             received_backward = make_action(kind::receive_backward, 0, 3);

}  // namespace

TEST_CASE("two ranks that both wait for their sends: nothing without rendezvous, told at once with it") {
  auto const crossed = [](bool rendezvous) {
    chevron::run_threads({.pipeline_ranks = 2, .rendezvous = rendezvous, .longest_delay = 300us}, [](transport& comm) {
      comm.open({.activation = 0, .receive = 1, .send = 1});
      comm.begin_step(4);
      at::Tensor const t = at::ones({2});
      bool const first = comm.topology().global_rank == 0;
      comm.post_send(first ? 1 : 0, first ? sent_forward : sent_backward, 0, std::span(&t, 1));
      comm.wait_send(0);
      comm.post_receive(first ? 1 : 0, first ? received_backward : received_forward, 0);
      comm.receive(0);
    });
  };
  crossed(false);
  // The deadline is five minutes away.
  auto const begin = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH_AS(
      crossed(true),
      doctest::Contains("the ranks wait for each other, and none can go on: rank 0 waiting in step 4, 0SEND_F3 to rank 1; "
                        "rank 1 in step 4, 1SEND_B3 to rank 0. Remedy: every rank makes the same calls"),
      chevron::preflight_error);
  CHECK(std::chrono::steady_clock::now() - begin < 60s);
}

TEST_CASE("a rank that comes too late: a timeout that names it, and what others wait in") {
  retry::until_well([&](retry::complaints& wrong, int) {
    std::atomic<bool> told = false;
    auto const begin = std::chrono::steady_clock::now();
    retry::stopwatch const since;
    try {
      // Rank 2 has a grace in which it comes back.
      chevron::run_threads({.pipeline_ranks = 3, .deadline = 200ms, .grace = 60s}, [&](transport& comm) {
        comm.open({.activation = 0, .receive = 1, .send = 1});
        comm.begin_step(4);
        int const me = comm.topology().global_rank;
        try {
          if (me == 1) comm.deadline(60s);
          while (me == 2 && !told) std::this_thread::sleep_for(1ms);
          comm.post_receive((me + 1) % 3, make_action(kind::receive_forward, me, 3), 0);
          comm.receive(0);
        } catch (...) {
          told = true;
          throw;
        }
      });
      FAIL("nothing was thrown");
    } catch (chevron::timeout_error const& e) {
      std::string const text = e.what();
      INFO(text);
      CHECK(text.find("rank 0, step 4, 0RECV_F3: rank 2 did not answer within 200 ms") == 0);
      wrong.unless(text.find("; rank 1 waits in step 4, 1RECV_F3 from rank 2; this rank was waiting for 0RECV_F3 from rank 1") !=
                       std::string::npos,
                   "what rank 1 waits in: " + text);
    }
    CHECK(std::chrono::steady_clock::now() - begin >= 190ms);
    wrong.unless(since.spent() < 1s, "the deadline is kept");
  });
}

TEST_CASE("an error that one rank catches reaches the others all the same, and its exit code") {
  std::atomic<int> code = 0;
  CHECK_THROWS_WITH_AS(
      chevron::run_threads({.pipeline_ranks = 2},
                           [&](transport& comm) {
                             if (comm.topology().global_rank == 1) {
                               comm.fail(chevron::stage_error(chevron::exit_code::other, "stage 1 threw", {.rank = 1}));
                               CHECK_THROWS_AS(comm.check_usable(), chevron::usage_error);
                               return;
                             }
                             try {
                               comm.all_gather_text("x");
                             } catch (chevron::error const& e) {
                               code = e.code();
                               throw;
                             }
                           }),
      "rank 0, all_gather of texts: rank 1: stage 1 threw; this rank was waiting for all_gather of texts",
      chevron::peer_lost_error);
  CHECK(code == 1);
}

TEST_CASE("messages that do not belong together are refused") {
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 2},
                                            [](transport& comm) {
                                              comm.open({.activation = 0, .receive = 1, .send = 1});
                                              at::Tensor const t = at::ones({2});
                                              if (comm.topology().global_rank == 0) {
                                                comm.post_send(1, make_action(kind::send_forward, 0, 2), 0, std::span(&t, 1));
                                              } else {
                                                comm.post_receive(0, received_forward, 0);
                                                comm.receive(0);
                                              }
                                            }),
                       doctest::Contains("rank 0 sends 0SEND_F2 to rank 1 where rank 1 expects 1RECV_F3 from rank 0"),
                       chevron::preflight_error);
}

TEST_CASE("a rank that has ended is missed at once") {
  // Their waits would last five minutes.
  auto const begin = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 2},
                                            [](transport& comm) {
                                              comm.open({.activation = 0, .receive = 1, .send = 1});
                                              if (comm.topology().global_rank == 0) return;
                                              comm.post_receive(0, received_forward, 0);
                                              comm.receive(0);
                                            }),
                       "rank 1, 1RECV_F3: rank 0 has ended; this rank was waiting for 1RECV_F3 from rank 0",
                       chevron::peer_lost_error);
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 2},
                                            [](transport& comm) {
                                              if (comm.topology().global_rank == 0) comm.all_gather_text("here");
                                            }),
                       "rank 0, all_gather of texts: rank 1 has ended; this rank was waiting for all_gather of texts",
                       chevron::peer_lost_error);
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 1, .replicas = 2},
                                            [](transport& comm) {
                                              if (comm.topology().global_rank == 0) return;
                                              comm.start_all_reduce(0, at::ones({2}));
                                              comm.wait_bucket(0);
                                            }),
                       "rank 1, sum of gradients: rank 0 has ended; this rank was waiting for sum of gradients",
                       chevron::peer_lost_error);
  CHECK(std::chrono::steady_clock::now() - begin < 60s);
}

TEST_CASE("the layout of ranks") {
  std::atomic<int> seen = 0;
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
    if (comm.topology().global_rank == 3 && comm.topology().pipeline_rank() == 1 && comm.topology().replica() == 1 &&
        comm.topology().global_of(0) == 2)
      ++seen;
    seen += 10;
  });
  CHECK(seen == 41);
  CHECK_THROWS_AS(chevron::run_threads({.pipeline_ranks = 0}, [](transport&) {}), chevron::usage_error);
}
