#include <cstring>

#include <chevron/schedule.hpp>

#include <doctest/doctest.h>

using namespace chevron;
using namespace chevron::letters;

namespace {

constexpr auto on = [](auto expression, int rank) { return expression(rank_parameters{rank, 4, 8, 2}); };

}  // namespace

static_assert(on(rank < ranks / 2, 1) == 1 && on(rank < ranks / 2, 2) == 0);
static_assert(on(rank <= 2, 2) == 1 && on(rank <= 2, 3) == 0 && on(rank >= 2, 2) == 1 && on(rank >= 2, 1) == 0);
static_assert(on(rank > 2, 3) == 1 && on(2 > rank, 2) == 0 && on(rank == 3, 3) == 1 && on(rank == 3, 2) == 0);
static_assert(on(rank != ranks - 1, 0) == 1 && on(3 != rank, 3) == 0);

// The first half of the ranks runs one forward more ahead: as 1F1B elsewhere.
inline constexpr auto half = schedule(placement::linear, warmup(F * (ranks - 1 - rank + (rank < ranks / 2))) | steady(F, B) | cooldown(B));

TEST_CASE("a comparison in a count is 0 or 1") {
  plan const made = expand(half, {.ranks = 4, .micro_batches = 8});
  REQUIRE_FALSE(check(made));
  for (int r = 0; r < 4; ++r) CHECK(peak_in_flight(made, r) == 4 - r + (r < 2 ? 1 : 0));
}

TEST_CASE("a division by 0 is said to be one, wherever the expression stands, and on which rank") {
  auto const says = [](finding const& f, int on_rank) {
    return f.broken == law::description && std::strcmp(f.words, division_by_zero(0).words) == 0 && f.number == on_rank;
  };
  auto const plain = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B));
  shape const four{.ranks = 4, .micro_batches = 8};
  auto const counted = schedule(placement::linear, warmup(F * min_of(ranks - 1 - rank, 4 / (2 - rank))) | steady(F, B) | cooldown(B));
  CHECK(says(expand(counted, four).problem, 2));
  auto const rest = schedule(placement::linear, warmup(F * min_of(ranks - 1 - rank, 4 % (3 - rank))) | steady(F, B) | cooldown(B));
  CHECK(says(expand(rest, four).problem, 3));
  CHECK(says(expand(plain.at_most_in_flight(ranks / (ranks - 4)), four).problem, 0));
  CHECK_FALSE(expand(plain.at_most_in_flight(5 + ranks / (ranks - 4)), {.ranks = 5, .micro_batches = 8}).problem);
  auto const block = building_block(placement::linear, every(3), F.at(rank), I.at(2 * ranks - 1 - rank + 1 / (1 - rank)), W);
  CHECK(says(expand(block, four).problem, 1));
  auto const interval = building_block(placement::linear, every(3 / (ranks - 4)), F.at(rank), I.at(2 * ranks - 1 - rank), W);
  CHECK(says(expand(interval, four).problem, 0));
  CHECK(describe(expand(counted, four).problem).str().find("divides by 0") != std::string::npos);
}
