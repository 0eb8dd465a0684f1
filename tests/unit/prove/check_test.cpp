#include <chevron/schedule.hpp>

#include <string>
#include <utility>

#include <doctest/doctest.h>

using namespace chevron;

namespace {

struct change {
  int rank;
  int position;
  action to;
};

plan changed(plan p, change const& c) {
  p.actions.data[p.begin.data[c.rank] + c.position] = c.to;
  return p;
}

plan one_f_one_b_plan() { return expand(catalogue::one_f_one_b, {4, 8}); }

}  // namespace

TEST_SUITE("check") {
  TEST_CASE("each law has its sentence") {
    plan const good = one_f_one_b_plan();
    DOCTEST_CHECK(check(good).broken == law::none);
    DOCTEST_CHECK(describe(check(good)).view() == "all laws hold");

    auto says = [&](change const& c) { return describe(check(changed(good, c))).str(); };
    DOCTEST_CHECK(says({2, 3, make_action(kind::forward, 2, 0)}) == "rank 2, step 3: 2F0 was already done at step 0");
    DOCTEST_CHECK(says({0, 0, make_action(kind::forward, 0, 8)}) ==
                  "rank 0, step 0: 0F8 names a microbatch that does not exist; microbatches: 8");
    DOCTEST_CHECK(says({0, 0, make_action(kind::forward, 7, 0)}) ==
                  "rank 0, step 0: 7F0 names a stage that does not exist; stages: 4");
    DOCTEST_CHECK(says({1, 0, make_action(kind::forward, 0, 0)}) ==
                  "rank 1, step 0: 0F0 is on the wrong rank: its stage lives on rank 0");
    DOCTEST_CHECK(says({3, 1, make_action(kind::backward_input, 3, 0)}) ==
                  "rank 3: 3W0 is missing: every I is followed by its W");
    DOCTEST_CHECK(says({3, 1, make_action(kind::send_forward, 3, 0)}) ==
                  "rank 3, step 1: 3SEND_F0 is no computation: a plan holds only F, B, I, W, R and own actions; stages: 4");

    plan swapped = one_f_one_b_plan();
    std::swap(swapped.actions.data[swapped.begin.data[3]], swapped.actions.data[swapped.begin.data[3] + 1]);
    DOCTEST_CHECK(describe(check(swapped)).view() == "rank 3, step 0: 3B0 comes before 3F0, which it needs");

    plan limited = one_f_one_b_plan();
    limited.in_flight_limit = 3;
    DOCTEST_CHECK(check(limited).broken == law::in_flight);
    DOCTEST_CHECK(describe(check(limited)).view() == "rank 0, step 3: 0F3 makes 4 chunks in flight, the declared limit is 3");
  }

  TEST_CASE("declared bytes and messages, and halves that make no pair, have their sentences") {
    plan heavy = one_f_one_b_plan();
    DOCTEST_CHECK(!declare_bytes(heavy, 400, sizes{.activation = 100}));
    DOCTEST_CHECK(check(heavy).broken == law::none);
    DOCTEST_CHECK(!declare_bytes(heavy, 399, sizes{.activation = 100}));
    DOCTEST_CHECK(describe(check(heavy)).view() == "rank 0, step 3: 0F3 makes 400 bytes in flight, the declared limit is 399");
    plan talkative = one_f_one_b_plan();
    talkative.message_limit = 47;
    DOCTEST_CHECK(describe(check(talkative)).view() == "a step sends 48 messages, the declared limit is 47");

    auto const fused = [](int rank, int position) {
      plan p = one_f_one_b_plan();
      p.actions.data[p.begin.data[rank] + position].fused = 1;
      return describe(check(p)).str();
    };
    DOCTEST_CHECK(fused(0, 5) == "all laws hold");  // 0F4 and 0B1
    DOCTEST_CHECK(
        fused(0, 0) ==
        "rank 0, step 0: 0F0 is marked as half of a fused pair, which is an F and then a B or I, but after it comes 0F1");
    DOCTEST_CHECK(
        fused(0, 4) ==
        "rank 0, step 4: 0B0 is marked as half of a fused pair, which is an F and then a B or I, but after it comes 0F4");
    DOCTEST_CHECK(fused(3, 0) == "rank 3, step 0: 3F0 is fused with its own backward, which needs it: 3B0");
    DOCTEST_CHECK(fused(3, 15) == "rank 3, step 15: 3B7 is marked as half of a fused pair, but is the last action of its rank");
  }

  TEST_CASE("a deadlock names its cycle, not the first rank that got stuck") {
    // Rank 3 lags: it wants microbatch 1 forward before it gives rank 2 the gradient of microbatch 0. Ranks 0 to 2 all get
    // stuck, but only 2 and 3 wait for each other.
    plan p = expand(catalogue::one_f_one_b, {4, 4});
    action* const last = p.actions.data + p.begin.data[3];
    std::swap(last[1], last[2]);  // 3F0 3F1 3B0 ...: harmless, rank 2 has run 2F1 by then
    DOCTEST_CHECK(check(p).broken == law::none);
    std::swap(last[2], last[4]);  // 3F0 3F1 3F2 3B1 3B0: rank 2 must give 2F2, but waits for 3B0 first
    finding const f = check(p);
    DOCTEST_CHECK(f.broken == law::deadlock);
    DOCTEST_CHECK(
        describe(f).view() ==
        "rank 2, step 2: 2B0 waits for 3B0, which is queued on rank 3 behind 3F2; 3F2 waits for 2F2, which is queued behind 2B0");
  }

  TEST_CASE("the compiler's verdict and the program's are the same value") {
    constexpr auto constant = checked<catalogue::zb_v, shape{.ranks = 3, .micro_batches = 7}>;
    plan const value = catalogue::make_plan("zbvzerobubble", {3, 7});
    DOCTEST_REQUIRE(value.view().total() == constant.view().total());
    for (int i = 0; i < value.view().total(); ++i) DOCTEST_CHECK(value.actions.data[i] == constant.view().actions[i]);
  }

  TEST_CASE("a count below zero is refused, also the smallest one") {
    using namespace chevron::letters;
    // Right but for the last rank, where the count is -1.
    auto const one_short = schedule(placement::linear, warmup(F * (ranks - 2 - rank)) | steady(F, B) | cooldown(B));
    DOCTEST_CHECK(describe(check(expand(one_short, {4, 8}))).view() ==
                  "rank 3: a phase has a negative count, see max_of; it is -1");
    auto const mended = schedule(placement::linear, warmup(F * max_of(0, ranks - 2 - rank)) | steady(F, B) | cooldown(B));
    DOCTEST_CHECK(check(expand(mended, {4, 8})).broken != law::description);
    auto const inside = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F * (rank - 1), B) | cooldown(B));
    DOCTEST_CHECK(describe(check(expand(inside, {4, 8}))).view() == "rank 0: a phase has a negative count, see max_of; it is -1");
  }

  TEST_CASE("more in flight than a program has slots for is refused before it is lowered") {
    DOCTEST_CHECK(check(catalogue::make_plan("GPipe", {2, 21845})).broken == law::none);
    DOCTEST_CHECK(describe(check(catalogue::make_plan("GPipe", {2, 30000}))).view() ==
                  "rank 0, step 21845: 0F21845 makes 21846 chunks in flight, the most that a program has slots for is 21845");
    DOCTEST_CHECK(check(catalogue::make_plan("1F1B", {2, 65535})).broken == law::none);
  }

  TEST_CASE("an unknown name or an impossible shape is a finding, not a crash") {
    constexpr int named = decltype(hana::size(catalogue::all))::value + decltype(hana::size(catalogue::recomputing))::value +
                          decltype(hana::size(catalogue::sliced))::value + decltype(hana::size(catalogue::evaluation))::value;
    DOCTEST_CHECK(describe(check(catalogue::make_plan("alternating", {4, 8}))).str() ==
                  "no schedule of the catalogue has that name; it holds " + std::to_string(named));
    DOCTEST_CHECK(describe(check(catalogue::make_plan("ZB-X", {4, 8}))).view() ==
                  "no schedule of the catalogue has that name; did you mean ZB-H1?");
    DOCTEST_CHECK(describe(check(catalogue::make_plan("zbvzerobuble", {4, 8}))).view() ==
                  "no schedule of the catalogue has that name; did you mean ZBVZeroBubble?");
    DOCTEST_CHECK(describe(check(catalogue::make_plan("ZB-H1", {4, 8, 2}))).view() ==
                  "ZB-H1 has one chunk on each rank; with several it is InterleavedZeroBubble. chunks can be 1, not 2");
    DOCTEST_CHECK(describe(check(catalogue::make_plan("one_f_one_b", {4, 8, 3}))).view() ==
                  "1F1B has one chunk on each rank; with several it is Interleaved1F1B. chunks can be 1, not 3");
    DOCTEST_CHECK(describe(check(catalogue::make_plan("GPipe", {4, 8, 3}))).view() ==
                  "with this placement chunks can be 1, not 3");
    // The error says which schedule was asked for.
    DOCTEST_CHECK_THROWS_WITH_AS(static_cast<void>(prove(catalogue::make_plan("ZB-X", {4, 8}))),
                                 "`ZB-X`: no schedule of the catalogue has that name; did you mean ZB-H1?",
                                 invalid_schedule_error);
    auto const typo = schedule(placement::of({0, 1, 2, 3, 0, 1, 2, 3, 3, 2, 1, 1}), warmup(letters::F) | cooldown(letters::B));
    DOCTEST_CHECK(describe(check(expand(typo, {4, 8, 3}))).view() ==
                  "with this placement chunks can be 4, not 3: rank 1 has 4 stages, rank 0 has 2");
    DOCTEST_CHECK(describe(check(catalogue::make_plan("1F1B", {0, 8}))).view() == "ranks must be at least 1, not 0");
    DOCTEST_CHECK(describe(check(catalogue::make_plan("1F1B", {4, -3}))).view() == "micro_batches must be at least 1, not -3");
    DOCTEST_CHECK(describe(check(catalogue::make_plan("1F1B", {4, 70000}))).view() ==
                  "micro_batches must be at most 65535, not 70000");
    DOCTEST_CHECK(describe(check(catalogue::make_plan("GPipe", {3000, 4}))).view() ==
                  "ranks x chunks must be at most 1024, not 3000");
  }
}
