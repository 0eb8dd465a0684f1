// timeout: 120
#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chevron/transports/gloo/gloo_transport.hpp>

#include "support/retry.hpp"
#include "support/thread_ranks.hpp"

#include <doctest/doctest.h>

using namespace chevron;
using namespace std::chrono_literals;

namespace {

using thread_ranks::recv_f;
using thread_ranks::send_f;

/// Runs `body` on each rank; returns each rank's exception.
std::vector<std::exception_ptr> on_ranks(int pipeline_ranks, int replicas, std::function<void(gloo_transport&)> const& body,
                                         slot_counts slots = {.activation = 0, .receive = 8, .send = 8}) {
  return thread_ranks::run(pipeline_ranks, replicas, [&](topology const& where, auto const& store, auto const& watch) {
    gloo_transport link(where, store, watch, {.address = "127.0.0.1", .join = 60s});
    link.deadline(60s);
    link.open(slots);
    body(link);
    link.close();
  });
}

std::string text_of(std::exception_ptr const& e) {
  if (!e) return "nothing was thrown";
  try {
    std::rethrow_exception(e);
  } catch (error const& known) {
    return std::to_string(known.code()) + ": " + known.what();
  } catch (std::exception const& other) {
    return std::string("other: ") + other.what();
  }
}

void check_all_well(std::vector<std::exception_ptr> const& thrown) {
  for (auto const& each : thrown) CHECK_MESSAGE(!each, text_of(each));
}

/// A rank that computes, without waiting for other ranks, until it learns of a failure.
[[noreturn]] void be_busy(gloo_transport& link, long next_step) {
  for (;; std::this_thread::sleep_for(5ms)) link.begin_step(next_step);
}

}  // namespace

TEST_CASE("a slot's memory is used again where nobody holds what came") {
  check_all_well(on_ranks(2, 1, [&](gloo_transport& link) {
    void* memory = nullptr;
    for (long step = 0; step < 4; ++step) {
      link.begin_step(step);
      for (int m = 0; m < 2; ++m) {
        if (link.topology().global_rank == 0) {
          at::Tensor const value = at::full({2, 4}, m);
          link.post_send(1, send_f(0, m), 0, {&value, 1});
          link.wait_send(0);
        } else {
          link.post_receive(0, recv_f(1, m), 0);
          void* const here = link.receive(0)[0].data_ptr();
          if (m == 0) memory = here;
          CHECK(here == memory);
        }
      }
    }
  }));
}

TEST_CASE("a sum that ends by the deadline names all replicas that did not come, on all ranks") {
  retry::until_well([&](retry::complaints& wrong, int) {
    std::string said = "nothing was thrown";
    auto const thrown = on_ranks(2, 2, [&](gloo_transport& link) {
      link.begin_step(7);
      if (link.topology().global_rank != 0) be_busy(link, 8);
      link.deadline(800ms);
      try {
        link.start_all_reduce(0, at::ones({10}));
        link.wait_bucket(0);
      } catch (timeout_error const& e) {
        said = e.what();
      }
      link.begin_step(9);  // throws the published failure
    });
    for (auto const& each : thrown) {
      CHECK(each);
      wrong.unless(text_of(each).find("4: ") == 0, "exit code 4 on all ranks: " + text_of(each));
    }
    wrong.unless(
        said ==
            "rank 0, step 7, sum of gradients: rank 1 did not answer within 800 ms, nor did rank 2, 3; this rank was waiting "
            "for sum of gradients",
        "ranks 1, 2, 3 are named: " + said);
  });
}

TEST_CASE("different layouts are refused at the start") {
  auto const store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> said(4);
  std::vector<std::thread> ranks;
  for (int r = 0; r < 4; ++r) {
    ranks.emplace_back([&, r] {
      auto const watch = std::make_shared<failure_monitor>(store, r, 4);
      try {
        gloo_transport link({.pipeline_ranks = r == 3 ? 4 : 2, .replicas = r == 3 ? 1 : 2, .global_rank = r}, store, watch,
                            {.address = "127.0.0.1", .join = 60s});
      } catch (...) {
        said[static_cast<std::size_t>(r)] = text_of(std::current_exception());
      }
    });
  }
  for (auto& each : ranks) each.join();
  for (auto const& each : said) {
    CHECK(each.find("5: rank ") == 0);
    CHECK(each.find("Remedy: give every rank the same flags") != std::string::npos);
  }
}

TEST_CASE("the first failure counts, on every rank") {
  auto const store = c10::make_intrusive<c10d::HashStore>();
  failure_monitor first(store, 0, 3), second(store, 1, 3), third(store, 2, 3);
  auto const a = first.report({.code = 6, .rank = 0, .step = 4, .action = "0F1", .reason = "rank 0: not finite"});
  auto const b = second.report({.code = 3, .rank = 0, .reason = "rank 0 was lost"});
  CHECK(a.reason == "rank 0: not finite");
  CHECK(b.reason == a.reason);
  CHECK(b.code == 6);
  CHECK(b.step == 4);
  for (int i = 0; i < 6000 && !third.failed(); ++i) std::this_thread::sleep_for(10ms);
  REQUIRE(third.failed());
  CHECK_THROWS_WITH_AS(third.throw_if_failed({.peer = 1, .what = recv_f(2, 5), .words = nullptr, .step = 4}),
                       "rank 2, step 4, 2RECV_F5: rank 0: not finite; this rank was waiting for 2RECV_F5 from rank 1",
                       numerical_error);
}
