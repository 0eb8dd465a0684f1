// timeout: 300
// waits: deadlines run out
// The contract of include/chevron/run/comm/transport.hpp, for every transport (tests/support/contract_subjects.hpp).
#include "support/contract_subjects.hpp"
#include "support/retry.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

namespace {

using namespace transport_contract;
using namespace std::chrono_literals;
using thread_ranks::recv_b;
using thread_ranks::recv_f;
using thread_ranks::send_b;
using thread_ranks::send_f;
using tensors = std::vector<at::Tensor>;

void check_all_well(std::vector<outcome> const& all) {
  for (outcome const& each : all) CHECK(each.text == "");
}
bool contains(std::string const& text, std::string const& part) { return text.find(part) != std::string::npos; }

int rank_in(transport const& comm) { return comm.topology().pipeline_rank(); }

/// All ranks come here before any goes on.
void meet(transport& comm) { comm.all_gather({}, {}); }

void send(transport& comm, int peer, chevron::action what, std::uint16_t slot, tensors const& values) {
  comm.post_send(peer, what, slot, values);
}
at::Tensor number(double value, std::int64_t size = 5) { return at::full({size}, value); }

/// Sends one message from rank 0 to rank 1, from slot 0 to slot 0; returns the received tensors on rank 1.
tensors pass(transport& comm, int micro_batch, tensors const& values) {
  if (rank_in(comm) == 0) {
    send(comm, 1, send_f(0, micro_batch), 0, values);
    comm.wait_send(0);
    return {};
  }
  if (rank_in(comm) > 1) return {};
  comm.post_receive(0, recv_f(1, micro_batch), 0);
  auto const came = comm.receive(0);
  return {came.begin(), came.end()};
}

/// Waits outside of the transport.
template <class Done>
void sleep_until(Done const& done) {
  for (int naps = 0; naps < 12000 && !done(); ++naps) std::this_thread::sleep_for(5ms);
}

}  // namespace

TEST_CASE("messages of an edge come in the order of their sends, several under way in both directions, in each replica") {
  for_each_transport([](subject const& over) {
    check_all_well(over.run(3, 2, [](transport& comm) {
      int const me = rank_in(comm), last = 2;
      std::uint16_t const under_way = 4;
      auto const value = [&](long step, int m) { return static_cast<double>(1000 * comm.topology().replica() + 100 * step + m); };
      for (long step = 0; step < 4; ++step) {
        comm.begin_step(step);
        // Slots 0 to 3 for messages from below, 4 to 7 for messages from above.
        for (std::uint16_t m = 0; m < under_way; ++m) {
          if (me > 0) comm.post_receive(me - 1, recv_f(me, m), m);
        }
        for (std::uint16_t m = 0; m < under_way; ++m) {
          at::Tensor const x = me == 0 ? number(value(step, m)) : comm.receive(m)[0];
          CHECK(at::equal(x, number(value(step, m) + me)));
          if (me < last) send(comm, me + 1, send_f(me, m), m, {x + 1});
        }
        for (std::uint16_t m = 0; m < under_way; ++m) {
          if (me < last) comm.post_receive(me + 1, recv_b(me, m), static_cast<std::uint16_t>(4 + m));
        }
        for (std::uint16_t m = 0; m < under_way; ++m) {
          auto const slot = static_cast<std::uint16_t>(4 + m);
          at::Tensor const x = me == last ? number(-value(step, m)) : comm.receive(slot)[0];
          CHECK(at::equal(x, number(-value(step, m) - (last - me))));
          if (me > 0) send(comm, me - 1, send_b(me, m), slot, {x - 1});
        }
        for (std::uint16_t m = 0; m < under_way; ++m) {
          if (me < last) comm.wait_send(m);
          if (me > 0) comm.wait_send(static_cast<std::uint16_t>(4 + m));
        }
      }
    }));
  });
}

TEST_CASE("messages that cross close no circle, in the first step neither") {
  for_each_transport([](subject const& over) {
    check_all_well(over.run(2, 1, [](transport& comm) {
      int const me = rank_in(comm);
      for (long step = 0; step < 3; ++step) {
        comm.begin_step(step);
        comm.post_receive(1 - me, me == 0 ? recv_b(0, 0) : recv_f(1, 0), 0);
        send(comm, 1 - me, me == 0 ? send_f(0, 0) : send_b(1, 0), 0, {number(me, 1 << 16)});
        comm.wait_send(0);
        CHECK(at::equal(comm.receive(0)[0], number(1 - me, 1 << 16)));
      }
    }));
  });
}

TEST_CASE("what a receiver keeps stays as it came: the next receives of its slot get other memory") {
  for_each_transport([](subject const& over) {
    check_all_well(over.run(2, 1, [](transport& comm) {
      std::vector<std::pair<at::Tensor, double>> kept;
      for (long step = 0; step < 4; ++step) {
        comm.begin_step(step);
        for (int m = 0; m < 3; ++m) {
          double const value = 10.0 * static_cast<double>(step) + m;
          if (rank_in(comm) == 0) {
            pass(comm, m, {number(value)});
            continue;
          }
          comm.post_receive(0, recv_f(1, m), 0);
          auto const came = comm.receive(0);
          // Taken; held by a view only, as a graph holds it; or left to the slot.
          if (m == 0) kept.emplace_back(std::move(came[0]), value);
          if (m == 1) kept.emplace_back(came[0].view({1, -1}), value);
        }
      }
      for (auto const& [tensor, value] : kept) CHECK(at::equal(tensor.view({-1}), number(value)));
    }));
  });
}

TEST_CASE("a sent tensor lives until it is sent, nobody writes to it, and it is its sender's again after wait_send") {
  for_each_transport([](subject const& over) {
    std::atomic<void*> sent = nullptr;
    check_all_well(over.run(2, 1, [&](transport& comm) {
      for (long step = 0; step < 4; ++step) {
        auto const value = static_cast<double>(step);
        comm.begin_step(step);
        if (rank_in(comm) == 0) {
          tensors values{number(value, 1000), number(value + 0.5, 1000)};
          sent = values[0].data_ptr();
          comm.post_send(1, send_f(0, 0), 0, values);
          values[0] = at::Tensor();
          for (int i = 0; i < 20; ++i) number(-1, 1000);  // would reuse the memory of a freed tensor
          comm.wait_send(0);
          CHECK(at::equal(values[1], number(value + 0.5, 1000)));
          if (!comm.is_zero_copy()) values[1].fill_(-1);
          meet(comm);
        } else {
          std::this_thread::sleep_for(5ms);
          comm.post_receive(0, recv_f(1, 0), 0);
          auto const came = comm.receive(0);
          CHECK((came[0].data_ptr() == sent) == comm.is_zero_copy());
          meet(comm);
          CHECK(at::equal(came[0], number(value, 1000)));
          CHECK(at::equal(came[1], number(value + 0.5, 1000)));
        }
      }
    }));
  });
}

TEST_CASE("tensors of any dtype, size and number arrive bit for bit") {
  std::vector<tensors> messages{
      {},
      {at::Tensor()},
      {at::randn({3, 5}), at::Tensor(), at::arange(7, at::kLong), at::tensor({1, 0, 1}).to(at::kBool),
       at::scalar_tensor(2.5, at::kDouble), at::empty({0, 3}), at::randn({2, 2}).to(at::kBFloat16), at::randn({9}).to(at::kHalf),
       at::full({100, 10}, 7, at::kInt), at::complex(at::arange(6, at::kFloat), at::ones({6}))},
      tensors(30, at::full({1, 2, 1, 2, 1}, 3)),  // more shapes than any header has room for
  };
  for (std::int64_t const bytes : {0, 1, 63, 64, 4097, 1 << 20, (1 << 20) + 1})
    messages.push_back({at::randint(0, 255, {bytes}, at::kByte)});
  for_each_transport([&](subject const& over) {
    check_all_well(over.run(2, 1, [&](transport& comm) {
      for (long step = 0; step < 3; ++step) {
        comm.begin_step(step);
        for (std::size_t m = 0; m < messages.size(); ++m) {
          tensors wanted;
          for (at::Tensor const& t : messages[m])
            wanted.push_back(t.defined() && t.is_floating_point() ? t + static_cast<double>(step) : t);
          auto const came = pass(comm, static_cast<int>(m), wanted);
          if (rank_in(comm) == 0) continue;
          REQUIRE(came.size() == wanted.size());
          for (std::size_t i = 0; i < came.size(); ++i) {
            INFO("message " << m << ", tensor " << i);
            REQUIRE(came[i].defined() == wanted[i].defined());
            if (!came[i].defined()) continue;
            CHECK((came[i].scalar_type() == wanted[i].scalar_type()));
            CHECK((came[i].sizes() == wanted[i].sizes()));
            CHECK(at::equal(came[i], wanted[i]));
          }
        }
      }
    }));
  });
}

TEST_CASE("tensors keep their strides: transposed, channels_last, with gaps, expanded, conjugated; also where they change") {
  at::Tensor const x = at::arange(120, at::kFloat).view({2, 3, 4, 5});
  at::Tensor const numbers = at::complex(at::arange(6, at::kFloat), at::arange(6, at::kFloat) + 1).view({2, 3});
  tensors const base{x.permute({2, 0, 3, 1}), x.contiguous(at::MemoryFormat::ChannelsLast), x.narrow(3, 1, 2),
                     x.select(1, 0).unsqueeze(1).expand({2, 9, 4, 5}), numbers.conj()};
  std::size_t const expanded = 3;
  for_each_transport([&](subject const& over) {
    check_all_well(over.run(2, 1, [&](transport& comm) {
      for (long step = 0; step < 4; ++step) {
        comm.begin_step(step);
        tensors values = base;
        if (step == 3) {
          for (at::Tensor& t : values) t = t.resolve_conj().contiguous();
        }
        auto const came = pass(comm, 0, values);
        for (std::size_t i = 0; i < came.size(); ++i) {
          INFO("step " << step << ", tensor " << i);
          CHECK(at::equal(came[i].resolve_conj(), values[i].resolve_conj()));
          if (over.keeps_every_stride || (step < 3 && i != expanded)) CHECK((came[i].strides() == values[i].strides()));
          if (!over.keeps_every_stride && i == expanded) CHECK(came[i].is_contiguous());
          if (!over.keeps_every_stride && i != expanded) CHECK((came[i].strides() == base[i].strides()));
        }
      }
    }));
  });
}

TEST_CASE("another shape, dtype or number of tensors than agreed is refused before it is sent, and all are told") {
  struct change {
    tensors values;
    char const* words;
  };
  for_each_transport([](subject const& over) {
    for (auto const& [values, words] :
         {change{{at::zeros({3, 4})},
                 "would send Float[3,4] to rank 1, but the first step agreed on Float[2,4]. Remedy: a stage whose outputs' "
                 "shapes follow from the batch's shapes alone; a tensor whose size depends on values is padded"},
          change{{at::zeros({2, 4}, at::kInt)},
                 "would send Int[2,4] to rank 1, but the first step agreed on Float[2,4]. Remedy: "},
          change{{at::zeros({2, 4}), at::zeros({1})}, "would send Float[2,4], Float[1] to rank 1"},
          change{{at::Tensor()}, "would send no tensor to rank 1"}, change{{}, "would send nothing to rank 1"}}) {
      retry::stopwatch const since;
      auto const all = over.run(2, 1, [&, &changed = values](transport& comm) {
        for (long step = 0; step < 2; ++step) {
          comm.begin_step(step);
          auto const came = pass(comm, 3, step == 0 ? tensors{at::zeros({2, 4})} : changed);
          if (rank_in(comm) == 1) CHECK(came.size() == (step == 0 ? 1 : changed.size()));
        }
      });
      CHECK(all[0].text.find(std::string("rank 0, step 1, 0SEND_F3: ") + words) == 0);
      INFO(all[1].text);
      // Where a send does not wait, its rank may be a step ahead.
      CHECK(all[1].text.find("rank 1, step ") == 0);
      CHECK(all[1].text.find(", 1RECV_F3: rank 0, step 1, 0SEND_F3: would send ") == std::strlen("rank 1, step 1"));
      for (outcome const& each : all) CHECK(each.code == static_cast<int>(chevron::exit_code::preflight));
      CHECK(since.spent() < 60s);  // by far not the deadline
    }
  });
}

TEST_CASE("opened again, a transport takes other shapes, other slots and other edges") {
  for_each_transport([](subject const& over) {
    check_all_well(over.run(2, 1, [](transport& comm) {
      for (int turn = 0; turn < 4; ++turn) {
        comm.connect(std::vector<chevron::edge>{{0, 1}, {1, 0}});
        std::uint16_t const slot = turn % 2 == 0 ? 0 : 11;
        comm.open({.activation = 0, .receive = slot + 1, .send = slot + 1});
        for (long step = 0; step < 3; ++step) {
          comm.begin_step(3 * turn + step);
          at::Tensor const value = number(turn + 0.25 * static_cast<double>(step), turn + 2);
          if (rank_in(comm) == 0) {
            send(comm, 1, send_f(0, 0), slot, {value});
            comm.wait_send(slot);
          } else {
            comm.post_receive(0, recv_f(1, 0), slot);
            CHECK(at::equal(comm.receive(slot)[0], value));
          }
        }
      }
    }));
  });
}

TEST_CASE(
    "gathers bring everybody's numbers, none or many, in two halves with other calls between them, in a world of any size") {
  for_each_transport([](subject const& over) {
    for (auto const& [pipeline_ranks, replicas] : {std::pair{1, 1}, std::pair{2, 2}, std::pair{3, 1}}) {
      check_all_well(over.run(pipeline_ranks, replicas, [](transport& comm) {
        int const me = comm.topology().global_rank, world = comm.topology().world();
        for (std::size_t const count : {0, 1, 120, 121, 8183, 8190, 20000}) {  // also about 1 KiB and 64 KiB, at which ways part
          auto const numbers = [&](int r, double kind) { return std::vector<double>(count, kind + r); };
          auto const all_of = [&](double kind) {
            std::vector<double> out;
            for (int r = 0; r < world; ++r) {
              auto const part = numbers(r, kind);
              out.insert(out.end(), part.begin(), part.end());
            }
            return out;
          };
          for (int round = 0; round < 4; ++round) {
            comm.begin_step(round);
            std::vector<double> early(count * static_cast<std::size_t>(world)), all = early;
            auto mine = numbers(me, 100 + round);
            comm.start_all_gather(mine);
            std::fill(mine.begin(), mine.end(), -1);
            if (me == round % world) std::this_thread::sleep_for(1ms);
            at::Tensor const sum = at::ones({3});
            comm.start_all_reduce(0, sum);
            comm.all_gather(numbers(me, 200 + round), all);
            CHECK(all == all_of(200 + round));
            auto const texts = comm.all_gather_text(std::to_string(me));
            comm.wait_bucket(0);
            comm.begin_step(round + 1);
            comm.finish_all_gather(early);
            CHECK(early == all_of(100 + round));
            CHECK(texts.back() == std::to_string(world - 1));
            CHECK(at::equal(sum, at::full({3}, comm.topology().replicas)));
          }
        }
      }));
    }
  });
}

TEST_CASE("gathers one right after the other do not run into each other") {
  for_each_transport([](subject const& over) {
    check_all_well(over.run(2, 2, [](transport& comm) {
      std::vector<double> all(4 * 500);
      int wrong = 0;
      for (int round = 0; round < 100; ++round) {
        comm.all_gather(std::vector<double>(500, round + 1000 * comm.topology().global_rank), all);
        for (std::size_t i = 0; i < all.size(); ++i)
          wrong += all[i] != static_cast<double>(static_cast<std::size_t>(round) + 1000 * (i / 500));
      }
      CHECK(wrong == 0);
    }));
  });
}

TEST_CASE("texts of different lengths, long ones and none") {
  for_each_transport([](subject const& over) {
    check_all_well(over.run(2, 2, [](transport& comm) {
      auto const me = static_cast<std::size_t>(comm.topology().global_rank);
      for (std::size_t const length : {0, 1, 700, 200000}) {
        auto const texts =
            comm.all_gather_text(std::string(me * length, 'x') + (length == 1 ? "" : std::string(1, '\0') + "end"));
        REQUIRE(texts.size() == 4);
        for (std::size_t r = 0; r < 4; ++r)
          CHECK((texts[r] == std::string(r * length, 'x') + (length == 1 ? "" : std::string(1, '\0') + "end")));
      }
      for (auto const& text : comm.all_gather_text("")) CHECK(text == "");
    }));
  });
}

TEST_CASE("what a rank gathers into has room for all, and a second half has a first") {
  for_each_transport([](subject const& over) {
    check_all_well(over.run(2, 1, [](transport& comm) {
      double const mine[2] = {1, 2};
      double all[5];
      CHECK_THROWS_WITH_AS(comm.all_gather(mine, all),
                           doctest::Contains("gather of 2 numbers needs room for 2 times as many, not for 5. Remedy: room for 4"),
                           chevron::usage_error);
      CHECK_THROWS_AS(comm.finish_all_gather(std::span(all, 4)), chevron::usage_error);
      comm.start_all_gather(mine);
      CHECK_THROWS_AS(comm.finish_all_gather(std::span(all, 3)), chevron::usage_error);
      comm.finish_all_gather(std::span(all, 4));
      CHECK(all[3] == 2);
      CHECK_THROWS_AS(comm.finish_all_gather(std::span(all, 4)), chevron::usage_error);
    }));
  });
}

TEST_CASE("gathers of different sizes are refused, not mixed up") {
  for_each_transport([](subject const& over) {
    if (!over.sees_sizes) return;
    for (std::size_t const more : {1, 1000}) {
      auto const all = over.run(2, 1, [&](transport& comm) {
        std::vector<double> const mine(comm.topology().global_rank == 0 ? 2 : 2 + more);
        std::vector<double> room(2 * mine.size());
        comm.all_gather(mine, room);
      });
      for (outcome const& each : all) {
        INFO(each.text);
        auto const theirs = std::to_string(16 + 8 * more);
        CHECK((contains(each.text, "rank 1 gathers " + theirs + " bytes where rank 0 gathers 16") ||
               contains(each.text, "rank 0 gathers 16 bytes where rank 1 gathers " + theirs)));
      }
    }
  });
}

TEST_CASE("sums run over the replicas of a stage, several under way, and are the same on all of them") {
  for_each_transport([](subject const& over) {
    for (auto const& [pipeline_ranks, replicas] : {std::pair{2, 3}, std::pair{1, 2}, std::pair{2, 1}}) {
      check_all_well(over.run(pipeline_ranks, replicas, [&](transport& comm) {
        auto const& where = comm.topology();
        std::int64_t const sizes[] = {5, 300000, 1, 2000};
        for (long step = 0; step < 4; ++step) {
          comm.begin_step(step);
          tensors sums;
          for (int b = 0; b < 4; ++b) {
            sums.push_back(at::full({sizes[b]}, 100.0 * where.replica() + 10.0 * where.pipeline_rank() + b,
                                    b == 3 ? at::kDouble : at::kFloat));
            comm.start_all_reduce(b, sums.back());
          }
          for (int const b : {2, 0, 3, 1}) comm.wait_bucket(b);
          double const of_replicas = 100.0 * where.replicas * (where.replicas - 1) / 2;
          for (int b = 0; b < 4; ++b) {
            at::Tensor const& sum = sums[static_cast<std::size_t>(b)];
            CHECK(at::equal(sum, at::full_like(sum, of_replicas + where.replicas * (10.0 * where.pipeline_rank() + b))));
          }
        }
        if (where.replicas == 1) return;
        if (where.replicas == 3 && over.sums_in_order) {
          float const parts[] = {1e8F, -1e8F, 1};  // only (r0 + r1) + r2 gives 1
          at::Tensor const sum = at::full({7}, parts[where.replica()]);
          comm.start_all_reduce(0, sum);
          comm.wait_bucket(0);
          CHECK(at::equal(sum, at::ones({7})));
        }
        CHECK_THROWS_WITH_AS(comm.start_all_reduce(0, at::ones({4, 4}).t().narrow(0, 0, 2)),
                             "the sum of gradients of bucket 0 needs a contiguous tensor. Remedy: .contiguous()",
                             chevron::usage_error);
      }));
    }
  });
}

TEST_CASE("a deadline ends every wait with a timeout_error that says who, whom, what and when") {
  struct wait_kind {
    char const* action;
    int replicas;
    body wait;
  };
  std::vector<wait_kind> const kinds{
      {"0SEND_F2", 1,
       [](transport& comm) {
         send(comm, 1, send_f(0, 2), 0, {number(2, 1 << 20)});
         comm.wait_send(0);
       }},
      {"0RECV_B2", 1,
       [](transport& comm) {
         comm.post_receive(1, recv_b(0, 2), 1);
         comm.receive(1);
       }},
      {"sum of gradients", 2,
       [](transport& comm) {
         comm.start_all_reduce(0, at::ones({10}));
         comm.wait_bucket(0);
       }},
      {"all_gather", 1, [](transport& comm) { meet(comm); }},
      {"evaluate", 1,
       [](transport& comm) {
         chevron::collective_scope const doing(comm, "evaluate");
         comm.all_gather_text("x");
       }},
  };
  for_each_transport([&](subject const& over) {
    for (auto const& kind : kinds) {
      bool const is_send = kind.action == std::string("0SEND_F2"), is_message = is_send || kind.action == std::string("0RECV_B2");
      if (is_send && !over.sends_wait) continue;
      INFO(std::string(kind.action));
      retry::until_well([&](retry::complaints& wrong, int) {
        std::atomic<bool> over_now = false;
        std::chrono::steady_clock::duration by_the_clock{};
        auto const all = over.run(kind.replicas == 1 ? 2 : 1, kind.replicas, [&](transport& comm) {
          comm.begin_step(6);
          if (is_send) pass(comm, 2, {number(1, 1 << 20)});  // the first of each message goes out from a copy
          meet(comm);
          if (comm.topology().global_rank == 1) {
            sleep_until([&] { return over_now.load(); });
            return meet(comm);  // throws the published failure
          }
          comm.begin_step(7);
          comm.deadline(500ms);  // from now on, not from the next step on
          auto const begin = std::chrono::steady_clock::now();
          try {
            kind.wait(comm);
          } catch (...) {
            by_the_clock = std::chrono::steady_clock::now() - begin;
            over_now = true;
            throw;
          }
          over_now = true;
        });
        outcome const& late = all[0];
        CHECK(by_the_clock >= 490ms);
        CHECK(late.code == static_cast<int>(chevron::exit_code::timeout));
        CHECK(late.where.rank == 0);
        CHECK(late.where.step == 7);
        CHECK(late.where.action == kind.action);
        CHECK(contains(late.text, "; this rank was waiting for " + std::string(kind.action)));
        wrong.unless(late.where.peer == 1 || !is_message, "rank 1 is named: " + late.text);
        wrong.unless(contains(late.text, "rank 1 did not answer within 500 ms") ||
                         contains(late.text, "not all ranks came to " + std::string(kind.action) + " within 500 ms"),
                     "who is late: " + late.text);
        wrong.unless(by_the_clock < 2s, "the deadline is kept");
      });
    }
  });
}

TEST_CASE("a failure that one rank tells ends the others' waits at once, with its code and its type") {
  for_each_transport([](subject const& over) {
    for (int const kind : {0, 1, 2, 3}) {
      auto const begin = std::chrono::steady_clock::now();
      auto const all = over.run(2, 1, [&](transport& comm) {
        comm.begin_step(4);
        meet(comm);
        if (comm.topology().global_rank == 1) {
          std::this_thread::sleep_for(20ms);
          if (kind % 2 == 0) comm.fail(chevron::stage_error(chevron::exit_code::other, "stage 1 threw", {.rank = 1, .step = 4}));
          if (kind % 2 == 1) comm.fail(chevron::numerical_error("the loss is nan", {.rank = 1, .peer = -1, .step = 4}));
          CHECK_THROWS_AS(comm.check_usable(), chevron::usage_error);
          throw std::runtime_error("gone on");
        }
        try {
          if (kind < 2) meet(comm);
          comm.post_receive(1, recv_b(0, 2), 0);
          comm.receive(0);
          CHECK(false);
        } catch (chevron::peer_lost_error const&) {
          CHECK(kind % 2 == 0);
          throw;
        } catch (chevron::numerical_error const&) {
          CHECK(kind % 2 == 1);
          throw;
        }
      });
      INFO(all[0].text);
      CHECK(all[0].code == static_cast<int>(kind % 2 == 0 ? chevron::exit_code::other : chevron::exit_code::numerical));
      CHECK(contains(all[0].text, kind % 2 == 0 ? "rank 1, step 4: stage 1 threw" : "rank 1, step 4: the loss is nan"));
      CHECK(contains(all[0].text, kind < 2 ? "this rank was waiting for all_gather" : "this rank was waiting for 0RECV_B2"));
      CHECK(all[1].text == "gone on");
      CHECK(std::chrono::steady_clock::now() - begin < 60s);  // by far not the deadline
    }
  });
}

TEST_CASE("ranks that wait for each other are told so long before the deadline") {
  for_each_transport([](subject const& over) {
    if (!over.tells_waits) return;
    retry::stopwatch const since;
    auto const all = over.run(2, 1, [](transport& comm) {
      int const me = rank_in(comm);
      comm.begin_step(3);
      meet(comm);
      comm.post_receive(1 - me, me == 0 ? recv_b(0, 2) : recv_f(1, 2), 0);
      comm.receive(0);
    });
    for (std::size_t r = 0; r < 2; ++r) {
      INFO(all[r].text);
      CHECK(all[r].code == static_cast<int>(chevron::exit_code::preflight));
      CHECK(contains(all[r].text, "the ranks wait for each other, and none can go on: "));
      CHECK(contains(all[r].text, "waiting in step 3, 0RECV_B2 from rank 1"));
      CHECK(contains(all[r].text, "in step 3, 1RECV_F2 from rank 0"));
    }
    CHECK(since.spent() < 60s);
  });
}

TEST_CASE("ranks that meet in different calls are told so, and do not hang") {
  body const numbers = [](transport& comm) { meet(comm); };
  body const texts = [](transport& comm) { comm.all_gather_text("x"); };
  body const many = [](transport& comm) {
    std::vector<double> const mine(500);
    std::vector<double> all(2 * mine.size());
    comm.all_gather(mine, all);
  };
  for_each_transport([&](subject const& over) {
    for (auto const& [first, second] :
         {std::pair{numbers, numbers}, std::pair{texts, texts}, std::pair{numbers, texts}, std::pair{texts, many}}) {
      auto const begin = std::chrono::steady_clock::now();
      auto const all = over.run(2, 1, [&, &one = first, &other = second](transport& comm) {
        chevron::collective_scope const outer(comm, "training");
        comm.begin_step(3);
        bool const is_first = comm.topology().global_rank == 0;
        chevron::collective_scope const doing(comm, is_first ? "evaluate" : "save_checkpoint");
        (is_first ? one : other)(comm);
      });
      for (outcome const& each : all) {
        INFO(each.text);
        CHECK(each.code == static_cast<int>(chevron::exit_code::preflight));
        CHECK(contains(each.text, "evaluate"));
        CHECK(contains(each.text, "save_checkpoint"));
        CHECK(contains(each.text, "every rank"));
      }
      CHECK(std::chrono::steady_clock::now() - begin < 60s);
    }
  });
}
