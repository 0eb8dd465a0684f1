#include <chevron/run/core/wait_table.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

// The rule by which waits are told that can never end, on tables of waits.

namespace {

using namespace chevron::detail;
using count = wait_need::count;
using table = std::vector<std::optional<wait_entry>>;
using ranks = std::vector<int>;

/// A rank of a world of four that has done nothing yet.
wait_entry idle(unsigned turn = 1) {
  wait_entry out;
  out.transport = "t";
  out.done.resize(4);
  out.done.turn = turn;
  return out;
}
wait_entry receives(int peer, std::uint64_t least, unsigned turn = 1) {
  wait_entry out = idle(turn);
  out.peer = peer;
  out.need = {.of = count::sent, .turn = turn, .least = least};
  return out;
}
wait_entry sends(int peer, std::uint64_t least, unsigned turn = 1) {
  wait_entry out = receives(peer, least, turn);
  out.need.of = count::received;
  out.done.now.sent[static_cast<std::size_t>(peer)] = least;
  return out;
}
wait_entry gathers(std::uint64_t least) {
  wait_entry out = idle();
  out.need = {.of = count::gathers, .least = least};
  out.done[count::gathers] = least;
  return out;
}

}  // namespace

TEST_CASE("ranks that wait for each other's messages are stuck, unless one of these is under way") {
  table waits{receives(1, 1), receives(0, 1)};
  CHECK(stuck_ranks(waits) == ranks{0, 1});
  waits[1]->done.now.sent[0] = 1;  // a large one: rank 0 will get it
  CHECK(stuck_ranks(waits).empty());
  waits[0]->need.least = 2;
  CHECK(stuck_ranks(waits) == ranks{0, 1});
}

TEST_CASE("a send and a receive of one message belong together") {
  table waits{sends(1, 1), receives(0, 1)};
  waits[1]->done.now.received[0] = 1;
  CHECK(stuck_ranks(waits).empty());
  // Of different messages, they do not.
  waits = {sends(1, 2), receives(0, 3)};
  waits[1]->done.now.received[0] = 1;
  CHECK(stuck_ranks(waits) == ranks{0, 1});
}

TEST_CASE("who computes may yet bring what others wait for") {
  CHECK(stuck_ranks({receives(1, 1), std::nullopt}).empty());
  CHECK(stuck_ranks({receives(1, 1), receives(2, 1), std::nullopt}).empty());
  // But ranks that wait for each other are stuck.
  CHECK(stuck_ranks({receives(1, 1), receives(0, 1), std::nullopt}) == ranks{0, 1});
  // Nor can those go on that wait for them.
  CHECK(stuck_ranks({receives(1, 1), receives(0, 1), receives(1, 1), std::nullopt}) == ranks{0, 1, 2});
}

TEST_CASE("a chain of waits is followed to its end") {
  table waits{receives(1, 1), receives(2, 1), receives(3, 1), gathers(1)};
  CHECK(stuck_ranks(waits) == ranks{0, 1, 2, 3});
  waits[3]->need = {};  // the end of this wait is unknown
  CHECK(stuck_ranks(waits).empty());
}

TEST_CASE("ranks in one collective call are not stuck, whoever else waits for them") {
  table waits{gathers(3), gathers(3), gathers(3)};
  CHECK(stuck_ranks(waits).empty());
  waits[2] = receives(0, 1);
  CHECK(stuck_ranks(waits) == ranks{0, 1, 2});
  waits[2]->done[count::gathers] = 3;  // begun, and another wait since
  waits[0]->done.now.sent[2] = 1;
  CHECK(stuck_ranks(waits).empty());
  // One of numbers, one of texts.
  waits = {gathers(3), gathers(2)};
  waits[1]->need.of = count::ends;
  waits[1]->need.least = waits[1]->done[count::ends] = 1;
  CHECK(stuck_ranks(waits) == ranks{0, 1});
  CHECK(failure_of_stuck({0, 1}, waits).code == 3);
  CHECK(failure_of_stuck({0, 1}, waits).rank == 1);
  // Calls that meet and have other names do not end, or give each other's numbers.
  waits = {gathers(3), gathers(3)};
  waits[0]->words = "evaluate";
  waits[1]->words = "save";
  CHECK(stuck_ranks(waits) == ranks{0, 1});
}

TEST_CASE("sums concern the replicas of a stage alone") {
  auto const summing = [](std::uint64_t least, std::uint64_t done) {
    wait_entry out = idle();
    out.need = {.of = count::sums, .least = least, .members = {.period = 2}};
    out.done[count::sums] = done;
    return out;
  };
  CHECK(stuck_ranks({summing(2, 2), summing(5, 5), summing(2, 2), summing(5, 5)}).empty());
  CHECK(stuck_ranks({summing(2, 2), receives(0, 1), summing(2, 2), receives(2, 1)}).empty());
  // Rank 2 has not begun the sum, and waits for rank 3, which waits for its own with rank 1, which waits for rank 0.
  table waits{summing(2, 2), receives(0, 1), receives(3, 1), summing(1, 1)};
  CHECK(stuck_ranks(waits) == ranks{0, 1, 2, 3});
  waits[1]->done[count::sums] = 1;  // it has begun: it runs beside the rank
  CHECK(stuck_ranks(waits).empty());
}

TEST_CASE("the members of a collective call are the ranks of its group") {
  using chevron::rank_group;
  for (chevron::topology grid : {chevron::topology{.pipeline_ranks = 2, .replicas = 4, .shards = 3, .expert_replicas = 2},
                                 chevron::topology{.pipeline_ranks = 3, .replicas = 2},
                                 chevron::topology{.replicas = 6, .expert_replicas = 3},
                                 chevron::topology{.pipeline_ranks = 2, .replicas = 2, .shards = 2, .expert_replicas = 2}}) {
    for (rank_group const among : all_groups) {
      for (int r = 0; r < grid.world(); ++r) {
        grid.global_rank = r;
        ranks members, expected;
        for (int k = 0; k < grid.members(among); ++k) expected.push_back(grid.member(among, k));
        for (int other = 0; other < grid.world(); ++other) {
          if (call_members::of(among, grid).together(r, other)) members.push_back(other);
        }
        CHECK(members == expected);
      }
    }
  }
}

TEST_CASE("ranks of an expert group that are in different calls are stuck") {
  chevron::topology const grid{.replicas = 2, .expert_replicas = 2};
  auto const calling = [&](chevron::rank_group among, count of) {
    wait_entry out = idle();
    out.need = {.of = of, .least = 1, .members = call_members::of(among, grid)};
    out.done[of] = 1;
    return out;
  };
  table waits{calling(chevron::rank_group::experts, count::expert_sums), calling(chevron::rank_group::replicas, count::sums)};
  CHECK(stuck_ranks(waits) == ranks{0, 1});
  waits[1]->done[count::expert_sums] = 1;  // it has begun that, too
  CHECK(stuck_ranks(waits).empty());
}

TEST_CASE("messages of another program are others") {
  // Rank 0 evaluates while rank 1 trains: the transport was opened once more on rank 0.
  table waits{gathers(1), receives(0, 1, 1)};
  waits[0]->done.open();
  waits[0]->done.now.sent[1] = 4;
  CHECK(stuck_ranks(waits) == ranks{0, 1});
  waits[0]->done.before.sent[1] = 1;  // sent before that
  CHECK(stuck_ranks(waits).empty());
  waits[0]->done.open();
  CHECK(stuck_ranks(waits).empty());  // counts of earlier programs are not stored
  waits = {receives(1, 1, 2), sends(0, 1, 1)};
  CHECK(stuck_ranks(waits) == ranks{0, 1});
  waits[1]->transport = "another";
  CHECK(stuck_ranks(waits).empty());
}

TEST_CASE("waits are believed in the third look, if they are the same and told anew each time") {
  wait_looks looks;
  auto const table_of = [](long tick, std::uint64_t wait) {
    wait_entry out = receives(1, 1);
    out.tick = tick;
    out.wait = wait;
    return table{out, std::nullopt};
  };
  CHECK(!looks.look(table_of(1, 7))[0]);
  CHECK(!looks.look(table_of(2, 7))[0]);
  CHECK(looks.look(table_of(3, 7))[0]);
  CHECK(!looks.look(table_of(3, 7))[0]);  // it has stopped, or waits no more
  CHECK(!looks.look(table_of(4, 7))[0]);
  CHECK(looks.look(table_of(5, 7))[0]);
  CHECK(!looks.look(table_of(6, 8))[0]);  // another wait
  CHECK(!looks.look(table_of(7, 8))[0]);
  looks.forget();
  CHECK(!looks.look(table_of(8, 8))[0]);
}

TEST_CASE("a wait crosses the store whole") {
  wait_entry out = sends(2, 5, 3);
  out.tick = 12;
  out.wait = 34;
  out.words = "1SEND_F3";
  out.text = "step 4, 1SEND_F3 to rank 2";
  out.need.members = {.block = 8, .period = 4, .run = 2};
  out.done.before.received[3] = 9;
  out.done[count::gathers] = 1;
  out.done[count::early_gathers] = 2;
  out.done[count::sums] = 3;
  out.done[count::copy_sums] = 5;
  out.done[count::ends] = 4;
  auto const back = wait_of(to_line(out));
  REQUIRE(back);
  CHECK(to_line(*back) == to_line(out));
  CHECK(back->need == out.need);
  CHECK(back->done == out.done);
  CHECK(back->is_send());
  CHECK(!wait_of("something else"));
}

TEST_CASE("many ranks in few words") {
  CHECK(
      wait_for_each_other({{0, "evaluate"}, {1, "step 2, 1RECV_F0 from rank 0"}, {2, "evaluate"}}) ==
      "the ranks wait for each other, and none can go on: rank 0, 2 waiting in evaluate; rank 1 in step 2, 1RECV_F0 from rank 0. "
      "Remedy: every rank makes the same calls, in the same order");
  CHECK(wait_for_each_other({{0, "gather over experts"}, {1, "sum of gradients"}}) ==
        "the ranks wait for each other, and none can go on: rank 0 waiting in gather over experts; rank 1 in sum of gradients. "
        "Remedy: every rank makes the same calls, in the same order; the ranks of an expert group, and the shards of a stage, "
        "take the same branches in every forward");
}
