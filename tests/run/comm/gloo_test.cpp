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

#include <chevron/run/comm/gloo/gloo_transport.hpp>

#include "support/retry.hpp"
#include "support/thread_ranks.hpp"

#include <doctest/doctest.h>

using namespace chevron;
using namespace std::chrono_literals;

namespace {

using steady = std::chrono::steady_clock;

using ranks::recv_b;
using ranks::recv_f;
using ranks::send_b;
using ranks::send_f;

/// What each rank threw.
std::vector<std::exception_ptr> on_ranks(int pipeline_ranks, int replicas, std::function<void(gloo_transport&)> const& body,
                                         slot_counts slots = {.activation = 0, .receive = 8, .send = 8}) {
  return ranks::run(pipeline_ranks, replicas, [&](topology const& where, auto const& store, auto const& watch) {
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

/// A rank that computes, and waits for nobody, until it hears of a failure.
[[noreturn]] void be_busy(gloo_transport& link, long next_step) {
  for (;; std::this_thread::sleep_for(5ms)) link.begin_step(next_step);
}

}  // namespace

TEST_CASE("messages of several tensors, of any dtype and shape, arrive bit for bit over several steps") {
  at::Tensor const wide = at::arange(24, at::kFloat).view({4, 6});
  std::vector<at::Tensor> const base{at::randn({3, 5}),
                                     wide.t(),  // not contiguous
                                     at::arange(7, at::kLong),
                                     at::tensor({1, 0, 1}).to(at::kBool),
                                     at::scalar_tensor(2.5, at::kDouble),
                                     at::empty({0, 3}),
                                     at::randn({2, 2}).to(at::kBFloat16),
                                     at::randn({9}).to(at::kHalf),
                                     at::full({1000, 100}, 7, at::kInt)};
  // 30 tensors of 5 dimensions: the header needs its second part.
  std::vector<at::Tensor> many;
  for (int i = 0; i < 30; ++i) many.push_back(at::full({1, 2, 1, 2, 1}, i));
  check_all_well(on_ranks(2, 1, [&](gloo_transport& link) {
    for (long step = 0; step < 4; ++step) {
      link.begin_step(step);
      if (link.topology().global_rank == 0) {
        std::vector<at::Tensor> values;
        for (auto const& t : base) values.push_back(t.is_floating_point() ? t + step : t);
        link.post_send(1, send_f(0, 0), 0, values);
        link.post_send(1, send_f(0, 1), 1, many);
        link.wait_send(0);
        link.wait_send(1);
      } else {
        // Posted in another order of slots than they were sent in: messages are told apart.
        link.post_receive(0, recv_f(1, 0), 5);
        link.post_receive(0, recv_f(1, 1), 2);
        auto const got_many = link.receive(2);
        REQUIRE(got_many.size() == many.size());
        for (std::size_t i = 0; i < many.size(); ++i) CHECK(at::equal(got_many[i], many[i]));
        auto const got = link.receive(5);
        REQUIRE(got.size() == base.size());
        for (std::size_t i = 0; i < base.size(); ++i) {
          auto const wanted = base[i].is_floating_point() ? base[i] + step : base[i];
          CHECK((got[i].scalar_type() == wanted.scalar_type()));
          CHECK((got[i].sizes() == wanted.sizes()));
          CHECK(at::equal(got[i], wanted));
          CHECK_FALSE(got[i].requires_grad());
        }
      }
    }
  }));
}

TEST_CASE("tensors that were taken keep their values when the slot is used again; others are reused") {
  check_all_well(on_ranks(2, 1, [&](gloo_transport& link) {
    std::vector<at::Tensor> kept;
    void* memory = nullptr;
    for (long step = 0; step < 4; ++step) {
      link.begin_step(step);
      for (int m = 0; m < 3; ++m) {
        int const rows = m == 2 ? 3 : 2;  // the last microbatch takes the remainder
        if (link.topology().global_rank == 0) {
          at::Tensor const value = at::full({rows, 4}, static_cast<double>(10 * step + m));
          link.post_send(1, send_f(0, m), 0, {&value, 1});
          link.wait_send(0);
        } else {
          link.post_receive(0, recv_f(1, m), 0);
          auto got = link.receive(0);
          CHECK(got[0].size(0) == rows);
          if (step < 2) {
            if (m == 0) kept.push_back(std::move(got[0]));  // taken
            if (m == 1) kept.push_back(got[0].view({-1}));  // its memory is held, as a graph holds it
          } else if (m == 0) {
            memory = got[0].data_ptr();
          } else if (m == 1) {
            CHECK(got[0].data_ptr() == memory);
          }
        }
      }
    }
    if (link.topology().global_rank == 1) {
      REQUIRE(kept.size() == 4);
      double const wanted[] = {0, 1, 10, 11};
      for (std::size_t i = 0; i < 4; ++i) CHECK(at::equal(kept[i], at::full_like(kept[i], wanted[i])));
    }
  }));
}

TEST_CASE("crossing messages do not close a circle, not in the first step either") {
  // Both send and wait for their sends before they take what comes; receives were posted before.
  check_all_well(on_ranks(2, 1, [&](gloo_transport& link) {
    int const me = link.topology().global_rank;
    for (long step = 0; step < 3; ++step) {
      link.begin_step(step);
      at::Tensor const mine = at::full({256, 256}, me);
      link.post_receive(1 - me, me == 0 ? recv_b(0, 0) : recv_f(1, 0), 0);
      link.post_send(1 - me, me == 0 ? send_f(0, 0) : send_b(1, 0), 0, {&mine, 1});
      link.wait_send(0);
      CHECK(link.receive(0)[0][0][0].item<float>() == static_cast<float>(1 - me));
    }
  }));
}

TEST_CASE("what was sent first may be written to as soon as wait_send has returned") {
  check_all_well(on_ranks(2, 1, [&](gloo_transport& link) {
    link.begin_step(0);
    if (link.topology().global_rank == 0) {
      at::Tensor value = at::full({100}, 1);
      link.post_send(1, send_f(0, 0), 0, {&value, 1});
      link.wait_send(0);
      value.fill_(2);
      double const mine = 0;
      std::vector<double> all(2);
      link.all_gather({&mine, 1}, all);  // the receiver looks only now
    } else {
      double const mine = 0;
      std::vector<double> all(2);
      link.all_gather({&mine, 1}, all);
      link.post_receive(0, recv_f(1, 0), 0);
      CHECK(at::equal(link.receive(0)[0], at::full({100}, 1)));
    }
  }));
}

TEST_CASE("sums run over the replicas of a stage, several at a time, and gathers over the world") {
  check_all_well(on_ranks(2, 2, [&](gloo_transport& link) {
    auto const& where = link.topology();
    for (long step = 0; step < 3; ++step) {
      link.begin_step(step);
      auto a = at::full({1000}, where.global_rank + 1), b = at::full({7, 3}, 10 * where.global_rank, at::kDouble);
      link.start_all_reduce(0, a);
      link.start_all_reduce(1, b);
      link.wait_all_reduce(1);
      link.wait_all_reduce(0);
      // Replicas {0, 2} and {1, 3}.
      CHECK(at::equal(a, at::full({1000}, where.pipeline_rank() == 0 ? 4 : 6)));
      CHECK(at::equal(b, at::full({7, 3}, where.pipeline_rank() == 0 ? 20 : 40, at::kDouble)));
      std::vector<double> const mine{1.0 / (where.global_rank + 1), static_cast<double>(step)};
      std::vector<double> all(8);
      link.all_gather(mine, all);
      for (int r = 0; r < 4; ++r) {
        CHECK(all[static_cast<std::size_t>(2 * r)] == 1.0 / (r + 1));
        CHECK(all[static_cast<std::size_t>(2 * r + 1)] == static_cast<double>(step));
      }
      auto const texts = link.all_gather_text(std::string(static_cast<std::size_t>(where.global_rank * 700), 'x') + "end");
      REQUIRE(texts.size() == 4);
      for (std::size_t r = 0; r < 4; ++r) CHECK(texts[r] == std::string(700 * r, 'x') + "end");
    }
    for (auto const& text : link.all_gather_text("")) CHECK(text.empty());
  }));
}

TEST_CASE("peers are of the same replica") {
  check_all_well(on_ranks(2, 2, [&](gloo_transport& link) {
    link.begin_step(0);
    at::Tensor const mine = at::full({1}, link.topology().replica());
    if (link.topology().pipeline_rank() == 0) {
      link.post_send(1, send_f(0, 0), 0, {&mine, 1});
      link.wait_send(0);
    } else {
      link.post_receive(0, recv_f(1, 0), 0);
      CHECK(link.receive(0)[0].item<float>() == static_cast<float>(link.topology().replica()));
    }
  }));
}

TEST_CASE("another shape, dtype or number of tensors than agreed is refused by the sender, and known to the receiver") {
  struct change {
    std::vector<at::Tensor> values;
    char const* words;
  };
  auto soonest = steady::duration::max();
  for (auto const& [values, words] :
       {change{{at::zeros({3, 4})}, "would send Float[3,4] to rank 1, but the first step agreed on Float[2,4]"},
        change{{at::zeros({2, 4}, at::kInt)}, "would send Int[2,4] to rank 1"},
        change{{at::zeros({2, 4}), at::zeros({1})}, "would send Float[2,4], Float[1] to rank 1"},
        change{{}, "would send nothing to rank 1"}}) {
    tries::stopwatch const since;
    // The receiver would wait a minute for what does not come.
    auto const thrown = on_ranks(2, 1, [&](gloo_transport& link) {
      for (long step = 0; step < 2; ++step) {
        link.begin_step(step);
        std::vector<at::Tensor> const agreed{at::zeros({2, 4})};
        if (link.topology().global_rank == 0) {
          link.post_send(1, send_f(0, 3), 0, step == 0 ? agreed : values);
          link.wait_send(0);
        } else {
          link.post_receive(0, recv_f(1, 3), 0);
          link.receive(0);
        }
      }
    });
    CHECK(text_of(thrown[0]).find(std::string("5: rank 0, step 1, 0SEND_F3: ") + words) == 0);
    CHECK(text_of(thrown[0]).find("Remedy: ") != std::string::npos);
    CHECK(text_of(thrown[1]).find("5: rank 1, step 1, 1RECV_F3: rank 0 would send in 0SEND_F3: ") == 0);
    soonest = std::min(soonest, since.spent());
  }
  CHECK(soonest < 3s);
}

TEST_CASE("opening anew forgets the shapes") {
  check_all_well(on_ranks(2, 1, [&](gloo_transport& link) {
    for (int rows : {2, 5}) {
      link.open({.activation = 0, .receive = 1, .send = 1});
      for (long step = 0; step < 2; ++step) {
        link.begin_step(step);
        at::Tensor const value = at::full({rows}, rows);
        if (link.topology().global_rank == 0) {
          link.post_send(1, send_f(0, 0), 0, {&value, 1});
          link.wait_send(0);
        } else {
          link.post_receive(0, recv_f(1, 0), 0);
          CHECK(at::equal(link.receive(0)[0], value));
        }
      }
    }
  }));
}

TEST_CASE("a deadline ends every kind of wait with timeout_error on all ranks, near its time") {
  using body = std::function<void(gloo_transport&)>;
  body const receive = [](gloo_transport& link) {
    link.post_receive(1, recv_b(0, 2), 0);
    link.receive(0);
  };
  body const sum = [](gloo_transport& link) {
    link.start_all_reduce(0, at::ones({10}));
    link.wait_all_reduce(0);
  };
  body const send = [](gloo_transport& link) {
    at::Tensor const value = at::ones({1000, 1000});
    link.begin_step(8);
    link.post_send(1, send_f(0, 2), 0, {&value, 1});
    link.wait_send(0);
  };
  struct wait_kind {
    char const* name;
    body waiting;
    char const* words;
  };
  for (auto const& [name, waiting, words] :
       {wait_kind{
            "receive", receive,
            "rank 0, step 7, 0RECV_B2: rank 1 did not answer within 800 ms; this rank was waiting for 0RECV_B2 from rank 1"},
        wait_kind{"sum", sum,
                  "rank 0, step 7, sum of gradients: rank 1 did not answer within 800 ms, nor did 2, 3; this rank was waiting "
                  "for sum of gradients"},
        wait_kind{
            "send", send,
            "rank 0, step 8, 0SEND_F2: rank 1 did not answer within 800 ms; this rank was waiting for 0SEND_F2 to rank 1"}}) {
    bool const waiting_is_send = std::string(name) == "send";
    tries::until_well([&](tries::complaints& wrong, int) {
      std::string said = "nothing was thrown";
      steady::duration spent{}, by_the_clock{};
      auto const thrown = on_ranks(2, 2, [&](gloo_transport& link) {
        link.begin_step(7);
        if (waiting_is_send) {
          // The first of each message, which has the header, is taken; the second is not.
          at::Tensor const value = at::ones({1000, 1000});
          if (link.topology().global_rank == 0) link.post_send(1, send_f(0, 2), 0, {&value, 1});
          if (link.topology().global_rank == 1) {
            link.post_receive(0, recv_f(1, 2), 0);
            link.receive(0);
          }
          if (link.topology().global_rank == 0) link.begin_step(8);
        }
        if (link.topology().global_rank != 0) be_busy(link, 8);
        link.deadline(800ms);
        auto const begin = steady::now();
        tries::stopwatch const since;
        try {
          waiting(link);
        } catch (timeout_error const& e) {
          said = e.what();
        }
        by_the_clock = steady::now() - begin;
        spent = since.spent();
        link.begin_step(9);  // throws what is known
      });
      INFO(std::string(name));
      for (auto const& each : thrown) {
        CHECK(each);
        wrong.unless(text_of(each).find("4: ") == 0, "exit code 4 on all ranks: " + text_of(each));
      }
      if (said != "nothing was thrown") CHECK(by_the_clock >= 790ms);
      wrong.unless(spent < 1800ms, "the deadline is kept");
      wrong.unless(said == words, std::string(words) + ", but: " + said);
    });
  }
}

TEST_CASE("different layouts are refused at the start") {
  auto const store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> said(4);
  std::vector<std::thread> ranks;
  for (int r = 0; r < 4; ++r) {
    ranks.emplace_back([&, r] {
      auto const watch = std::make_shared<failure_watch>(store, r, 4);
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

TEST_CASE("one rank alone needs no connections") {
  check_all_well(on_ranks(1, 1, [](gloo_transport& link) {
    link.begin_step(0);
    auto values = at::ones({3});
    link.start_all_reduce(0, values);
    link.wait_all_reduce(0);
    CHECK(at::equal(values, at::ones({3})));
    double const mine = 4;
    double all = 0;
    link.all_gather({&mine, 1}, {&all, 1});
    CHECK(all == 4);
    CHECK(link.all_gather_text("me") == std::vector<std::string>{"me"});
  }));
}

TEST_CASE("the first failure counts, on every rank") {
  auto const store = c10::make_intrusive<c10d::HashStore>();
  failure_watch first(store, 0, 3), second(store, 1, 3), third(store, 2, 3);
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
