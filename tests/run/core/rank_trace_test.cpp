// The record of a rank's step: the time in which computations ran, where two of them may run at once.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include <chevron/run/core/rank_trace.hpp>

#include <doctest/doctest.h>

namespace {

using chevron::kind;
using interval = std::pair<std::int64_t, std::int64_t>;

double busy_of(std::vector<std::pair<kind, interval>> const& computations) {
  chevron::rank_trace trace;
  trace.begin_step(0);
  for (auto const& [what, time] : computations) trace.computed(trace.add({what, 0, 0, 0}), time.first, time.second);
  return trace.busy_seconds() * 1e9;
}

}  // namespace

TEST_CASE("computations one after the other are busy as long as all of them, messages between them not") {
  CHECK(busy_of({}) == 0);
  CHECK(busy_of({{kind::forward, {10, 14}}, {kind::send_forward, {14, 19}}, {kind::backward, {19, 25}}}) == doctest::Approx(10));
}

TEST_CASE("the halves of a fused pair that run at once count their time once, in whichever order they are recorded") {
  CHECK(busy_of({{kind::forward, {10, 20}}, {kind::backward, {12, 25}}}) == doctest::Approx(15));
  CHECK(busy_of({{kind::forward, {12, 25}}, {kind::backward, {10, 20}}}) == doctest::Approx(15));
  CHECK(busy_of({{kind::forward, {10, 30}}, {kind::backward, {12, 25}}}) == doctest::Approx(20));
  CHECK(busy_of({{kind::forward, {20, 30}}, {kind::backward, {12, 15}}}) == doctest::Approx(13));
}

TEST_CASE("busy time is the number of nanoseconds in which a computation runs, for random pairs of halves") {
  std::mt19937 draw(1);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::pair<kind, interval>> all;
    std::int64_t from = 1000;
    std::vector<bool> runs(3000, false);
    for (int pair = 0; pair < 10; ++pair) {
      std::int64_t last = from;
      for (kind const half : {kind::forward, kind::backward}) {
        auto const start = from + static_cast<std::int64_t>(draw() % 40), end = start + 1 + static_cast<std::int64_t>(draw() % 40);
        all.push_back({half, {start, end}});
        std::fill(runs.begin() + start, runs.begin() + end, true);
        last = std::max(last, end);
      }
      from = last + static_cast<std::int64_t>(draw() % 5);
    }
    CHECK(busy_of(all) == doctest::Approx(static_cast<double>(std::count(runs.begin(), runs.end(), true))));
  }
}
