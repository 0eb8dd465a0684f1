// The zero-bubble paper's Table 5 (bubble rates) from its Table 6 (times): Qi et al., arXiv 2401.10241.
#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <string>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/tools/search/zero_bubble.hpp>

using namespace chevron;

namespace {

/// One line of both tables: times of a rank's share in microseconds, rates in ten-thousandths.
struct line {
  char const* model;
  shape size;
  costs times;
  int hidden, heads;
  int chunks;  ///< of 1F1B-I: one layer each
  int one_f_one_b, interleaved, zb_h1, zb_h2, zb_1p, zb_2p;
};

/// A transformer layer in fp16 (the paper's table 1): bytes per token of one layer. F takes 34h + 5as, of which I gives back all
/// but the 32h that W needs. The limit is `pending` times the memory that F takes: P for ZB-1p, 2P for ZB-2p.
constexpr search::memory_model transformer_layer(int hidden, int heads, int sequence, int pending) {
  double const forward = 34.0 * hidden + 5.0 * heads * sequence;
  double const weight = -32.0 * hidden;
  return {forward, -forward - weight, weight, pending * forward};
}

constexpr line table[] = {
    {"1.5B", {8, 24}, {18522, 18086, 9337, 601}, 2304, 24, 3, 2431, 1055, 1585, 1083, 1585, 433},
    {"1.5B", {8, 64}, {18546, 18097, 9321, 762}, 2304, 24, 3, 1240, 443, 674, 444, 674, 26},
    {"6.2B", {8, 24}, {29718, 29444, 19927, 527}, 4096, 32, 4, 2347, 808, 1323, 698, 1323, 29},
    {"6.2B", {8, 32}, {29802, 29428, 19530, 577}, 4096, 32, 4, 1898, 628, 1045, 559, 1045, 22},
    {"14.6B", {16, 48}, {11347, 11248, 8132, 377}, 5120, 40, 3, 2552, 1104, 1397, 672, 1397, 66},
    {"14.6B", {16, 128}, {11325, 11308, 8109, 378}, 5120, 40, 3, 1251, 445, 576, 266, 576, 28},
    {"28.3B", {32, 96}, {10419, 10207, 7715, 408}, 6144, 48, 2, 2646, 1493, 1421, 641, 1421, 38},
    {"28.3B", {32, 128}, {10408, 10204, 7703, 408}, 6144, 48, 2, 2168, 1164, 1106, 490, 1106, 29},
};
constexpr int tokens = 1024;

/// The paper's bubble rate of a length: its cost is the longest span, since its steps overlap.
double rate(line const& of, double length) {
  double const work = of.size.micro_batches * (of.times.forward + of.times.backward_input + of.times.backward_weight);
  return (length - work) / length;
}
int in_ten_thousandths(double share) { return static_cast<int>(std::lround(share * 1e4)); }

}  // namespace

TEST_CASE("1F1B, ZB-H1 and ZB-H2 have the published bubble rates") {
  for (line const& of : table) {
    CAPTURE(of.model);
    CAPTURE(of.size.micro_batches);
    auto const of_name = [&](char const* name) { return rate(of, span(catalogue::make_plan(name, of.size), of.times)); };
    CHECK(in_ten_thousandths(of_name("1F1B")) == of.one_f_one_b);
    CHECK(in_ten_thousandths(of_name("ZB-H1")) == of.zb_h1);
    CHECK(in_ten_thousandths(of_name("ZB-H2")) == of.zb_h2);
  }
}

TEST_CASE("ZB-1p and ZB-2p have the published bubble rates, within their memory") {
  for (line const& of : table) {
    CAPTURE(of.model);
    CAPTURE(of.size.micro_batches);
    int const ranks = of.size.ranks;
    for (int pending : {1, 2}) {
      plan const made = search::zero_bubble(of.times, transformer_layer(of.hidden, of.heads, tokens, pending * ranks), of.size);
      REQUIRE_FALSE(check(made));
      CHECK(std::string(made.name) == (pending == 1 ? "ZB-1p" : "ZB-2p"));
      CHECK(in_ten_thousandths(rate(of, span(made, of.times))) == (pending == 1 ? of.zb_1p : of.zb_2p));
    }
  }
}

// The column that does not reproduce. The paper cuts each rank's share into the most chunks that the layers allow; its rates are
// 2 to 4 % (of themselves) below those of the interleaved order if every chunk costs its part of the rank's time and every
// message T_comm, so this test has Chevron's rates.
TEST_CASE("1F1B-I comes out a little above the published bubble rates") {
  constexpr int ours[] = {1090, 461, 827, 644, 1136, 459, 1528, 1192};
  int const* expected = ours;
  for (line const& of : table) {
    CAPTURE(of.model);
    CAPTURE(of.size.micro_batches);
    costs const chunk{of.times.forward / of.chunks, of.times.backward_input / of.chunks, of.times.backward_weight / of.chunks,
                      of.times.communication};
    plan const made = catalogue::make_plan("Interleaved1F1B", {of.size.ranks, of.size.micro_batches, of.chunks});
    double const got = rate(of, span(made, chunk));
    CHECK(in_ten_thousandths(got) == *expected++);
    CHECK(got / (of.interleaved * 1e-4) > 1.02);
    CHECK(got / (of.interleaved * 1e-4) < 1.05);
  }
}

// ZB-2p is short because of post-validation: with an optimizer that waits for all ranks, most of its advantage over ZB-1p is
// gone.
TEST_CASE("ZB-2p's rates by makespan") {
  constexpr int by_makespan[] = {1083, 439, 1003, -1, 1065, -1, 1098, -1};
  int const* expected = by_makespan;
  for (line const& of : table) {
    CAPTURE(of.model);
    CAPTURE(of.size.micro_batches);
    int const wanted = *expected++;
    if (wanted < 0) continue;
    plan const made = search::zero_bubble(of.times, transformer_layer(of.hidden, of.heads, tokens, 2 * of.size.ranks), of.size);
    CHECK(in_ten_thousandths(rate(of, makespan(made, of.times))) == wanted);
  }
}

TEST_CASE("what each stage costs may differ") {
  // The last stage has the head: twice the forward.
  stage_costs<4> uneven{{10, 10, 10, 20}, {10, 10, 10, 20}, {6, 6, 6, 12}, {1, 3, 1}};
  search::memory_model const memory{1, -.5, -.5, 4};
  for (int m : {1, 2, 3, 8, 40}) {
    CAPTURE(m);
    plan const made = search::zero_bubble(uneven, memory, {4, m});
    REQUIRE_FALSE(check(made));
    double held[4] = {};
    for (int r = 0; r < 4; ++r) {
      for (int i = 0; i < made.view().length(r); ++i) {
        kind const what = made.view().at(r, i).kind;
        held[r] += what == kind::forward          ? memory.forward
                   : what == kind::backward_input ? memory.backward_input
                                                  : memory.backward_weight;
        CHECK(held[r] <= memory.limit);
      }
      CHECK(held[r] == doctest::Approx(0));
    }
    CHECK(peak_in_flight(made) == made.in_flight_limit);
    // Nothing is given away by saying more about the goal.
    plan const sooner = search::zero_bubble(uneven, memory, {4, m}, search::objective::makespan);
    CHECK(makespan(sooner, uneven) <= makespan(made, uneven));
    CHECK(span(made, uneven) <= span(sooner, uneven));
  }
}

// A rank's warm-up once ran all its forwards before a rank ahead of it had made their inputs.
TEST_CASE("each of the eight orders is lawful, whatever stages cost") {
  constexpr int most_ranks = 5;
  std::mt19937 random(3);
  auto const below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  int orders = 0;
  for (int round = 0; round < 4000; ++round) {
    shape const size{.ranks = 1 + below(most_ranks), .micro_batches = 1 + below(6)};
    stage_costs<most_ranks> times;
    search::memory_model const memory{1, 0, -1, below(4) == 0 ? 0. : 1. + below(size.ranks + 3)};
    for (int s = 0; s < size.ranks; ++s) {
      times.forward[s] = .1 + below(100) / 50.;
      times.backward_input[s] = .1 + below(100) / 50.;
      times.backward_weight[s] = below(100) / 50.;
    }
    plan made = catalogue::make_plan("ZB-H1", size);
    made.in_flight_limit = size.micro_batches;
    search::detail::zero_bubble_weaver weaver(made, times, memory);
    for (int answers = 0; answers < 8; ++answers) {
      if (!weaver.weave({(answers & 4) == 0, (answers & 2) == 0, (answers & 1) == 0})) continue;
      made.actions = weaver.order;
      ++orders;
      CAPTURE(round);
      CAPTURE(answers);
      REQUIRE_FALSE(check(made));
    }
  }
  CHECK(orders > 4000);
}

TEST_CASE("memory models that are none, and limits that nothing fits into") {
  auto const says = [](plan const& made) { return describe(check(made)).str(); };
  costs const unit{};
  CHECK(says(search::zero_bubble(unit, search::memory_model{1, 0, -1, .5}, {4, 8})) ==
        "the memory limit is below the memory of one microbatch; raise the limit of rank 0");
  CHECK(says(search::zero_bubble(unit, search::memory_model{1, 0, -.5}, {4, 8})) ==
        "the memory of F, I and W must add up to 0, since I and W free all memory that F takes; stage 0");
  CHECK(says(search::zero_bubble(unit, {.limit = 4}, {0, 8})) == "ranks must be at least 1, not 0");
  CHECK(says(search::zero_bubble(unit, {.limit = 4}, {4, 8, 2})) == "with this placement chunks can be 1, not 2");
  // An I that takes more memory than its F: no W can free memory for the first I.
  CHECK(says(search::zero_bubble(unit, search::memory_model{1, 1, -2, 1}, {2, 3})).find("memory limit") != std::string::npos);
}
