// timeout: 300
// waits: deadlines run out
// Messages and collectives of ranks that are shards of a stage, asked of every transport (tests/support/contract_subjects.hpp).
#include "support/contract_subjects.hpp"
#include "support/retry.hpp"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>

namespace {

using namespace transport_contract;
using namespace std::chrono_literals;
using chevron::group_collective;
using chevron::topology;
using cut = std::vector<std::int64_t>;

void check_all_well(std::vector<outcome> const& all) {
  for (outcome const& each : all) CHECK(each.text == "");
}
bool contains(std::string const& text, std::string const& part) { return text.find(part) != std::string::npos; }

/// All ranks come here before any goes on.
void meet(transport& comm) { comm.all_gather({}, {}); }

at::Tensor share(at::Tensor const& of, cut const& at, int member) {
  auto const r = static_cast<std::size_t>(member);
  return of.narrow(0, at[r], at[r + 1] - at[r]);
}

/// Shares of `numbers` elements, the first of which has none.
cut uneven(std::int64_t numbers, int shards) {
  cut out{0, 0};
  for (int t = 2; t <= shards; ++t) out.push_back(numbers * (t - 1) * (t - 1) / ((shards - 1) * (shards - 1)));
  return out;
}

body collective(group_collective what) {
  return [what](transport& comm) {
    int const shards = comm.topology().shards;
    comm.over_group(chevron::rank_group::shards, what, at::ones({900}),
                    what == group_collective::all_reduce ? cut{} : uneven(900, shards));
  };
}
/// In the words of a wait.
std::string words(group_collective what) { return chevron::detail::words_of(what, chevron::rank_group::shards); }

std::string place(topology const& grid, int rank) {
  return std::to_string(rank) + " (replica " + std::to_string(grid.replica_of(rank)) + ", pipeline rank " +
         std::to_string(grid.pipeline_rank_of(rank)) + ", shard " + std::to_string(grid.shard_of(rank)) + ")";
}

constexpr group_collective kinds[] = {group_collective::all_reduce, group_collective::reduce_scatter,
                                      group_collective::share_gather};

}  // namespace

TEST_CASE("collectives over shards are those of their definition, beside sums over replicas that are under way") {
  for_each_transport([](subject const& over) {
    for (topology const& grid : {topology{.replicas = 2, .shards = 3}, topology{2, 2, 0, 2}, topology{2, 1, 0, 4}}) {
      check_all_well(over.run(grid, [&](transport& comm) {
        topology const& me = comm.topology();
        int const T = me.shards;
        auto const value = [&](int replica, int shard, double more) {
          return 1000.0 * replica + 100.0 * me.pipeline_rank() + 10.0 * shard + more;
        };
        for (long step = 0; step < 3; ++step) {
          comm.begin_step(step);
          at::Tensor const of_replicas = at::full({300001}, value(me.replica(), me.shard(), 1)), more = of_replicas.clone();
          comm.start_all_reduce(0, of_replicas);
          for (std::int64_t const numbers : {std::int64_t{1}, std::int64_t{35}, std::int64_t{90001}}) {
            INFO("step " << step << ", " << numbers << " numbers");
            auto const own = [&] { return at::full({numbers}, value(me.replica(), me.shard(), 2), at::kDouble); };
            double sum = 0;
            for (int t = 0; t < T; ++t) sum += value(me.replica(), t, 2);
            cut const at = uneven(numbers, T);
            at::Tensor const whole = own(), scattered = own(), gathered = own();
            comm.over_group(chevron::rank_group::shards, group_collective::all_reduce, whole);
            CHECK(at::equal(whole, at::full_like(whole, sum)));
            if (numbers == 35) comm.start_all_reduce(1, more);
            comm.over_group(chevron::rank_group::shards, group_collective::reduce_scatter, scattered, at);
            CHECK(at::equal(share(scattered, at, me.shard()), at::full_like(share(scattered, at, me.shard()), sum)));
            comm.over_group(chevron::rank_group::shards, group_collective::share_gather, gathered, at);
            for (int t = 0; t < T; ++t)
              CHECK(at::equal(share(gathered, at, t), at::full_like(share(gathered, at, t), value(me.replica(), t, 2))));
          }
          comm.wait_bucket(1);
          comm.wait_bucket(0);
          double sum = 0;
          for (int r = 0; r < me.replicas; ++r) sum += value(r, me.shard(), 1);
          CHECK(at::equal(of_replicas, at::full_like(of_replicas, sum)));
          CHECK(at::equal(more, of_replicas));
        }
        if (T == 3 && over.sums_in_order) {
          float const parts[] = {1e8F, -1e8F, 1};  // only (s0 + s1) + s2 gives 1
          at::Tensor const sum = at::full({7}, parts[me.shard()]), scattered = sum.clone();
          comm.over_group(chevron::rank_group::shards, group_collective::all_reduce, sum);
          CHECK(at::equal(sum, at::ones({7})));
          comm.over_group(chevron::rank_group::shards, group_collective::reduce_scatter, scattered, cut{0, 2, 4, 7});
          CHECK(at::equal(share(scattered, {0, 2, 4, 7}, me.shard()), at::ones_like(share(scattered, {0, 2, 4, 7}, me.shard()))));
        }
        at::Tensor const bits = me.shard() == 0 ? at::full({2 * T}, -0.0F) : at::ones({2 * T});
        cut two;
        for (int t = 0; t <= T; ++t) two.push_back(2 * t);
        comm.over_group(chevron::rank_group::shards, group_collective::share_gather, bits, two);
        CHECK(at::signbit(share(bits, two, 0)).all().item<bool>());
      }));
    }
  });
}

TEST_CASE("messages go to the rank of the same shard, gathers over all ranks") {
  for_each_transport([](subject const& over) {
    check_all_well(over.run({.pipeline_ranks = 3, .shards = 2}, [](transport& comm) {
      topology const& me = comm.topology();
      int const p = me.pipeline_rank(), last = 2;
      for (long step = 0; step < 3; ++step) {
        comm.begin_step(step);
        at::Tensor x = at::full({5}, 10.0 * me.shard() + static_cast<double>(step));
        if (p > 0) {
          comm.post_receive(p - 1, thread_ranks::recv_f(p, 0), 0);
          x = comm.receive(0)[0];
          CHECK(at::equal(x, at::full({5}, 10.0 * me.shard() + static_cast<double>(step) + p)));
        }
        if (p < last) {
          std::vector<at::Tensor> const values{x + 1};
          comm.post_send(p + 1, thread_ranks::send_f(p, 0), 0, values);
          comm.wait_send(0);
        }
      }
      double const mine = me.global_rank;
      std::vector<double> all(6);
      comm.all_gather(std::span(&mine, 1), all);
      CHECK(all == std::vector<double>{0, 1, 2, 3, 4, 5});
    }));
  });
}

TEST_CASE("a cut that does not divide, and a tensor with gaps, are refused; one shard does nothing") {
  for_each_transport([](subject const& over) {
    check_all_well(over.run({.shards = 2}, [](transport& comm) {
      CHECK_THROWS_WITH_AS(
          comm.over_group(chevron::rank_group::shards, group_collective::share_gather, at::ones({10}), cut{0, 5, 9}),
          "the gather over shards of bucket 0 has the cut [0, 5, 9], which does not divide 10 elements among 2 "
          "shards. Remedy: 3 offsets, ascending, from 0 to 10",
          chevron::usage_error);
      CHECK_THROWS_WITH_AS(
          comm.over_group(chevron::rank_group::shards, group_collective::all_reduce, at::ones({4, 4}).t().narrow(0, 0, 2)),
          "the sum over shards of bucket 0 needs a contiguous tensor. Remedy: .contiguous()", chevron::usage_error);
    }));
    check_all_well(over.run(2, 1, [](transport& comm) {
      at::Tensor const x = at::ones({10});
      comm.over_group(chevron::rank_group::shards, group_collective::all_reduce, x);
      CHECK(at::equal(x, at::ones({10})));
    }));
  });
}

TEST_CASE("shards that start different collectives, or with other cuts, are refused") {
  std::vector<body> starts;
  for (group_collective const what : kinds) starts.push_back(collective(what));
  starts.push_back([](transport& comm) {
    comm.over_group(chevron::rank_group::shards, group_collective::share_gather, at::ones({900}), cut{0, 3, 900});
  });
  starts.push_back([](transport& comm) {
    comm.over_group(chevron::rank_group::shards, group_collective::all_reduce, at::ones({900}, at::kDouble));
  });
  for_each_transport([&](subject const& over) {
    if (!over.compares_collectives) return;
    for (std::size_t a = 0; a < starts.size(); ++a) {
      for (std::size_t b = 0; b < a; ++b) {
        retry::stopwatch const since;
        auto const all = over.run({.shards = 2}, [&](transport& comm) { starts[comm.topology().shard() == 0 ? a : b](comm); });
        for (outcome const& each : all) {
          INFO(a << " and " << b << ": " << each.text);
          CHECK(each.code == static_cast<int>(chevron::exit_code::preflight));
          CHECK((contains(each.text, " starts the ") || contains(each.text, "different shapes, dtypes or cuts in bucket 0") ||
                 contains(each.text, "sum tensors of different shapes or dtypes")));
          CHECK((contains(each.text, "shard 1") || contains(each.text, "shards 0 and 1")));
        }
        CHECK(since.spent() < 60s);
      }
    }
  });
}

TEST_CASE("a shard that does not come is told by the deadline: by rank, place, collective and step; all ranks end") {
  topology const grid{.pipeline_ranks = 2, .shards = 2};
  for_each_transport([&](subject const& over) {
    for (group_collective const what : kinds) {
      INFO(words(what));
      std::atomic<bool> ended = false;
      auto const all = over.run(grid, [&](transport& comm) {
        comm.begin_step(6);
        meet(comm);
        if (comm.topology().pipeline_rank() == 0) return meet(comm);  // ends with the failure of others
        if (comm.topology().shard() == 1) {
          for (int naps = 0; naps < 12000 && !ended; ++naps) std::this_thread::sleep_for(5ms);
          return meet(comm);
        }
        comm.deadline(500ms);
        comm.begin_step(7);
        try {
          collective(what)(comm);
        } catch (...) {
          ended = true;
          throw;
        }
      });
      outcome const& late = all[2];
      INFO(late.text);
      CHECK(late.code == static_cast<int>(chevron::exit_code::timeout));
      CHECK(late.where.rank == 2);
      CHECK(late.where.step == 7);
      CHECK(late.where.action == words(what));
      CHECK(contains(late.text, "rank " + place(grid, 2)));
      CHECK((contains(late.text, "did not answer within 500 ms") || contains(late.text, "not all ranks came to " + words(what))));
      if (late.where.peer >= 0) CHECK(contains(late.text, place(grid, late.where.peer)));
      for (outcome const& each : all) CHECK(each.code == static_cast<int>(chevron::exit_code::timeout));
    }
  });
}

TEST_CASE("a shard that fails ends all ranks at once, with its code, wherever they wait") {
  topology const grid{.pipeline_ranks = 2, .replicas = 1, .shards = 2};
  for_each_transport([&](subject const& over) {
    for (group_collective const what : kinds) {
      retry::stopwatch const since;
      auto const all = over.run(grid, [&](transport& comm) {
        comm.begin_step(4);
        meet(comm);
        if (comm.topology().global_rank == 3) {
          std::this_thread::sleep_for(20ms);
          comm.fail(chevron::stage_error(chevron::exit_code::other, "stage 1 threw", {.rank = 3, .step = 4}));
          throw std::runtime_error("gone on");
        }
        if (comm.topology().pipeline_rank() == 1) return collective(what)(comm);
        comm.post_receive(1, thread_ranks::recv_b(0, 2), 0);
        comm.receive(0);
      });
      for (std::size_t r = 0; r < 3; ++r) {
        INFO(all[r].text);
        CHECK(all[r].code == static_cast<int>(chevron::exit_code::other));
        CHECK(contains(all[r].text, "rank 3, step 4: stage 1 threw"));
        CHECK(contains(all[r].text, "ank " + place(grid, 3)));
        CHECK(contains(all[r].text, "rank " + place(grid, static_cast<int>(r))));
        CHECK(contains(all[r].text, "this rank was waiting for " + (r == 2 ? words(what) : std::string("0RECV_B2"))));
      }
      CHECK(all[3].text == "gone on");
      CHECK(since.spent() < 60s);  // by far not the deadline
    }
  });
}

TEST_CASE("shards that wait in different calls are told so long before the deadline, each with its place") {
  topology const grid{.pipeline_ranks = 1, .replicas = 2, .shards = 2};
  for_each_transport([&](subject const& over) {
    if (!over.tells_waits) return;
    retry::stopwatch const since;
    auto const all = over.run(grid, [](transport& comm) {
      comm.begin_step(3);
      meet(comm);
      if (comm.topology().replica() == 1 || comm.topology().shard() == 1) return meet(comm);
      collective(group_collective::all_reduce)(comm);
    });
    for (outcome const& each : all) {
      INFO(each.text);
      CHECK(each.code == static_cast<int>(chevron::exit_code::preflight));
      CHECK(contains(each.text, "the ranks wait for each other, and none can go on: "));
      CHECK(contains(each.text, "sum over shards"));
      for (int r = 0; r < 2; ++r) CHECK(contains(each.text, place(grid, r)));
    }
    CHECK(since.spent() < 60s);
  });
}
