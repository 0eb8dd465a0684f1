// computes: thousands of random programs over every model of channels
#include <algorithm>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_check.hpp>
#include <chevron/csv/csv_source.hpp>
#include <chevron/lower/channel_order.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/schedule.hpp>

#include "unit/csv/csv_support.hpp"
#include "unit/lower/channel_oracle.hpp"
#include "unit/lower/matched_programs.hpp"
#include "unit/prove/mutants.hpp"
#include "unit/tools/show/show_support.hpp"

using namespace chevron;
using namespace chevron::tests;

namespace {

constexpr channel_model all_models[] = {channel_model::edge, channel_model::pair, channel_model::group, channel_model::batched};

// pytorch#172668, as the reporter's two ranks enqueued their messages: each sends to the other before it receives.
constexpr std::string_view both_send_first =
    "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,2RECV_B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,0RECV_B0,"
    "0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3B0,3SEND_B0,3RECV_F1,3F1,3B1,3SEND_B1,1RECV_B0,1B0,1SEND_B0,"
    "1RECV_B1,1B1,1SEND_B1\n";
// The same with rank 0's receive first.
constexpr std::string_view receive_first =
    "0F0,0SEND_F0,0F1,2RECV_F0,0SEND_F1,2F0,2RECV_F1,2SEND_F0,2F1,2SEND_F1,2RECV_B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,0RECV_B0,"
    "0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3B0,3SEND_B0,1RECV_B0,3F1,3B1,3SEND_B1,1RECV_B1,1B0,"
    "1SEND_B0,1B1,1SEND_B1\n";
// Its second order: rank 0 sends microbatch 2 before it receives a gradient, rank 1 sends that gradient before microbatch 2.
constexpr std::string_view gradient_first =
    "0F0,0SEND_F0,2RECV_F0,0F1,0SEND_F1,2RECV_F1,2F0,2SEND_F0,2F1,2SEND_F1,0F2,0SEND_F2,2RECV_B0,2B0,2RECV_B1,2SEND_B0,2B1,"
    "2SEND_B1,2RECV_F2,2F2,2SEND_F2,2RECV_B2,2B2,2SEND_B2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2\n"
    "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3B0,3RECV_F1,3SEND_B0,3F1,3B1,1RECV_F2,3SEND_B1,1F2,1SEND_F2,"
    "1RECV_B0,1B0,1RECV_B1,1B1,3RECV_F2,3F2,3B2,3SEND_B2,1SEND_B0,1SEND_B1,1RECV_B2,1B2,1SEND_B2\n";

constexpr law verdict(std::string_view csv, shape size, channel_model model, bool hosts_wait = false) {
  return csv_source{csv}.over(model, hosts_wait)(size).problem.broken;
}
static_assert(verdict(both_send_first, {2, 2, 0}, channel_model::edge) == law::none);
static_assert(verdict(both_send_first, {2, 2, 0}, channel_model::pair) == law::deadlock);
static_assert(verdict(both_send_first, {2, 2, 0}, channel_model::group) == law::deadlock);
static_assert(verdict(both_send_first, {2, 2, 0}, channel_model::edge, true) == law::deadlock);
static_assert(verdict(receive_first, {2, 2, 0}, channel_model::group) == law::none);
static_assert(csv_source{both_send_first}.over(channel_model::pair)({2, 2, 0}).channels.model == channel_model::pair);

std::string said_over(std::string_view csv, channel_rules rules) {
  csv_schedule read = read_csv(csv);
  read.program.source.channels = rules;
  return describe(check(read, csv), read, csv);
}

int position_in(program_view const& p, int rank, action wanted) {
  for (int i = 0; i < p.length(rank); ++i) {
    if (p.at(rank, i).op == wanted) return i;
  }
  return -1;
}

/// Whether the facts of a cycle's sentence are true: its messages stand where it says, and the two that close the cycle are in
/// this order on a channel that both use.
bool is_true(finding const& f, program_view const& p) {
  if (f.broken != law::deadlock || !(p.at(f.rank, f.position).op == f.what) || f.links < 2) return false;
  instruction const& first = p.at(f.rank, f.position);
  int const there = position_in(p, f.other_rank, f.other), behind = position_in(p, f.other_rank, f.behind);
  if (there < 0 || behind < 0 || first.peer != f.other_rank || p.at(f.other_rank, there).peer != f.rank) return false;
  if (f.channels.model != channel_model::batched && behind > there) return false;
  if (f.channel_rank < 0) return true;
  int const held = position_in(p, f.channel_rank, f.held), holder = position_in(p, f.channel_rank, f.holder);
  if (held < 0 || holder < 0 || holder >= held) return false;
  instruction const& a = p.at(f.channel_rank, held);
  instruction const& b = p.at(f.channel_rank, holder);
  bool const same_peer = a.peer == b.peer && b.peer == f.channel_peer;
  if (f.channels.model == channel_model::edge) return same_peer && is_send(a.op.kind) == is_send(b.op.kind);
  return f.channels.model != channel_model::pair || same_peer;
}

}  // namespace

TEST_SUITE("channel order") {
  TEST_CASE("pytorch#172668: refused over channels of pairs and of the group, with the cycle") {
    CHECK(said_over(both_send_first, {}) == "all laws hold");
    std::string const cycle =
        "line 1, column 18: rank 0, step 3: 0SEND_F1 waits for 1RECV_F1, which is queued on rank 1 behind 1SEND_F0; 1SEND_F0 "
        "waits for 2RECV_F0, which is queued behind 0SEND_F1; channels: ";
    CHECK(said_over(both_send_first, {channel_model::pair}) ==
          cycle +
              "pair. On the channel of ranks 0 and 1 rank 1 enqueues 1SEND_F0 before 1RECV_F1. Remedy: the reverse order, both "
              "in one batch, or a channel for each directed edge; 1RECV_F1 is at line 2, column 23");
    CHECK(said_over(both_send_first, {channel_model::group}) ==
          cycle +
              "group. On the channel of all ranks rank 1 enqueues 1SEND_F0 before 1RECV_F1. Remedy: the reverse order, both in "
              "one batch, or a channel for each directed edge; 1RECV_F1 is at line 2, column 23");
    CHECK(said_over(both_send_first, {channel_model::batched}) == "all laws hold");
    CHECK(said_over(both_send_first, {channel_model::edge, true}) ==
          cycle +
              "edge, hosts wait. Remedy: calls that do not wait for the end of their message; 1RECV_F1 is at line 2, column 23");
    CHECK(said_over(receive_first, {channel_model::group}) == "all laws hold");

    CHECK(said_over(gradient_first, {}) == "all laws hold");
    std::string const second = said_over(gradient_first, {channel_model::pair});
    CAPTURE(second);
    CHECK(
        second.find("0SEND_F2 waits for 1RECV_F2, which is queued on rank 1 behind 3SEND_B0; 3SEND_B0 waits for 2RECV_B0, which "
                    "is queued behind 0SEND_F2; channels: pair") != std::string::npos);
  }

  TEST_CASE("in the compiler: a text without messages is not proved for channels") {
    constexpr finding none = csv_source{"0F0,0B0\n1F0,1B0\n"}.over(channel_model::pair)({2, 1, 0}).problem;
    CHECK(
        describe(none).str() ==
        "the text has no messages to prove for channels. Remedy: the text that chevron-plan lower --format csv-comms writes, or "
        "no over(). Messages: 0");
  }

  TEST_CASE("a small send ends without its receive") {
    csv_schedule const read = read_csv(both_send_first);
    std::int64_t const bytes[] = {1000, 64, 64};
    auto const law_below = [&](std::int64_t below) {
      return check_channel_order(read.program.view(), {channel_model::pair}, {nullptr, bytes, 1}, below).broken;
    };
    CHECK(law_below(0) == law::deadlock);
    CHECK(law_below(64) == law::deadlock);
    CHECK(law_below(65) == law::none);  // 1SEND_F0 and 3SEND_B0 are smaller
    CHECK(law_below(1001) == law::none);
  }

  TEST_CASE("round three ranks: each sends to the next before it receives") {
    std::string const ring =
        "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,3RECV_F0,3F0,3SEND_F0,3RECV_F1,3F1,3SEND_F1,3RECV_F2,3F2,3SEND_F2\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,1RECV_F2,1F2,1SEND_F2,4RECV_F0,4F0,4SEND_F0,4RECV_F1,4F1,4SEND_F1,"
        "4RECV_F2,4F2,4SEND_F2\n"
        "2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,2RECV_F2,2F2,2SEND_F2,5RECV_F0,5F0,5RECV_F1,5F1,5RECV_F2,5F2\n";
    CHECK(said_over(ring, {}) == "all laws hold");
    CHECK(said_over(ring, {channel_model::pair}) == "all laws hold");
    std::string const group = said_over(ring, {channel_model::group});
    CAPTURE(group);
    CHECK(
        group ==
        "line 1, column 31: rank 0, step 5: 0SEND_F2 waits for 1RECV_F2, which is queued on rank 1 behind 1SEND_F1; 1SEND_F1 "
        "waits for 2RECV_F1, and so on round 3 messages to 3RECV_F0, queued behind 0SEND_F2; channels: group. On the channel of "
        "all ranks rank 1 enqueues 1SEND_F1 before 1RECV_F2. Remedy: the reverse order, both in one batch, or a channel for each "
        "directed edge; 1RECV_F2 is at line 2, column 45");
  }

  TEST_CASE("6,000 random programs: refused exactly when the machine stops, over each model; each cycle is true") {
    int verdicts = 0, refused[channel_models] = {}, refused_waiting[channel_models] = {}, with_edges = 0;
    for (unsigned seed = 0; seed < 6000; ++seed) {
      dice d{std::mt19937(seed)};
      owned_program const p = with_matched_messages(d);
      program_view const view = p.view();
      std::vector<std::int64_t> bytes;
      std::set<int> small;
      bool const buffers = d.one_in(4);
      for (int s = 0; s + 1 < view.plan.stages; ++s) {
        bytes.push_back(buffers && d.one_in(2) ? 10 : 20);
        if (bytes.back() == 10) small.insert(s);
      }
      bool proved[channel_models] = {}, proved_waiting[channel_models] = {};
      for (bool const hosts_wait : {false, true}) {
        for (channel_model const model : all_models) {
          channel_rules const rules{model, hosts_wait};
          finding const f = check_channel_order(view, rules, {nullptr, bytes.data(), 1}, 20);
          channel_machine machine(view, rules);
          machine.buffered = small;
          bool const runs = machine.runs_through(d.random);
          ++verdicts;
          (hosts_wait ? refused_waiting : refused)[static_cast<int>(model)] += f ? 1 : 0;
          (hosts_wait ? proved_waiting : proved)[static_cast<int>(model)] = !f;
          // A machine that waits may do no more than one that goes on.
          if (hosts_wait && !f && !proved[static_cast<int>(model)])
            DOCTEST_FAIL_CHECK("seed ", seed, ": ", std::string(name_of(model)), " runs only where hosts wait\n", written(view));
          if (runs == static_cast<bool>(f) || (f && !is_true(f, view)))
            DOCTEST_FAIL_CHECK("seed ", seed, ", ", std::string(name_of(model)), hosts_wait ? ", hosts wait" : "",
                               ": the machine ", runs ? "runs" : "stops", ", check says ", describe(f).str(), "\n",
                               written(view));
        }
      }
      // A rank whose host waits runs its messages one after another, as over one channel of the group.
      bool const one_by_one = proved_waiting[0] == proved[static_cast<int>(channel_model::group)] &&
                              proved_waiting[1] == proved_waiting[0] && proved_waiting[2] == proved_waiting[0];
      if (!one_by_one) DOCTEST_FAIL_CHECK("seed ", seed, ": hosts that wait are not as strict as a channel of the group");
      auto const holds = [&](channel_model model) { return proved[static_cast<int>(model)]; };
      bool const ordered = (!holds(channel_model::group) || (holds(channel_model::batched) && holds(channel_model::pair))) &&
                           (holds(channel_model::edge) || (!holds(channel_model::batched) && !holds(channel_model::pair)));
      if (!ordered) DOCTEST_FAIL_CHECK("seed ", seed, ": the strictest model is not group, or edge is not the least strict");
      // Without buffers, channels of edges are the law of every program (`check_program_progress`).
      if (small.empty()) {
        ++with_edges;
        if (holds(channel_model::edge) == static_cast<bool>(detail::check_program_progress(view)))
          DOCTEST_FAIL_CHECK("seed ", seed, ": edge and the law of a program differ\n", written(view));
      }
    }
    DOCTEST_CHECK(verdicts == 6000 * 8);
    DOCTEST_CHECK(with_edges > 3000);
    for (channel_model const model : all_models) {
      DOCTEST_CHECK_MESSAGE(refused[static_cast<int>(model)] >= 100, name_of(model), " ", refused[static_cast<int>(model)]);
      DOCTEST_CHECK(refused[static_cast<int>(model)] <= 5900);
      DOCTEST_CHECK(refused_waiting[static_cast<int>(model)] >= refused[static_cast<int>(model)]);
    }
  }

  TEST_CASE("the catalogue's messages in PyTorch's notation run over every model, even where hosts wait") {
    int judged = 0;
    show_test::for_each_plan([&](plan const& p) {
      if (p.problem) return;
      owned_program const lowered = lower(prove(p)).copy();
      for (auto const waits : {show::csv_waits::left_out, show::csv_waits::written}) {
        csv_schedule const read = read_csv(show::csv_with_communication(lowered.view(), waits));
        if (read.dialect == csv_dialect::compute_only) continue;  // one rank
        for (bool const hosts_wait : {false, true}) {
          for (channel_model const model : all_models) {
            finding const f = check_channel_order(read.program.view(), {model, hosts_wait});
            CAPTURE(p.name.characters);
            CAPTURE(name_of(model));
            CHECK_MESSAGE(!f, describe(f).str());
            ++judged;
          }
        }
      }
    });
    CHECK(judged > 500);
  }
}
