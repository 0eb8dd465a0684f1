#include <chevron/schedule.hpp>

#include <random>
#include <string>
#include <vector>

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

/// An oracle that knows nothing of `check`: every (stage, microbatch) has what it needs, and running any action whose needs
/// are met, one at a time, ends with all of them run.
bool runs_to_its_end(plan_view const& plan) {
  auto const cells = static_cast<std::size_t>(plan.stages * plan.size.micro_batches);
  std::vector<int> forward(cells), input(cells), weight(cells);
  std::vector<int> next(static_cast<std::size_t>(plan.size.ranks));
  bool moved = true;
  int ran = 0;
  while (moved) {
    moved = false;
    for (int r = 0; r < plan.size.ranks; ++r) {
      int& at = next[static_cast<std::size_t>(r)];
      if (at == plan.length(r)) continue;
      action const a = plan.at(r, at);
      int const stage = static_cast<int>(a.stage), m = static_cast<int>(a.micro_batch);
      if (stage >= plan.stages || m >= plan.size.micro_batches || plan.rank_of_stage(stage) != r) return false;
      auto const cell = static_cast<std::size_t>(stage * plan.size.micro_batches + m);
      auto const width = static_cast<std::size_t>(plan.size.micro_batches);
      bool const last = stage + 1 == plan.stages;
      bool ready = false;
      if (a.what == kind::forward)
        ready = stage == 0 || forward[cell - width] > 0;
      else if (a.what == kind::backward_weight)
        ready = input[cell] > 0;
      else
        ready = forward[cell] > 0 && (last || input[cell + width] > 0);
      if (!ready) continue;
      if (a.what == kind::forward) ++forward[cell];
      if (a.what == kind::backward_input || a.what == kind::backward) ++input[cell];
      if (a.what == kind::backward_weight || a.what == kind::backward) ++weight[cell];
      ++at;
      ++ran;
      moved = true;
    }
  }
  if (ran != plan.total()) return false;
  for (std::size_t cell = 0; cell < cells; ++cell) {
    if (forward[cell] != 1 || input[cell] != 1 || weight[cell] != 1) return false;
  }
  return true;
}

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
                  "rank 3, step 1: 3SEND_F0 is no computation: a plan holds only F, B, I and W; stages: 4");

    plan swapped = one_f_one_b_plan();
    std::swap(swapped.actions.data[swapped.begin.data[3]], swapped.actions.data[swapped.begin.data[3] + 1]);
    DOCTEST_CHECK(describe(check(swapped)).view() == "rank 3, step 0: 3B0 comes before 3F0, which it needs");

    plan limited = one_f_one_b_plan();
    limited.in_flight_limit = 3;
    DOCTEST_CHECK(check(limited).broken == law::in_flight);
    DOCTEST_CHECK(describe(check(limited)).view() == "rank 0, step 3: 0F3 makes 4 chunks in flight, the declared limit is 3");
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
    constexpr auto const& constant = checked<catalogue::zb_v, shape{.ranks = 3, .micro_batches = 7}>;
    plan const value = catalogue::make_plan("zbvzerobubble", {3, 7});
    DOCTEST_REQUIRE(value.view().total() == constant.view().total());
    for (int i = 0; i < value.view().total(); ++i) DOCTEST_CHECK(value.actions.data[i] == constant.actions[i]);
  }

  TEST_CASE("no false alarm and no missed fault on random changes") {
    std::mt19937 random(20240117);
    auto const pick = [&](int below) { return static_cast<int>(random() % static_cast<unsigned>(below)); };
    int lawful = 0, broken = 0;
    for (int round = 0; round < 20000; ++round) {
      shape const size{1 + pick(5), 1 + pick(8), 0};
      plan p;
      int const which = pick(8);
      int index = 0;
      catalogue::for_each([&](auto const& one) {
        if (index++ == which) p = expand(one, size);
      });
      // One or two random faults, or harmless changes: swap two actions, or renumber, re-rank or re-kind one.
      for (int changes = 1 + pick(2); changes > 0; --changes) {
        int const rank = pick(size.ranks);
        action* const list = p.actions.data + p.begin.data[rank];
        int const length = p.begin.data[rank + 1] - p.begin.data[rank];
        int const at = pick(length);
        switch (pick(5)) {
          case 0:
            std::swap(list[at], list[pick(length)]);
            break;
          case 1:
            if (at + 1 < length) std::swap(list[at], list[at + 1]);
            break;
          case 2:
            list[at] = make_action(list[at].what, static_cast<int>(list[at].stage), pick(size.micro_batches + 1));
            break;
          case 3:
            list[at] = make_action(list[at].what, pick(p.stages), static_cast<int>(list[at].micro_batch));
            break;
          default:
            list[at].what = static_cast<kind>(pick(4));
            break;
        }
      }
      bool const runs = runs_to_its_end(p);
      finding const f = check(p);
      DOCTEST_CHECK_MESSAGE(runs == (f.broken == law::none), p.name, " P=", size.ranks, " M=", size.micro_batches, ": ",
                            describe(f).str());
      (runs ? lawful : broken) += 1;
    }
    DOCTEST_CHECK(lawful > 1500);
    DOCTEST_CHECK(broken > 5000);
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
    DOCTEST_CHECK(describe(check(catalogue::make_plan("2F2B", {4, 8}))).view() ==
                  "no schedule of the catalogue has that name; it holds 8");
    DOCTEST_CHECK(describe(check(catalogue::make_plan("1F1B", {0, 8}))).view() == "ranks must be at least 1, not 0");
    DOCTEST_CHECK(describe(check(catalogue::make_plan("1F1B", {4, -3}))).view() == "micro_batches must be at least 1, not -3");
    DOCTEST_CHECK(describe(check(catalogue::make_plan("1F1B", {4, 70000}))).view() ==
                  "micro_batches must be at most 65535, not 70000");
    DOCTEST_CHECK(describe(check(catalogue::make_plan("GPipe", {3000, 4}))).view() ==
                  "ranks x chunks must be at most 2048, not 3000");
  }
}
