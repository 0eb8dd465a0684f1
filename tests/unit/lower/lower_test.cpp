#include <chevron/schedule.hpp>

#include <algorithm>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <range/v3/range/conversion.hpp>
#include <range/v3/view/cartesian_product.hpp>
#include <range/v3/view/filter.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/subrange.hpp>
#include <range/v3/view/transform.hpp>

#include "unit/prove/mutants.hpp"

#include <doctest/doctest.h>

using namespace chevron;
using namespace chevron::tests;

namespace {

std::string list(program_view const& program, int rank) {
  std::string out;
  for (int i = 0; i < program.length(rank); ++i) out += (i > 0 ? " " : "") + to_text(program.at(rank, i).op).str();
  return out;
}

}  // namespace

TEST_SUITE("lower") {
  TEST_CASE("every program of the grid keeps the program laws") {
    int programs = 0;
    catalogue::for_each([&](auto const& schedule) {
      for (int chunks = 1; chunks <= 3; ++chunks) {
        if (!schedule.where.allows(chunks)) continue;
        for (int ranks = 1; ranks <= 8; ++ranks) {
          for (int micro_batches = 1; micro_batches <= 32; ++micro_batches) {
            plan const p = expand(schedule, {ranks, micro_batches, chunks});
            owned_program const made = lower(prove(p)).copy();
            finding const f = check(made.view());
            DOCTEST_CHECK_MESSAGE(f.broken == law::none, schedule.name, " ", to_text(p.size).str(), ": ", describe(f).str());
            DOCTEST_CHECK(made.begin.data[ranks] == instructions_needed(p));
            for (int r = 0; r < ranks; ++r) DOCTEST_CHECK(made.slots.data[r].activation >= peak_in_flight(p, r));
            ++programs;
          }
        }
      }
    });
    DOCTEST_CHECK(programs >= 14 * 8 * 32);
  }

  TEST_CASE("1F1B on two ranks, instruction by instruction") {
    owned_program const p = lower(prove(expand(catalogue::one_f_one_b, {2, 3}))).copy();
    DOCTEST_CHECK(list(p, 0) ==
                  "0UNSHARD 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0WAIT_SEND_F0 0WAIT_SEND_F1 0RECV_B1 0F2 0SEND_F2 0RECV_B2 "
                  "0B1 0WAIT_SEND_F2 0B2 "
                  "0REDUCE_GRAD OPTIMIZER_STEP");
    DOCTEST_CHECK(list(p, 1) ==
                  "1RECV_F0 1UNSHARD 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1WAIT_SEND_B0 1RECV_F2 1B1 1SEND_B1 1F2 1WAIT_SEND_B1 1B2 "
                  "1SEND_B2 1REDUCE_GRAD "
                  "1WAIT_SEND_B2 OPTIMIZER_STEP");
  }

  TEST_CASE("what each edge sends is what its other end receives, in that order") {
    // Told a second time, without the prover: the messages of an edge as its two ends list them.
    auto const list_of = [](program_view const& program, int rank) {
      return ranges::subrange(program.instructions + program.begin[rank], program.instructions + program.begin[rank + 1]);
    };
    auto const on_edge = [](int peer, kind forward, kind backward) {
      return ranges::views::filter(
          [=](instruction const& i) { return i.peer == peer && (i.op.kind == forward || i.op.kind == backward); });
    };
    auto const sent = ranges::views::transform([](instruction const& i) {
      bool const forward = i.op.kind == kind::send_forward;
      return std::tuple(forward, static_cast<int>(i.op.stage) + (forward ? 1 : -1), static_cast<int>(i.op.micro_batch));
    });
    auto const received = ranges::views::transform([](instruction const& i) {
      return std::tuple(i.op.kind == kind::receive_forward, static_cast<int>(i.op.stage), static_cast<int>(i.op.micro_batch));
    });
    int messages_seen = 0;
    catalogue::for_each([&](auto const& schedule) {
      owned_program const made = lower(prove(expand(schedule, {5, 9}))).copy();
      for (auto const [from, to] : ranges::views::cartesian_product(ranges::views::ints(0, 5), ranges::views::ints(0, 5))) {
        auto const sends =
            list_of(made, from) | on_edge(to, kind::send_forward, kind::send_backward) | sent | ranges::to<std::vector>();
        auto const receives = list_of(made, to) | on_edge(from, kind::receive_forward, kind::receive_backward) | received |
                              ranges::to<std::vector>();
        DOCTEST_CHECK_MESSAGE(sends == receives, schedule.name, ": ", from, " to ", to);
        messages_seen += static_cast<int>(sends.size());
      }
      messages_seen -= messages(made.source);
    });
    DOCTEST_CHECK(messages_seen == 0);
  }

  TEST_CASE("neighbours on one rank pass tensors without messages") {
    owned_program const alone = lower(prove(expand(catalogue::zb_v, {1, 4}))).copy();
    DOCTEST_CHECK(list(alone, 0).find("SEND") == std::string::npos);
    owned_program const turn = lower(prove(expand(catalogue::zb_v, {3, 6}))).copy();
    DOCTEST_CHECK(list(turn, 2).find("2SEND_F") == std::string::npos);  // stages 2 and 3 share rank 2
    DOCTEST_CHECK(list(turn, 2).find("3SEND_F") != std::string::npos);
  }

  TEST_CASE("gradients are summed once a stage, right after its last gradient") {
    owned_program const p = lower(prove(expand(catalogue::zb_h1, {4, 8}))).copy();
    for (int r = 0; r < 4; ++r) {
      int sums = 0, after = 0;
      bool summed = false;
      for (int i = 0; i < p.view().length(r); ++i) {
        action const a = p.view().at(r, i).op;
        if (a.kind == kind::reduce_gradients) summed = true, ++sums;
        if (summed && is_compute(a.kind)) ++after;
      }
      DOCTEST_CHECK(sums == 1);
      DOCTEST_CHECK(after == 0);
    }
  }

  TEST_CASE("receives out of the order of their sends are refused, both messages named") {
    // Receives are moved directly before their consumers, while sends stay directly after their producers: on a V an
    // activation and a gradient of one edge change places.
    owned_program p = lower(prove(expand(catalogue::zb_v, {2, 4}))).copy();
    int first = -1, second = -1;
    for (int i = p.begin.data[1]; i < p.begin.data[2] && second < 0; ++i) {
      kind const what = p.instructions.data[i].op.kind;
      if (what != kind::receive_forward && what != kind::receive_backward) continue;
      if (first >= 0 && what != p.instructions.data[first].op.kind)
        second = i;
      else
        first = i;
    }
    DOCTEST_REQUIRE(second > 0);
    std::swap(p.instructions.data[first], p.instructions.data[second]);
    finding const f = check(p.view());
    DOCTEST_CHECK(f.broken == law::matched);
    std::string const said = describe(f).str();
    DOCTEST_CHECK(said.find(to_text(p.instructions.data[first].op).str() + " is posted where this edge delivers " +
                            to_text(p.instructions.data[second].op).str()) != std::string::npos);
  }

  TEST_CASE("each law of a program has its sentence") {
    // 1F1B on two ranks: 0UNSHARD 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 … against 1RECV_F0 1UNSHARD 1F0 1RECV_F1 1B0 1SEND_B0 …
    auto const says = [](auto change) {
      owned_program p = lower(prove(expand(catalogue::one_f_one_b, {2, 3}))).copy();
      lists<instruction> order = lists_of(p.view());
      change(order, p);
      fill(order, p.instructions, p.begin);
      return describe(check(p.view())).str();
    };
    using ranks = lists<instruction>;
    auto const position = [](std::vector<instruction> const& list, kind what, int stage, int m) {
      return std::find_if(list.begin(), list.end(), [&](instruction const& i) { return i.op == make_action(what, stage, m); }) -
             list.begin();
    };
    auto const drop = [&](int rank, kind what, int stage, int m) {
      return says([&](ranks& of, owned_program&) {
        auto& list = of[static_cast<std::size_t>(rank)];
        list.erase(list.begin() + position(list, what, stage, m));
      });
    };
    DOCTEST_CHECK(drop(0, kind::forward, 0, 1) ==
                  "rank 0, step 5: 0F1 is missing: the plan has this action here, and the program another one");
    DOCTEST_CHECK(drop(0, kind::backward, 0, 2) == "rank 0: 0B2 is missing: the plan has this action, and the program does not");
    DOCTEST_CHECK(drop(0, kind::send_forward, 0, 2) == "rank 1, step 8: 1RECV_F2 is never sent: there is no 0SEND_F2");
    DOCTEST_CHECK(drop(1, kind::receive_forward, 1, 2) == "rank 0, step 11: 0SEND_F2 is never received: no rank posts 1RECV_F2");
    DOCTEST_CHECK(drop(0, kind::wait_send_forward, 0, 2) ==
                  "rank 0: 0SEND_F2 is never waited for: its tensors are kept for ever; there is no 0WAIT_SEND_F2");
    DOCTEST_CHECK(drop(1, kind::reduce_gradients, 1, 0) ==
                  "rank 1: 1REDUCE_GRAD is missing: every stage's gradients are summed once");
    DOCTEST_CHECK(drop(1, kind::optimizer_step, 0, 0) == "rank 1: OPTIMIZER_STEP is missing: every rank steps once");
    DOCTEST_CHECK(drop(1, kind::unshard, 1, 0) == "rank 1: 1UNSHARD is missing: every stage's parameters are unsharded once");
    auto const moved = [&](std::size_t from, std::size_t to) {
      return says([&](ranks& of, owned_program&) {
        instruction const one = of[0][from];
        of[0].erase(of[0].begin() + static_cast<std::ptrdiff_t>(from));
        of[0].insert(of[0].begin() + static_cast<std::ptrdiff_t>(to), one);
      });
    };
    DOCTEST_CHECK(moved(0, 1) == "rank 0, step 0: 0F0 comes before 0UNSHARD, which it needs");
    DOCTEST_CHECK(says([](ranks& of, owned_program&) { of[0].push_back(of[0][0]); }) ==
                  "rank 0, step 18: 0UNSHARD comes a second time");

    auto const alter = [&](int rank, kind what, int stage, int m, auto change) {
      return says([&](ranks& of, owned_program&) {
        auto& list = of[static_cast<std::size_t>(rank)];
        change(list[static_cast<std::size_t>(position(list, what, stage, m))]);
      });
    };
    DOCTEST_CHECK(alter(0, kind::send_forward, 0, 0, [](instruction& i) { i.peer = 0; }) ==
                  "rank 0, step 2: 0SEND_F0 names another peer than the rank of the stage at its other end, rank 1");
    DOCTEST_CHECK(alter(0, kind::forward, 0, 0, [](instruction& i) { i.slot = 2; }) ==
                  "rank 0, step 1: 0F0 names an activation slot that this rank does not have; activation slots: 2");
    DOCTEST_CHECK(
        alter(1, kind::forward, 1, 0, [](instruction& i) { i.source = no_slot; }) ==
        "rank 1, step 2: 1F0 takes its input from another rank, but not from one of this rank's receive slots; there are 2");
    DOCTEST_CHECK(alter(0, kind::forward, 0, 0, [](instruction& i) { i.source = 0; }) ==
                  "rank 0, step 1: 0F0 names an activation or receive slot that does not hold its input; stages: 2");
    DOCTEST_CHECK(alter(0, kind::send_forward, 0, 1, [](instruction& i) { i.slot = 0; }) ==
                  "rank 0, step 5: 0SEND_F1 sends from a slot that does not hold the outputs of 0F1");
    DOCTEST_CHECK(alter(0, kind::forward, 0, 1, [](instruction& i) { i.slot = 0; }) ==
                  "rank 0, step 4: 0F1 writes to the slot of an activation that is still needed: 0F0");

    // Waiting for each send at once: harmless here, since receives are posted one computation ahead; where a rank sends to
    // whom it receives from, each waits for the other.
    auto const at_once = [&](int on_rank) { return says([&](ranks& of, owned_program&) { synchronous_sends(of, on_rank); }); };
    DOCTEST_CHECK(at_once(1) == "all laws hold");
    DOCTEST_CHECK(at_once(-1) == "all laws hold");
    owned_program looped = lower(prove(expand(catalogue::looped_bfs, {2, 4}))).copy();
    lists<instruction> order = lists_of(looped.view());
    synchronous_sends(order, -1);
    fill(order, looped.instructions, looped.begin);
    DOCTEST_CHECK(
        describe(check(looped.view())).view() ==
        "rank 0, step 9: 0WAIT_SEND_F2 waits for 1RECV_F2, which is queued on rank 1 behind 1WAIT_SEND_F0; 1WAIT_SEND_F0 "
        "waits for 2RECV_F0, which is queued behind 0WAIT_SEND_F2");
  }

  TEST_CASE("a slot written too early and a receive nobody posts are refused") {
    owned_program p = lower(prove(expand(catalogue::one_f_one_b, {2, 4}))).copy();
    for (int i = 0; i < p.begin.data[1]; ++i) {
      if (p.instructions.data[i].op.kind == kind::forward) p.instructions.data[i].slot = 0;
    }
    DOCTEST_CHECK(check(p.view()).broken == law::slots);

    owned_program q = lower(prove(expand(catalogue::one_f_one_b, {2, 4}))).copy();
    instruction& last = q.instructions.data[q.begin.data[1]];
    DOCTEST_REQUIRE(last.op == make_action(kind::receive_forward, 1, 0));
    last.op = make_action(kind::receive_forward, 1, 3);
    finding const f = check(q.view());
    DOCTEST_CHECK(f.broken == law::matched);
    DOCTEST_CHECK(describe(f).view() == "rank 1, step 0: 1RECV_F3 is posted where this edge delivers 1RECV_F0");
  }
}
