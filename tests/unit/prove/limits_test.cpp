#include <chevron/csv/csv_check.hpp>
#include <chevron/plan/forward_part.hpp>
#include <chevron/schedule.hpp>

#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace chevron;
using namespace chevron::letters;

namespace {

std::string said(plan_view const& plan) { return describe(check(plan)).str(); }

/// The most bytes in flight on any rank, counted without the prover, from a list of the live chunks.
std::int64_t most_bytes(plan_view const& plan, std::vector<std::int64_t> const& of_stage) {
  std::int64_t most = 0;
  for (int r = 0; r < plan.size.ranks; ++r) {
    std::vector<action> kept;
    for (int i = 0; i < plan.length(r); ++i) {
      action const a = plan.at(r, i);
      if (a.kind == kind::forward) kept.push_back(a);
      if (a.kind == kind::backward || a.kind == kind::backward_weight)
        std::erase_if(kept, [&](action b) { return b.stage == a.stage && b.micro_batch == a.micro_batch; });
      std::int64_t now = 0;
      for (action const b : kept) now += of_stage[b.stage];
      most = std::max(most, now);
    }
  }
  return most;
}

}  // namespace

TEST_SUITE("limits") {
  TEST_CASE("of messages: the sentence names both numbers") {
    plan p = catalogue::make_plan("ZBVZeroBubble", {4, 8});
    p.message_limit = messages(p);
    DOCTEST_CHECK(said(p) == "all laws hold");
    --p.message_limit;
    DOCTEST_CHECK(check(p).broken == law::messages);
    DOCTEST_CHECK(said(p) == "a step sends 96 messages, the declared limit is 95");
    DOCTEST_CHECK(name_of(law::messages) == std::string("messages"));
  }

  TEST_CASE("of bytes: of a plan known only at run time, by name or from a file") {
    plan p = catalogue::make_plan("1F1B", {3, 6});
    std::vector<std::int64_t> const of_stage{5'000'000'000, 1, 2};
    size_view const view{of_stage.data(), of_stage.data(), 1};
    DOCTEST_REQUIRE(!declare_bytes(p, 15'000'000'000, view));
    DOCTEST_CHECK(said(p) == "all laws hold");
    DOCTEST_REQUIRE(!declare_bytes(p, 14'999'999'999, view));
    DOCTEST_CHECK(check(p).broken == law::bytes);
    DOCTEST_CHECK(said(p) == "rank 0, step 2: 0F2 makes 15000000000 bytes in flight, the declared limit is 14999999999");
    DOCTEST_CHECK(name_of(law::bytes) == std::string("bytes"));

    std::string const text = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";
    csv_schedule read = read_csv(text);
    DOCTEST_REQUIRE(!declare_bytes(read.plan, 100, sizes{.activation = 51}));
    DOCTEST_CHECK(describe(check(read, text), read, text) ==
                  "line 1, column 5: rank 0, step 1: 0F1 makes 102 bytes in flight, the declared limit is 100");
  }

  TEST_CASE("that make no sense are findings, not ignored") {
    plan p = catalogue::make_plan("1F1B", {2, 2});
    DOCTEST_CHECK(describe(declare_bytes(p, 0, sizes{.activation = 1})).str() ==
                  "a limit of bytes in flight must be at least 1, not 0");
    DOCTEST_CHECK(describe(declare_bytes(p, -7, sizes{})).str() == "a limit of bytes in flight must be at least 1, not -7");
    DOCTEST_REQUIRE(!declare_bytes(p, 7, stage_sizes<2>{.activation = {1, -3}}));
    DOCTEST_CHECK(said(p) == "a stage declares a negative size, stage 1");
    auto const refused = [](auto const& schedule, shape size) { return describe(expand(schedule, size).problem).str(); };
    DOCTEST_CHECK(refused(catalogue::one_f_one_b.at_most_in_flight(ranks - 4), {4, 8}) ==
                  "a limit of chunks in flight must be at least 1, not 0");
    DOCTEST_CHECK(refused(catalogue::one_f_one_b.at_most_messages(ranks - 4), {1, 8}) ==
                  "a limit of messages must be at least 1, not -3");
    DOCTEST_CHECK(refused(catalogue::gpipe.at_most_bytes_in_flight(9, stage_sizes<3>{}), {4, 8}) ==
                  "sizes must be declared for each stage, and the stages are 4, not 3");
    DOCTEST_CHECK(refused(schedule_of(work_graph::full_backward).at_most_in_flight(rank), {4, 8}) ==
                  "a limit of chunks in flight must be at least 1, not 0");
  }

  TEST_CASE("several at once, and none of them left on an evaluation plan") {
    auto const schedule = catalogue::zb_h1.at_most_in_flight(ranks)
                              .at_most_messages(6 * micro_batches)
                              .at_most_bytes_in_flight(40, sizes{.activation = 10});
    plan const p = expand(schedule, {4, 8});
    DOCTEST_CHECK(said(p) == "all laws hold");
    DOCTEST_CHECK(p.in_flight_limit == 4);
    DOCTEST_CHECK(p.message_limit == 48);
    DOCTEST_CHECK(p.byte_limit == 40);
    DOCTEST_CHECK(said(forward_part(p)) == "all laws hold");
    DOCTEST_CHECK(said(expand(schedule.at_most_bytes_in_flight(39, sizes{.activation = 10}), {4, 8})).find("40 bytes") !=
                  std::string::npos);
  }

  TEST_CASE("of bytes, declared and found by counting, agree on every schedule with uneven stages") {
    std::mt19937 random(5);
    catalogue::for_each([&](auto const& one) {
      for (int p = 1; p <= 5; ++p) {
        plan made = expand(one, {p, 7});
        std::vector<std::int64_t> of_stage(static_cast<std::size_t>(made.stages));
        for (auto& bytes : of_stage) bytes = static_cast<std::int64_t>(random() % 1000);
        of_stage[random() % of_stage.size()] += 1;
        size_view const view{of_stage.data(), of_stage.data(), 1};
        std::int64_t const most = most_bytes(made, of_stage);
        DOCTEST_REQUIRE(!declare_bytes(made, most, view));
        DOCTEST_REQUIRE(!check(made));
        if (most < 2) continue;
        DOCTEST_REQUIRE(!declare_bytes(made, most - 1, view));
        finding const f = check(made);
        DOCTEST_REQUIRE(f.broken == law::bytes);
        DOCTEST_REQUIRE(f.limit == most - 1);
      }
    });
  }

  TEST_CASE("a list schedule keeps to its bytes, and gets stuck where one microbatch does not fit") {
    stage_sizes<8> const of{.activation = {8, 1, 1, 1, 1, 1, 1, 4}};
    std::vector<std::int64_t> const of_stage(of.activation, of.activation + 8);
    auto const on_v = schedule_of(work_graph::split_backward).place(placement::vee).prefer(I, F, W);
    double before = 1e9;
    for (std::int64_t most : {12, 20, 28, 60, 200}) {
      plan const p = expand(on_v.at_most_bytes_in_flight(most, of), {4, 8});
      DOCTEST_REQUIRE(said(p) == "all laws hold");
      DOCTEST_CHECK(most_bytes(p, of_stage) <= most);
      double const now = makespan(p, costs{});
      DOCTEST_CHECK(now <= before);
      before = now;
    }
    DOCTEST_CHECK(before == makespan(expand(on_v, {4, 8}), costs{}));
    DOCTEST_CHECK(said(expand(on_v.at_most_bytes_in_flight(11, of), {4, 8})) ==
                  "rank 0: list scheduling is stuck: allow more than the limit of bytes in flight, which is 11");
  }
}
