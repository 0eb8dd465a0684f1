#include <ATen/ATen.h>

#include <chevron/run/threads.hpp>

#include <atomic>
#include <chrono>
#include <thread>

#include "tries.hpp"

#include <doctest/doctest.h>

namespace {

using chevron::action;
using chevron::kind;
using chevron::make_action;
using chevron::transport;
using namespace std::chrono_literals;

action const sent_forward = make_action(kind::send_forward, 0, 3), received_forward = make_action(kind::receive_forward, 1, 3);
action const sent_backward = make_action(kind::send_backward, 1, 3), received_backward = make_action(kind::receive_backward, 0, 3);

}  // namespace

TEST_CASE("tensors are handed over without a copy, in the order of the sends") {
  for (bool const rendezvous : {false, true}) {
    void* sent = nullptr;
    std::atomic<bool> right = false;
    chevron::run_threads({.pipeline_ranks = 2, .rendezvous = rendezvous, .longest_delay = 300us}, [&](transport& line) {
      line.open({.activation = 0, .receive = 4, .send = 4});
      if (line.where().global_rank == 0) {
        for (std::uint16_t i = 0; i < 4; ++i) {
          at::Tensor const t = at::full({2}, static_cast<double>(i));
          if (i == 3) sent = t.data_ptr();
          line.post_send(1, sent_forward, i, std::span(&t, 1));
        }
        for (std::uint16_t i = 0; i < 4; ++i) line.wait_send(i);
      } else {
        for (std::uint16_t i = 0; i < 4; ++i) line.post_receive(0, received_forward, i);
        bool in_order = true;
        void* last = nullptr;
        for (std::uint16_t i = 0; i < 4; ++i) {
          auto const got = line.receive(i);
          in_order = in_order && got.size() == 1 && got[0][1].item<double>() == i;
          last = got[0].data_ptr();
        }
        right = in_order && last == sent;
      }
    });
    CHECK(right);
  }
}

TEST_CASE("two ranks that both wait for their sends: nothing without rendezvous, told at once with it") {
  auto const crossed = [](bool rendezvous) {
    chevron::run_threads({.pipeline_ranks = 2, .rendezvous = rendezvous, .longest_delay = 300us}, [](transport& line) {
      line.open({.activation = 0, .receive = 1, .send = 1});
      line.begin_step(4);
      at::Tensor const t = at::ones({2});
      bool const first = line.where().global_rank == 0;
      line.post_send(first ? 1 : 0, first ? sent_forward : sent_backward, 0, std::span(&t, 1));
      line.wait_send(0);
      line.post_receive(first ? 1 : 0, first ? received_backward : received_forward, 0);
      line.receive(0);
    });
  };
  crossed(false);
  // The deadline is five minutes away.
  auto const begin = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH_AS(crossed(true),
                       doctest::Contains("the ranks wait for each other, and none can go on: rank 0 waiting in step 4, 0SEND_F3 to rank 1; "
                                         "rank 1 in step 4, 1SEND_B3 to rank 0. Remedy: every rank makes the same calls"),
                       chevron::preflight_error);
  CHECK(std::chrono::steady_clock::now() - begin < 60s);
}

TEST_CASE("a rank that comes too late: a timeout that names it, and what others wait in") {
  tries::until_well([&](tries::complaints& wrong, int) {
    std::atomic<bool> told = false;
    auto const begin = std::chrono::steady_clock::now();
    tries::stopwatch const since;
    try {
      // Rank 2 has a grace in which it comes back.
      chevron::run_threads({.pipeline_ranks = 3, .deadline = 200ms, .grace = 60s}, [&](transport& line) {
        line.open({.activation = 0, .receive = 1, .send = 1});
        line.begin_step(4);
        int const me = line.where().global_rank;
        try {
          if (me == 1) line.deadline(60s);
          while (me == 2 && !told) std::this_thread::sleep_for(1ms);
          line.post_receive((me + 1) % 3, make_action(kind::receive_forward, me, 3), 0);
          line.receive(0);
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

TEST_CASE("ranks that make different calls at once are told apart by their names") {
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 2}, [](transport& line) {
                         chevron::collective_scope const outer(line, "training");
                         chevron::collective_scope const doing(line, line.where().global_rank == 0 ? "evaluation" : "saving");
                         line.gather_text("x");
                       }),
                       doctest::Contains("in saving"), chevron::preflight_error);
  // One gathers numbers, the other texts: each waits for what the other does not begin.
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 2}, [](transport& line) {
                         double const one = 1;
                         double all[2];
                         chevron::collective_scope const doing(line, line.where().global_rank == 0 ? "evaluation" : "saving");
                         if (line.where().global_rank == 0) line.gather({&one, 1}, all);
                         if (line.where().global_rank == 1) line.gather_text("x");
                       }),
                       doctest::Contains("rank 0 waiting in evaluation; rank 1 in saving"), chevron::preflight_error);
}

TEST_CASE("an error that one rank catches reaches the others all the same, and its exit code") {
  std::atomic<int> code = 0;
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 2}, [&](transport& line) {
                         if (line.where().global_rank == 1) {
                           line.fail(chevron::stage_error(chevron::exit_code::other, "stage 1 threw", {.rank = 1}));
                           CHECK_THROWS_AS(line.check_usable(), chevron::usage_error);
                           return;
                         }
                         try {
                           line.gather_text("x");
                         } catch (chevron::error const& e) {
                           code = e.code();
                           throw;
                         }
                       }),
                       "rank 0, gather of texts: rank 1: stage 1 threw; this rank was waiting for gather of texts", chevron::peer_lost);
  CHECK(code == 1);
}

TEST_CASE("messages that do not belong together are refused") {
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 2}, [](transport& line) {
                         line.open({.activation = 0, .receive = 1, .send = 1});
                         at::Tensor const t = at::ones({2});
                         if (line.where().global_rank == 0) {
                           line.post_send(1, make_action(kind::send_forward, 0, 2), 0, std::span(&t, 1));
                         } else {
                           line.post_receive(0, received_forward, 0);
                           line.receive(0);
                         }
                       }),
                       doctest::Contains("rank 0 sends 0SEND_F2 to rank 1 where rank 1 expects 1RECV_F3 from rank 0"), chevron::preflight_error);
}

TEST_CASE("a rank that has ended is missed at once") {
  // Their waits would last five minutes.
  auto const begin = std::chrono::steady_clock::now();
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 2}, [](transport& line) {
                         line.open({.activation = 0, .receive = 1, .send = 1});
                         if (line.where().global_rank == 0) return;
                         line.post_receive(0, received_forward, 0);
                         line.receive(0);
                       }),
                       "rank 1, 1RECV_F3: rank 0 has ended; this rank was waiting for 1RECV_F3 from rank 0", chevron::peer_lost);
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 2}, [](transport& line) {
                         if (line.where().global_rank == 0) line.gather_text("here");
                       }),
                       "rank 0, gather of texts: rank 1 has ended; this rank was waiting for gather of texts", chevron::peer_lost);
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 1, .replicas = 2}, [](transport& line) {
                         if (line.where().global_rank == 0) return;
                         line.start_sum(0, at::ones({2}));
                         line.wait_sum(0);
                       }),
                       "rank 1, sum of gradients: rank 0 has ended; this rank was waiting for sum of gradients", chevron::peer_lost);
  CHECK(std::chrono::steady_clock::now() - begin < 60s);
}

TEST_CASE("sums over replicas add in the order of replicas, several at once, again and again") {
  std::atomic<int> wrong = 0;
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 3}, [&](transport& line) {
    float const parts[3] = {1e8f, -1e8f, 1.0f};  // only (r0 + r1) + r2 gives 1
    for (int round = 0; round < 50; ++round) {
      at::Tensor buckets[4];
      for (int b = 0; b < 4; ++b) {
        buckets[b] = at::full({3}, parts[line.where().replica()] * static_cast<float>(b + 1 + 4 * line.where().pipeline_rank()));
        line.start_sum(b, buckets[b]);
      }
      for (int b = 0; b < 4; ++b) {
        line.wait_sum(b);
        if (buckets[b][2].item<float>() != static_cast<float>(b + 1 + 4 * line.where().pipeline_rank())) ++wrong;
      }
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("gathers bring everybody's numbers and texts, by global rank") {
  std::atomic<int> wrong = 0;
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& line) {
    int const me = line.where().global_rank;
    for (int round = 0; round < 50; ++round) {
      double const mine[2] = {me + 10.0 * round, -me - 0.5};
      double all[8];
      line.gather(mine, all);
      for (int r = 0; r < 4; ++r) wrong += all[2 * r] != r + 10.0 * round || all[2 * r + 1] != -r - 0.5;
      auto const texts = line.gather_text(std::string(static_cast<std::size_t>(me * 3), 'x'));
      for (std::size_t r = 0; r < 4; ++r) wrong += texts.at(r).size() != 3 * r;
    }
  });
  CHECK(wrong == 0);
}

TEST_CASE("the layout of ranks") {
  std::atomic<int> seen = 0;
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& line) {
    if (line.where().global_rank == 3 && line.where().pipeline_rank() == 1 && line.where().replica() == 1 && line.where().global_of(0) == 2) ++seen;
    seen += 10;
  });
  CHECK(seen == 41);
  CHECK_THROWS_AS(chevron::run_threads({.pipeline_ranks = 0}, [](transport&) {}), chevron::usage_error);
}
