#include <algorithm>
#include <string>
#include <utility>

#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::make_plan;
using catalogue::one_f_one_b_with_slack;
using catalogue::slack;
using catalogue::zb_h1_with_slack;

// Costs and delays of quarters, which doubles hold exactly.
struct slow_link {
  double forward, input, weight, delay;
};
constexpr slow_link one_forward{1, 1, 1, 1}, long_way{1, 1, 1, 3.5}, short_way{2, 3, 1, 0.5}, heavy{1, 4, 0.5, 6};

/// The same for all stages, and one link with a delay: half of it is transfer, half latency.
struct slow_costs {
  stage_costs<16> all;
  constexpr slow_costs(slow_link const& of, int after_rank) {
    for (int s = 0; s < 16; ++s) {
      all.forward[s] = of.forward;
      all.backward_input[s] = of.input;
      all.backward_weight[s] = of.weight;
    }
    all.communication[after_rank] = all.latency[after_rank] = of.delay / 2;
  }
};
constexpr int rounded_up(double x) { return static_cast<int>(x) + (x > static_cast<int>(x) ? 1 : 0); }

/// For every link of up to so many ranks, numbers of microbatches up to so many, and slack of just enough and one more.
template <class Claim>
constexpr grid_result over_links(int most_ranks, int most_micro_batches, int step, Claim claim) {
  grid_result result;
  for (slow_link const& link : {one_forward, long_way, short_way, heavy}) {
    for (int p = 2; p <= most_ranks; ++p) {
      for (int after = 0; after + 1 < p; ++after) {
        for (int m = 1; m <= most_micro_batches; m += step) {
          for (int more : {0, 1}) {
            ++result.points;
            if (!claim(shape{p, m}, link, after, more)) return {result.points, shape{p, m}};
          }
        }
      }
    }
  }
  return result;
}

// 1F1B: nothing of the link is seen but its first way there and its last way back, which no whole backwards can avoid.
inline constexpr auto absorbed = [](shape size, slow_link const& link, int after, int more) {
  double const both = link.forward + link.input + link.weight;
  int const e = rounded_up(2 * link.delay / both) + more;
  slow_costs const costs(link, after);
  plan const made = expand(one_f_one_b_with_slack({.after_rank = after, .forwards = e}), size);
  int const p = size.ranks, m = size.micro_batches;
  return lawful(made) && makespan(made, costs.all) == (m + p - 1) * both + 2 * link.delay &&
         peaks_are(made, [&](int rank) { return smaller_of(m, p - rank + (rank <= after ? e : 0)); });
};
static_assert(over_links(4, 9, 4, absorbed).holds());

// ZB-H1: from P + e microbatches on.
inline constexpr auto absorbed_in_two = [](shape size, slow_link const& link, int after, int more) {
  auto const& [f, i, w, d] = link;
  int const e = rounded_up(2 * d / (f + i)) + more;
  int const p = size.ranks, m = size.micro_batches, c = after + 1;
  if (m < p + e) return true;
  slow_costs const costs(link, after);
  plan const made = expand(zb_h1_with_slack({.after_rank = after, .forwards = e}), size);
  double bubble = (p - 1) * (f + i - w) + 2 * d - e * w;
  for (double const one : {(p - 1) * f + d, c * f + (p - 1 - c) * i + d}) bubble = one > bubble ? one : bubble;
  return lawful(made) && makespan(made, costs.all) == m * (f + i + w) + bubble && peak_in_flight(made) == p + e;
};
static_assert(over_links(3, 12, 4, absorbed_in_two).holds());

TEST_CASE("slack absorbs a slow link: every link, M, P and some delays") {
  for (auto const& found : {when_run(12, [](int most) { return over_links(most, 40, 1, absorbed); }),
                            when_run(12, [](int most) { return over_links(most, 40, 1, absorbed_in_two); })})
    CHECK_MESSAGE(found.holds(), "P = ", found.failed.ranks, ", M = ", found.failed.micro_batches);
}

// Eight ranks, 64 microbatches, the link in the middle as slow as a forward.
constexpr plan eight(int forwards) {
  return expand(one_f_one_b_with_slack({.after_rank = 3, .forwards = forwards}), shape{8, 64});
}
static_assert(makespan(eight(0), slow_costs(one_forward, 3).all) == 275 &&
              makespan(eight(1), slow_costs(one_forward, 3).all) == 215);

// With too few forwards, 2 + e microbatches take 2(T_F + T_B + d).
TEST_CASE("slack that is too short: the link is seen once in 2 + e microbatches") {
  for (int e : {0, 1, 2}) {
    slow_link const link{1, 1, 1, 6};
    slow_costs const costs(link, 2);
    auto const at = [&](int m) {
      return makespan(expand(one_f_one_b_with_slack({.after_rank = 2, .forwards = e}), shape{6, m}), costs.all);
    };
    CHECK(at(60 + 2 + e) - at(60) == 2 * (3 + 6));
  }
}

TEST_CASE("several slow links: the slack of each adds up, and so do the ways there and back") {
  stage_costs<16> costs = slow_costs(one_forward, 1).all;
  costs.latency[4] = 4;
  plan const made =
      expand(one_f_one_b_with_slack({.after_rank = 1, .forwards = 1}, slack{.after_rank = 4, .forwards = 3}), shape{7, 30});
  CHECK(makespan(made, costs) == (30 + 6) * 3 + 2 * (1 + 4));
  CHECK(peak_in_flight(made, 0) == 7 + 4);
  CHECK(peak_in_flight(made, 2) == 5 + 3);
  CHECK(peak_in_flight(made, 5) == 2);
  plan const in_two =
      expand(zb_h1_with_slack({.after_rank = 1, .forwards = 1}, slack{.after_rank = 4, .forwards = 4}), shape{7, 30});
  CHECK(lawful(in_two));
  CHECK(peak_in_flight(in_two) == 7 + 5);
  CHECK(makespan(in_two, costs) < makespan(made, costs));
  auto const needed = catalogue::slack_for(costs, 7, false);
  REQUIRE(needed.count == 2);
  // Where room is short it goes to whichever link is the slowest as yet; of links that are all alike none is slow.
  for (auto const& [room, name] :
       {std::pair{3, "1F1B+1@1-2+2@4-5"}, std::pair{2, "1F1B+2@4-5"}, std::pair{0, "1F1B"}, std::pair{-1, "1F1B"}}) {
    auto const some = catalogue::slack_for(costs, 7, false, room);
    CHECK(std::string(catalogue::name_with_slack("1F1B", some.begin(), some.end())) == name);
  }
  CHECK(catalogue::slack_for(chevron::costs{.communication = 2}, 7, false).count == 0);
  // A slow link among others that take time, too, need be no faster than they are: 2(3 + 6) / (2 + e) at most 3 + 1.
  for (double& latency : costs.latency) latency = 1;
  costs.communication[1] = 0;
  costs.latency[4] = 6;
  auto const fewer = catalogue::slack_for(costs, 7, false);
  REQUIRE(fewer.count == 1);
  CHECK(fewer.data[0].after_rank == 4);
  CHECK(fewer.data[0].forwards == 3);
  CHECK(std::string(catalogue::name_with_slack("1F1B", needed.begin(), needed.end())) == "1F1B+1@1-2+3@4-5");
}

// Without slack they are the schedules that they are made of; names say how much there is.
static_assert([] {
  plan const none = expand(zb_h1_with_slack({.after_rank = 1, .forwards = 0}), shape{4, 8}), plain = make_plan("ZB-H1", {4, 8});
  for (int i = 0; i < plain.actions.count; ++i) {
    if (!(none.actions.data[i] == plain.actions.data[i])) return false;
  }
  return none.actions.count == plain.actions.count;
}());
TEST_CASE("by name") {
  plan const named = make_plan("1f1b+2@3-4", {8, 16});
  CHECK(std::string(named.name) == "1F1B+2@3-4");
  CHECK(peak_in_flight(named, 3) == 5 + 2);
  CHECK(peak_in_flight(make_plan("ZB-H1+1@0-1+2@1-2", {4, 16})) == 4 + 3);
  for (char const* good : {"1F1B+1@3-4", "zb-h1+10@0-1", "1F1B+1@3-4+2@5-6"}) CHECK(catalogue::trains(good));
  for (char const* wrong : {"1F1B+", "1F1B+1", "1F1B+1@", "1F1B+1@3", "1F1B+1@3-5", "1F1B+0@3-4", "1F1B+-1@3-4", "1F1B+1@3-4x",
                            "1F1B+1@3-4+", "GPipe+1@3-4", "1F1B+99999999999@3-4", "+1@3-4"}) {
    CAPTURE(wrong);
    CHECK_FALSE(catalogue::trains(wrong));
    CHECK_FALSE(catalogue::contains(wrong));
    CHECK(make_plan(wrong, {8, 16}).problem);
  }
  CHECK(describe(make_plan("1F1B+1@3-4", {4, 16}).problem).str() ==
        "slack is for a link between two ranks, and there is none after rank 3");
  // A name has a limited length: slack that does not fit is written as `with slack`.
  slack const many[] = {{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 1}, {5, 1}, {6, 1}, {7, 1}, {8, 1}, {9, 1}, {10, 1}};
  CHECK(std::string(catalogue::name_with_slack("1F1B", many, many + 11)) == "1F1B with slack");
  CHECK(std::string(catalogue::name_with_slack("1F1B", many, many + 9)) ==
        "1F1B+1@0-1+1@1-2+1@2-3+1@3-4+1@4-5+1@5-6+1@6-7+1@7-8+1@8-9");
}
