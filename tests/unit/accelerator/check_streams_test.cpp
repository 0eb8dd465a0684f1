// computes: every change of many small programs, run by a machine
#include "accelerator/check_streams.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <chevron/lower/channel_order.hpp>

#include "stream_oracle.hpp"
#include "unit/prove/mutants.hpp"

#include <doctest/doctest.h>

using namespace chevron;
using namespace chevron::tests;

namespace {

stream_finding check_lists(plan_view const& plan, stream_lists const& lists) {
  std::vector<std::span<stream_operation const>> views(lists.begin(), lists.end());
  return check_streams(plan, views);
}

std::string written_lists(stream_lists const& lists) {
  std::string out;
  for (std::size_t r = 0; r < lists.size(); ++r) {
    out += "\n  rank " + std::to_string(r) + ":";
    for (stream_operation const& o : lists[r]) out += " " + to_text(o).str();
  }
  return out;
}

/// Small programs with all that streams are for: both directions, turns, pairs on either lane, forwards alone.
std::vector<owned_program> small_programs() {
  std::vector<owned_program> out;
  out.push_back(lower(prove(expand(catalogue::one_f_one_b, {2, 3}))).copy());
  out.push_back(lower(prove(expand(catalogue::interleaved_1f1b, {2, 3}))).copy());
  out.push_back(lower(prove(expand(catalogue::zb_v, {2, 3}))).copy());
  out.push_back(lower(prove(expand(catalogue::zb_h1, {3, 3}))).copy());
  out.push_back(lower(prove(expand(catalogue::dual_pipe_v, {2, 4}))).copy());
  out.push_back(lower(prove(expand(catalogue::forward_only, {3, 3}))).copy());
  return out;
}

/// The checker's verdict beside the machine's.
struct judges {
  std::mt19937 random{7};
  int refused = 0, lawful = 0;
  int by_law[law_count] = {};

  void agree(plan_view const& plan, stream_lists const& lists, std::string const& about) {
    stream_finding const f = check_lists(plan, lists);
    stream_machine machine(plan, lists);
    std::string const why = machine.fault(random);
    ++(f ? refused : lawful);
    ++by_law[static_cast<int>(f.broken)];
    bool const same = why.empty() == !f && (f.broken != law::deadlock || machine.hangs(random));
    if (!same)
      DOCTEST_FAIL_CHECK(about, ": the machine says '", why, "', check_streams says ", std::string(name_of(f.broken)), ", ",
                         describe(f).str(), "\n", tests::written(plan), written_lists(lists));
  }
};

/// Transfers that share a stream: those with one peer in both directions, all of a rank, or all and the rank's computations.
enum class sharing { by_peer, all, with_compute };

stream_lists shared(program_view const& program, sharing how) {
  stream_lists lists = stream_lists_of(program);
  for (auto& list : lists) {
    for (stream_operation& o : list) {
      if (o.on.kind != stream_kind::send && o.on.kind != stream_kind::receive) continue;
      if (how == sharing::by_peer)
        o.on.kind = stream_kind::send;
      else
        o.on = {how == sharing::all ? stream_kind::sums : stream_kind::compute};
    }
  }
  return lists;
}

/// One random change to a rank's list.
void change(dice& d, std::vector<stream_operation>& list) {
  if (list.empty()) return;
  auto const any = [&] { return static_cast<std::size_t>(d.below(static_cast<int>(list.size()))); };
  std::size_t const i = any();
  stream_operation const one = list[i];
  auto const here = list.begin() + static_cast<std::ptrdiff_t>(i);
  switch (d.below(9)) {
    case 0:
      list.erase(here);
      break;
    case 1:
      if (i + 1 < list.size()) std::swap(list[i], list[i + 1]);
      break;
    case 2: {  // some places away
      list.erase(here);
      int const to = std::clamp(static_cast<int>(i) + d.below(13) - 6, 0, static_cast<int>(list.size()));
      list.insert(list.begin() + to, one);
      break;
    }
    case 3:
      list[i].on = list[any()].on;
      break;
    case 4:
      if (one.slot != no_slot) list[i].slot = static_cast<std::uint16_t>(d.below(3));
      break;
    case 5:  // a record and its wait
      if (i + 1 < list.size() && one.does == stream_task::record && list[i + 1].does == stream_task::wait)
        list.erase(here, here + 2);
      break;
    case 6:  // the other lane
      if (one.does == stream_task::work && is_compute(one.op.kind))
        list[i].on = {one.on.kind == stream_kind::compute ? stream_kind::side : stream_kind::compute};
      break;
    case 7:
      if (one.does == stream_task::record || one.does == stream_task::wait) list[i].event = list[any()].event;
      break;
    default: {  // two streams become one
      stream_name const other = list[any()].on;
      for (stream_operation& o : list) o.on = o.on == one.on ? other : o.on;
      break;
    }
  }
}

}  // namespace

TEST_SUITE("check_streams") {
  TEST_CASE("every schedule of the catalogue, and its forwards alone") {
    int programs = 0, on_side = 0;
    auto const holds = [&](plan const& p, std::string const& name) {
      owned_program const made = lower(prove(p)).copy();
      stream_finding const f = check_streams(made);
      DOCTEST_CHECK_MESSAGE(!f, name, " ", to_text(p.size).str(), ": ", describe(f).str());
      ++programs;
      for (auto const& list : stream_lists_of(made)) {
        on_side += static_cast<int>(std::count_if(list.begin(), list.end(), [](stream_operation const& o) {
          return o.does == stream_task::work && o.on.kind == stream_kind::side;
        }));
      }
    };
    catalogue::for_each([&](auto const& schedule) {
      for (int chunks = 1; chunks <= 3; ++chunks) {
        if (!schedule.where.allows(chunks)) continue;
        for (int ranks = 1; ranks <= 8; ++ranks) {
          for (int micro_batches : {1, 2, 3, 5, 8, 9, 16, 24}) {
            plan const p = expand(schedule, {ranks, micro_batches, chunks});
            holds(p, std::string(schedule.name));
            holds(forward_part(p), std::string(schedule.name) + ", forwards alone");
          }
        }
      }
    });
    DOCTEST_CHECK(programs >= 2 * 14 * 8 * 8);
    DOCTEST_CHECK(on_side > 1000);
  }

  TEST_CASE("random lawful plans: no false alarm, and the machine finds nothing either") {
    judges both;
    int pairs = 0;
    for (unsigned seed = 0; seed < 900; ++seed) {
      dice d{std::mt19937(seed)};
      plan const p = lawful_plan_of_fbiw(d);
      owned_program const made = lower(prove(p)).copy();
      stream_finding const f = check_streams(made);
      if (f) DOCTEST_FAIL_CHECK("seed ", seed, ": ", describe(f).str(), "\n", tests::written(made.view()));
      pairs += static_cast<int>(std::count_if(p.actions.begin(), p.actions.end(), [](action a) { return a.fused != 0; }));
      if (p.view().total() <= 32) both.agree(p, stream_lists_of(made), "seed " + std::to_string(seed));
    }
    DOCTEST_CHECK(pairs > 200);
    DOCTEST_CHECK(both.lawful > 100);
    DOCTEST_CHECK(both.refused == 0);
  }

  TEST_CASE("each record, each wait, each letting go left out: found, or nothing comes of it") {
    judges both;
    for (owned_program const& p : small_programs()) {
      stream_lists const lists = stream_lists_of(p);
      for (std::size_t r = 0; r < lists.size(); ++r) {
        for (std::size_t i = 0; i < lists[r].size(); ++i) {
          if (lists[r][i].does == stream_task::work) continue;
          stream_lists without = lists;
          without[r].erase(without[r].begin() + static_cast<std::ptrdiff_t>(i));
          both.agree(p.source, without,
                     std::string(p.source.name) + ", rank " + std::to_string(r) + " without " + std::to_string(i) + ", " +
                         to_text(lists[r][i]).str());
        }
      }
    }
    // A message that was waited for tells of all before it on its channel, a sum of all before it; so some waits say nothing new.
    DOCTEST_CHECK(both.refused > 500);
    DOCTEST_CHECK(both.lawful > 100);
  }

  TEST_CASE("what a message tells of its sender is known to whoever waits for it") {
    // 0F0 → 1F0 → 2F0 → 3F0 → 4F0 over two ranks. 3F0 begins after 2SEND_F0 has, so after 0SEND_F0 has ended; so 4F0 need not
    // wait for that itself, if it waits for the result of 3F0.
    auto const way_round = [](plan const& of, std::size_t rank, std::string const& place_of_4f0) {
      owned_program const p = lower(prove(of)).copy();
      stream_lists lists = stream_lists_of(p);
      auto& list = lists[rank];
      auto const take = [&](stream_operation const& one) {
        auto const at = std::find(list.begin(), list.end(), one);
        DOCTEST_REQUIRE(at != list.end());
        list.erase(at);
      };
      stream_operation const later[] = {waiting({event_kind::sent, 1}, {stream_kind::compute}), letting_go(1)};
      take(waiting({event_kind::sent, 0}, {stream_kind::compute}));
      for (stream_operation const& one : later) take(one);
      auto const consumer =
          std::find(list.begin(), list.end(), working(make_action(kind::forward, 4, 0), {stream_kind::compute}, 1));
      DOCTEST_REQUIRE(consumer != list.end());
      list.insert(consumer + 1, std::begin(later), std::end(later));
      judges both;
      both.agree(p.source, lists, "4F0 behind 0SEND_F0, by way of 3F0");
      DOCTEST_CHECK(both.lawful == 1);
      take(waiting({event_kind::arrived, 1}, {stream_kind::compute}));
      DOCTEST_CHECK(describe(check_lists(p.source, lists)).str().find(place_of_4f0) == 0);
    };
    way_round(
        expand(catalogue::interleaved_1f1b, {2, 1, 3}), 0,
        "rank 0, operation 24: [compute] 4F0 from 1 does not wait for [to 1] 0SEND_F0 from 0 (operation 7), whose memory has");
    way_round(
        expand(schedule_of(work_graph::full_backward).place(placement::of({1, 0, 1, 0, 1, 0})), {2, 1}), 1,
        "rank 1, operation 24: [compute] 4F0 from 1 does not wait for [to 0] 0SEND_F0 from 0 (operation 7), whose memory has");
  }

  TEST_CASE("each end of a message tells what came before the other end, not that the other has ended") {
    // Rank 0 sends after 0F0, rank 1 receives that after 1W0. Rank 0 waits for its send, then sends to rank 2, and that to
    // rank 1.
    plan const p = expand(schedule_of(work_graph::full_backward).place(placement::of({0, 1, 0, 2, 1})), {3, 1});
    auto const to = [](int peer) { return stream_name{stream_kind::send, static_cast<std::int16_t>(peer)}; };
    auto const from = [](int peer) { return stream_name{stream_kind::receive, static_cast<std::int16_t>(peer)}; };
    constexpr stream_name compute{stream_kind::compute}, side{stream_kind::side};
    constexpr event_name computed{event_kind::computed}, sent{event_kind::sent, 0}, arrived{event_kind::arrived, 0};
    auto const act = [](kind what, int stage) { return make_action(what, stage, 0); };
    stream_lists const lists{
        {working(act(kind::forward, 0), compute), recording(computed, compute), waiting(computed, to(1)),
         working(act(kind::send_forward, 0), to(1), 0, 1), recording(sent, to(1)), waiting(sent, compute),
         recording(computed, compute), waiting(computed, to(2)), working(act(kind::send_forward, 2), to(2), 1, 2)},
        {working(act(kind::backward_weight, 1), compute), recording(computed, compute), waiting(computed, from(0)),
         working(act(kind::receive_forward, 1), from(0), 1, 0), recording({event_kind::arrived, 1}, from(0)),
         working(act(kind::receive_forward, 4), from(2), 0, 2), recording(arrived, from(2)), waiting(arrived, side),
         working(act(kind::forward, 4), side, 0)},
        {working(act(kind::receive_forward, 3), from(0), 0, 0), recording(arrived, from(0)), waiting(arrived, compute),
         recording(computed, compute), waiting(computed, to(1)), working(act(kind::send_forward, 3), to(1), 0, 1)}};
    std::vector<std::span<stream_operation const>> const views(lists.begin(), lists.end());
    plan_view const view = p;
    detail::stream_clocks order(view, views);
    DOCTEST_REQUIRE(!order.lay_out());
    DOCTEST_REQUIRE(!order.pair_up());
    DOCTEST_REQUIRE(!order.play());
    int const forward_0 = 0, send_0 = 3, rank_1 = static_cast<int>(lists[0].size());
    int const weight_1 = rank_1, receive_1 = rank_1 + 3, after_receive_1 = rank_1 + 4, forward_4 = rank_1 + 8;
    DOCTEST_CHECK(order.before(forward_0, after_receive_1));
    DOCTEST_CHECK(!order.before(send_0, after_receive_1));
    DOCTEST_CHECK(order.before(send_0, forward_4));
    DOCTEST_CHECK(order.before(weight_1, forward_4));
    DOCTEST_CHECK(!order.before(receive_1, forward_4));
  }

  TEST_CASE("random changes of lists: refused exactly when the machine goes wrong") {
    judges both;
    std::vector<owned_program> const programs = small_programs();
    for (unsigned seed = 0; seed < 2500; ++seed) {
      dice d{std::mt19937(seed)};
      owned_program p = programs[static_cast<std::size_t>(d.below(static_cast<int>(programs.size())))];
      if (!d.one_in(4)) {
        plan of = lawful_plan_of_fbiw(d);
        while (of.view().total() > 32) of = lawful_plan_of_fbiw(d);
        p = lower(prove(of)).copy();
      }
      stream_lists const original = stream_lists_of(p);
      stream_lists lists = original;
      while (lists == original) change(d, lists[static_cast<std::size_t>(d.below(static_cast<int>(lists.size())))]);
      if (d.one_in(3)) change(d, lists[static_cast<std::size_t>(d.below(static_cast<int>(lists.size())))]);
      both.agree(p.source, lists, "seed " + std::to_string(seed));
    }
    DOCTEST_CHECK(both.refused > 500);
    DOCTEST_CHECK(both.lawful > 300);
    for (law l : {law::order, law::matched, law::slots})
      DOCTEST_CHECK_MESSAGE(both.by_law[static_cast<int>(l)] >= 20, std::string(name_of(l)), " ",
                            both.by_law[static_cast<int>(l)]);
  }

  TEST_CASE("transfers that share a stream hang, or not, as the machine says") {
    judges both;
    for (owned_program const& p : small_programs()) {
      for (sharing how : {sharing::by_peer, sharing::all, sharing::with_compute})
        both.agree(p.source, shared(p, how), std::string(p.source.name) + ", sharing " + std::to_string(static_cast<int>(how)));
    }
    DOCTEST_CHECK(both.by_law[static_cast<int>(law::deadlock)] >= 10);
    DOCTEST_CHECK(both.lawful >= 3);
  }

  TEST_CASE("streams that transfers share hang exactly over the channels of pairs and of the group") {
    int hang[2] = {}, run[2] = {};
    auto const agree = [&](owned_program const& p, std::string const& about) {
      for (channel_model const model : {channel_model::pair, channel_model::group}) {
        stream_lists lists = stream_lists_of(p);
        for (std::size_t r = 0; r < lists.size(); ++r) {
          for (stream_operation& o : lists[r]) {
            bool const transfers = o.on.kind == stream_kind::send || o.on.kind == stream_kind::receive;
            std::int16_t const any = r == 0 ? 1 : 0;  // the group's stream has the name of one peer's
            if (transfers) o.on = {stream_kind::send, model == channel_model::pair ? o.on.peer : any};
          }
        }
        stream_finding const streams = check_lists(p.source, lists);
        finding const channels = check_channel_order(p.view(), {model});
        ++(channels ? hang : run)[model == channel_model::pair ? 0 : 1];
        if (static_cast<bool>(streams) != static_cast<bool>(channels) || (streams && streams.broken != law::deadlock))
          DOCTEST_FAIL_CHECK(about, ", ", std::string(name_of(model)), ": check_streams says ", describe(streams).str(),
                             ", check_channel_order ", describe(channels).str(), "\n", tests::written(p.view()));
      }
    };
    catalogue::for_each([&](auto const& one) {
      for (shape const size : {shape{2, 4, 0}, shape{3, 5, 0}})
        agree(lower(prove(expand(one, size))).copy(), std::string(one.name));
    });
    for (unsigned seed = 500000; seed < 501000; ++seed) {
      dice d{std::mt19937(seed)};
      owned_program p = lower(prove(lawful_plan_of_fbiw(d))).copy();
      if (p.source.size.ranks == 1) continue;
      lists<instruction> rows = lists_of(p.view());
      if (!d.one_in(3)) receives_with_sends(rows);
      if (d.one_in(2)) later_messages(d, rows);
      fill(rows, p.instructions, p.begin);
      if (!check(p.view())) agree(p, "seed " + std::to_string(seed));
    }
    for (int model = 0; model < 2; ++model) {
      DOCTEST_CHECK(hang[model] >= 100);
      DOCTEST_CHECK(run[model] >= 100);
    }
  }

  TEST_CASE("one communicator for both directions of a pair of ranks, as torch's point-to-point has it") {
    auto const says = [](auto const& schedule, shape size, sharing how) {
      owned_program const p = lower(prove(expand(schedule, size))).copy();
      return describe(check_lists(p.source, shared(p, how))).str();
    };
    DOCTEST_CHECK(says(catalogue::one_f_one_b, {2, 4}, sharing::by_peer) ==
                  "rank 0, operation 7: [to 1] 0RECV_B0 into 0 waits for [to 0] 1SEND_B0 from 0 (rank 1, operation 13), which is "
                  "behind [to 0] 1RECV_F1 into 1; that waits for [to 1] 0SEND_F1 from 1 (rank 0, operation 12), which is behind "
                  "the first");
    catalogue::for_each([&](auto const& schedule) {
      bool const hangs = says(schedule, {2, 4}, sharing::by_peer).find(" waits for ") != std::string::npos;
      DOCTEST_CHECK_MESSAGE(hangs == (std::string(schedule.name) != "Eager1F1B"), std::string(schedule.name));
    });
    // With twice the warm-up there is always something to receive; round more ranks than two a pair has one direction only.
    DOCTEST_CHECK(says(catalogue::eager_1f1b, {4, 8}, sharing::all) == "all laws hold");
    DOCTEST_CHECK(says(catalogue::interleaved_1f1b, {4, 8}, sharing::by_peer) == "all laws hold");
    DOCTEST_CHECK(
        says(catalogue::interleaved_1f1b, {4, 8}, sharing::all) ==
        "rank 0, operation 17: [sums] 4RECV_F0 into 0 waits for [sums] 3SEND_F0 from 0 (rank 3, operation 12), which is "
        "behind [sums] 3RECV_F1 into 1; that waits for [sums] 2SEND_F1 from 1 (rank 2, operation 22), which is behind "
        "[sums] 2RECV_F2 into 2, and so on round 4 streams");
  }

  TEST_CASE("each law has its sentence") {
    // 1F1B on two ranks, three microbatches; their lists stand in stream_order_test.cpp.
    owned_program const p = lower(prove(expand(catalogue::one_f_one_b, {2, 3}))).copy();
    auto const says = [&](auto alter) {
      stream_lists lists = stream_lists_of(p);
      alter(lists);
      return describe(check_lists(p.source, lists)).str();
    };
    auto const without = [&](std::size_t rank, int position) {
      return says([&](stream_lists& of) { of[rank].erase(of[rank].begin() + position); });
    };
    DOCTEST_CHECK(without(0, 4) == "rank 0, operation 15: [compute] wait for sent 0, an event that has not been recorded");
    DOCTEST_CHECK(
        without(0, 2) ==
        "rank 0, operation 2: [to 1] 0SEND_F0 from 0 does not wait for the end of the step before: for nothing that its "
        "compute stream recorded");
    DOCTEST_CHECK(without(0, 11) ==
                  "rank 0, operation 11: [to 1] 0SEND_F1 from 1 does not wait for [compute] 0F1 (operation 9), whose results it "
                  "sends");
    DOCTEST_CHECK(without(0, 14) ==
                  "rank 0, operation 14: [compute] 0B0 from 0 does not wait for [from 1] 0RECV_B0 into 0 (operation 7), whose "
                  "message it takes");
    DOCTEST_CHECK(without(0, 18) ==
                  "rank 0, operation 23: [compute] 0F2 does not wait for [to 1] 0SEND_F1 from 1 (operation 12), whose memory has "
                  "been let go of");
    DOCTEST_CHECK(without(0, 19) ==
                  "rank 0, operation 26: [to 1] 0SEND_F2 from 1 takes the send slot of [to 1] 0SEND_F1 from 1 (operation 12), "
                  "which has not been let go of");
    DOCTEST_CHECK(without(0, 36) == "rank 0, operation 27: [to 1] 0SEND_F2 from 1 is never let go of");
    DOCTEST_CHECK(without(0, 21) ==
                  "rank 0, operation 21: [from 1] 0RECV_B1 into 0 does not wait for [compute] 0B0 from 0 (operation 15), which "
                  "uses what is in the slot");
    DOCTEST_CHECK(
        without(0, 39) ==
        "rank 0, operation 40: [sums] 0REDUCE_GRAD does not wait for [compute] 0B2 from 1 (operation 38), which adds to "
        "these gradients");
    DOCTEST_CHECK(without(0, 43) ==
                  "rank 0, operation 43: [compute] OPTIMIZER_STEP does not wait for [sums] 0REDUCE_GRAD (operation 41), whose "
                  "sums it takes");
    DOCTEST_CHECK(without(0, 38) == "rank 0, operation 40: [sums] 0REDUCE_GRAD comes before 0B2, which it needs");
    DOCTEST_CHECK(without(0, 12) ==
                  "rank 1, operation 8: [from 0] 1RECV_F1 into 1 is posted where this channel delivers 1RECV_F2");
    DOCTEST_CHECK(without(1, 35) == "rank 0, operation 31: [from 1] 0RECV_B2 into 1 is never sent: there is no 1SEND_B2");
    DOCTEST_CHECK(says([](stream_lists& of) { of[1][8].op.micro_batch = 2; }) ==
                  "rank 1, operation 8: [from 0] 1RECV_F2 into 1 is posted where this channel delivers 1RECV_F1");
    DOCTEST_CHECK(
        says([](stream_lists& of) { of[1][8].peer = 3; }) ==
        "rank 1, operation 8: [from 0] 1RECV_F1 into 1 names a stream, event, peer, slot, stage or microbatch that this "
        "rank does not have");
    DOCTEST_CHECK(
        says([](stream_lists& of) { of[0].push_back(working(make_action(kind::backward, 0, 0), {stream_kind::side}, 0)); }) ==
        "rank 0, operation 45: [side] 0B0 from 0 does not wait for the end of the step before: for nothing that its "
        "compute stream recorded");
  }

  TEST_CASE("a backward on the wrong lane") {
    owned_program const p = lower(prove(expand(catalogue::one_f_one_b, {2, 3}))).copy();
    constexpr stream_name compute{stream_kind::compute}, side{stream_kind::side};
    auto const says = [&](std::size_t rank, action backward, std::uint16_t slot, bool forks) {
      stream_lists lists = stream_lists_of(p);
      auto& list = lists[rank];
      auto const at = std::find(list.begin(), list.end(), working(backward, compute, slot));
      DOCTEST_REQUIRE(at != list.end());
      at->on = side;
      if (forks) list.insert(at, recording({event_kind::computed}, compute));
      // Without a fork of its own the side stream has only heard that the step has begun.
      auto const record = recording({event_kind::computed}, compute);
      auto const moved = std::find(list.begin(), list.end(), working(backward, side, slot));
      auto const from = forks ? moved : std::find(list.begin(), list.end(), record) + 1;
      list.insert(from, waiting({event_kind::computed}, side));
      return describe(check_lists(p.source, lists)).str();
    };
    DOCTEST_CHECK(says(1, make_action(kind::backward, 1, 0), no_slot, false) ==
                  "rank 1, operation 11: [side] 1B0 does not wait for [compute] 1F0 from 0 (operation 6), whose graph it walks");
    DOCTEST_CHECK(
        says(0, make_action(kind::backward, 0, 1), 0, true) ==
        "rank 0, operation 40: [compute] 0B2 from 1 does not wait for [side] 0B1 from 0 (operation 36), which adds to the "
        "same gradients");
  }

  TEST_CASE("a fused pair that is not joined") {
    owned_program const p = lower(prove(expand(catalogue::dual_pipe_v, {2, 4}))).copy();
    stream_lists lists = stream_lists_of(p);
    auto& list = lists[0];
    auto const join = std::find(list.begin(), list.end(), waiting({event_kind::side_computed}, {stream_kind::compute}));
    DOCTEST_REQUIRE(join != list.end());
    list.erase(join);
    DOCTEST_CHECK(describe(check_lists(p.source, lists)).view() ==
                  "rank 0, operation 54: [to 1] 0SEND_F3 from 2 does not wait for [side] 0F3 (operation 49), whose results it "
                  "sends");
  }
}
