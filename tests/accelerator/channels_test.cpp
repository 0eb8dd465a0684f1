// timeout: 120
// Messages over channels that they share, on the device and late: a program hangs there exactly if check_channel_order refuses
// it.
//
//   CHEVRON_CHANNEL_MUTANTS=1000 build/bin/chevron-accelerator-tests --test-case='*over each model of channels*'
#include <array>
#include <cstdlib>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/ops/ones.h>

#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_check.hpp>
#include <chevron/csv/csv_read.hpp>
#include <chevron/lower/channel_order.hpp>

#include "accelerator/channel_run.hpp"
#include "unit/lower/matched_programs.hpp"

#include <doctest/doctest.h>

using namespace chevron;

namespace {

constexpr channel_rules all_rules[] = {
    {channel_model::edge, false}, {channel_model::pair, false}, {channel_model::group, false}, {channel_model::batched, false},
    {channel_model::edge, true},  {channel_model::pair, true},  {channel_model::group, true},  {channel_model::batched, true}};

// Both ranks send before they receive: rank 0 microbatch 1, rank 1 the gradient of microbatch 0.
constexpr std::string_view both_send =
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";

/// A rank and a place in its list; {-1, -1} for a text that is no message of the program.
std::array<int, 2> place_of(program_view const& p, std::string const& message) {
  for (int r = 0; r < p.plan.size.ranks; ++r) {
    for (int i = 0; i < p.length(r); ++i) {
      if (to_text(p.at(r, i).op).str() == message) return {r, i};
    }
  }
  return {-1, -1};
}

/// Whether the messages wait for each other as it is said: each for its own other end, which its rank enqueues behind the next.
bool is_true(std::vector<accelerator::message_wait> const& cycle, program_view const& p) {
  step_graph const graph(p.plan);
  for (std::size_t i = 0; i < cycle.size(); ++i) {
    auto const [rank, at] = place_of(p, cycle[i].message);
    auto const [there, its_place] = place_of(p, cycle[i].other_end);
    auto const [ahead_rank, ahead] = place_of(p, cycle[i].behind);
    if (rank < 0 || there < 0 || ahead_rank != there || ahead >= its_place) return false;
    action const one = p.at(rank, at).op, other = p.at(there, its_place).op;
    bool const sends = is_send(one.kind);
    if (sends == is_send(other.kind) || p.at(rank, at).peer != there || p.at(there, its_place).peer != rank) return false;
    if ((sends ? graph.makes(one) : graph.needs(one)) != (sends ? graph.needs(other) : graph.makes(other))) return false;
    if (cycle[i].behind != cycle[(i + 1) % cycle.size()].message) return false;
  }
  return cycle.size() > 1;
}

int asked_mutants() {
  char const* const asked = std::getenv("CHEVRON_CHANNEL_MUTANTS");
  return asked == nullptr ? 40 : std::atoi(asked);
}

}  // namespace

TEST_CASE("an order that hangs over a channel of a pair hangs on the device, which names the messages; over edges it trains") {
  csv_schedule const read = read_csv(both_send);
  auto const outcome = [&](channel_rules rules) { return accelerator::run_over_channels(read.program.view(), rules); };
  auto const pair = outcome({channel_model::pair});
  CHECK(!pair.runs);
  CHECK(accelerator::words_of(pair.cycle) ==
        "0SEND_F1 waits for 1RECV_F1, which stands behind 1SEND_B0; 1SEND_B0 waits for 0RECV_B0, which stands behind 0SEND_F1");
  CHECK(!outcome({channel_model::group}).runs);
  auto const waiting = outcome({channel_model::edge, true});
  CHECK(!waiting.runs);
  CHECK(accelerator::words_of(waiting.cycle) == "0SEND_F1 waits for its other end, which is not enqueued");
  for (channel_model const model : {channel_model::edge, channel_model::batched}) CHECK(outcome({model}).runs);
  CHECK(accelerator::run_over_channels(read.program.view(), {channel_model::pair}, {0}).runs);
}

TEST_CASE("a batch ends with its last message, and its messages run side by side; a buffered send takes the values of its turn") {
  REQUIRE(accelerator::start_over(true) == 0);
  {
    accelerator::accelerator_streams zero(accelerator::device(0)), one(accelerator::device(1));
    auto a = zero.share("all", 0), b = one.share("all", 1);
    auto const on = [](int rank) { return at::TensorOptions().device(accelerator::device(rank)); };
    at::Tensor const sent[] = {at::ones({2}, on(0))}, there[] = {at::empty({2}, on(1))};
    at::Tensor const back[] = {at::ones({2}, on(1))}, here[] = {at::empty({2}, on(0))};
    auto event = zero.make_event(), other = one.make_event();
    auto const stop = [] { return false; };
    zero.record(event);
    zero.wait(a.on, event);
    one.record(other);
    one.wait(b.on, other);
    zero.begin_batch(a);
    zero.send(a, 1, sent, "send", false);
    zero.receive(a, 1, here, "receive back");
    zero.end_batch(a);
    zero.record(event, a.on);
    // The other rank's order is the reverse, one after another.
    one.send(b, 0, back, "send back", false);
    one.record(other, b.on);
    CHECK(one.passed(other));
    CHECK(!zero.passed(event));
    CHECK(accelerator::words_of(accelerator::late_streams::instance().cycle_of_messages(a.on.number)) ==
          "send waits for its other end, which is not enqueued");
    one.receive(b, 0, there, "receive");
    CHECK(zero.passed(event));

    zero.send(a, 1, sent, "send in front", false);
    zero.send(a, 1, sent, "small send", true);
    zero.record(event, a.on);
    CHECK(!zero.passed(event));
    one.receive(b, 0, there, "receive");
    CHECK(zero.passed(event));
    zero.wait(event, stop);
    sent[0].add_(1);
    at::Tensor const sum = sent[0].cpu();  // the addition has run, and does not reach what was sent before
    one.receive(b, 0, there, "receive of the small send");
    one.record(other, b.on);
    one.wait(other, stop);
    CHECK(there[0].cpu().equal(at::ones({2})));
    CHECK(sum.equal(at::full({2}, 2.f)));
    CHECK(accelerator::detector::instance().faults().empty());
  }
  CHECK(accelerator::start_over() == 0);
}

TEST_CASE("the catalogue's messages in PyTorch's notation run over each model of channels, with a plain loop's numbers") {
  int ran = 0;
  catalogue::for_each([&](auto const& schedule) {
    plan const made = expand(schedule, shape{3, 3, 0});
    if (made.problem) return;
    proved_program const lowered = lower(prove(made));
    csv_schedule const read = read_csv(show::csv_with_communication(lowered.view(), show::csv_waits::left_out));
    for (channel_rules const rules : all_rules) {
      auto const got = accelerator::run_over_channels(read.program.view(), rules);
      INFO(std::string(schedule.name), ", ", std::string(name_of(rules.model)), ": ", accelerator::words_of(got.cycle));
      CHECK(got.runs);
      CHECK(got.numbers.empty());
      CHECK(got.faults.empty());
      CHECK(got.left == 0);
      ++ran;
    }
  });
  CHECK(ran > 80);
}

TEST_CASE("drawn programs, over each model of channels: one hangs on the device exactly if its order is refused") {
  int const wanted = asked_mutants();
  int refused[8] = {}, named = 0, drawn = 0;
  for (unsigned seed = 700000; drawn < wanted; ++seed) {
    tests::dice d{std::mt19937(seed)};
    owned_program const p = tests::with_matched_messages(d);
    program_view const view = p.view();
    if (view.plan.size.ranks > 4 || view.total() > 160) continue;
    ++drawn;
    std::vector<std::int64_t> bytes;
    std::set<int> small;
    bool const buffers = d.one_in(3);
    for (int s = 0; s + 1 < view.plan.stages; ++s) {
      bytes.push_back(buffers && d.one_in(2) ? 10 : 20);
      if (bytes.back() == 10) small.insert(s);
    }
    for (std::size_t i = 0; i < 8; ++i) {
      channel_rules const rules = all_rules[i];
      size_view const sizes{.message = bytes.data(), .stride = 1};
      finding const f = check_channel_order(view, rules, sizes, 20);
      auto const got = accelerator::run_over_channels(view, rules, small);
      std::string const words = "seed " + std::to_string(seed) + ", " + name_of(rules.model) +
                                (rules.hosts_wait ? ", hosts wait: " : ": ") + accelerator::words_of(got.cycle);
      refused[i] += f ? 1 : 0;
      if (got.runs == static_cast<bool>(f))
        DOCTEST_FAIL_CHECK(words, ": the device ", got.runs ? "runs" : "hangs", ", check says ", describe(f).str(), "\n",
                           tests::written(view));
      if (!got.faults.empty()) DOCTEST_FAIL_CHECK(words, got.faults.front().text);
      if (!got.numbers.empty()) DOCTEST_FAIL_CHECK(words, got.numbers.front());
      if (got.left != 0) DOCTEST_FAIL_CHECK(words, ": memory is left");
      if (got.runs) continue;
      // Where hosts wait, the other end of a message may not be enqueued.
      bool const is_named =
          got.cycle.size() == 1 && rules.hosts_wait ? place_of(view, got.cycle[0].message)[0] >= 0 : is_true(got.cycle, view);
      named += is_named ? 1 : 0;
      if (!is_named) DOCTEST_FAIL_CHECK(words, ": no cycle of the program\n", tests::written(view));
    }
  }
  CHECK(named > 0);
  for (std::size_t i = 0; i < 8; ++i) {
    std::string const name = std::string(name_of(all_rules[i].model)) + (all_rules[i].hosts_wait ? ", hosts wait" : "");
    CAPTURE(name);
    DOCTEST_CHECK(refused[i] * 40 >= wanted);
    DOCTEST_CHECK(refused[i] < wanted);
    MESSAGE(name, ": ", wanted, " programs, of which ", refused[i], " hang");
  }
}
