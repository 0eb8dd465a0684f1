#include <chevron/tools/search/recomputation.hpp>

#include <chevron/schedule.hpp>

#include <doctest/doctest.h>

using namespace chevron;

// While compiling, too: one R of 1F1B's first rank fits in front of its first backward, where memory holds two chunks.
constexpr bool shorter_by_one(std::int64_t most) {
  costs const each{};
  sizes const bytes{.activation = 100, .input = 5};
  plan const ahead = with_recomputation(expand(catalogue::one_f_one_b, {.ranks = 4, .micro_batches = 8}));
  plan const placed = search::place_recomputation(ahead, each, bytes, most);
  return !check(placed) && makespan(placed, each) == makespan(ahead, each) - 1 && peak_bytes(placed, bytes) <= most;
}
static_assert(shorter_by_one(210) && !shorter_by_one(115));

TEST_CASE("R's placed in waits: lawful, the same actions, no longer, within memory, for every schedule") {
  sizes const bytes{.activation = 100, .message = 1, .input = 7};
  int shorter = 0;
  catalogue::for_each([&](auto const& one) {
    for (int const ranks : {1, 2, 5}) {
      for (int const m : {1, 4, 8}) {
        plan const plain = expand(one, {.ranks = ranks, .micro_batches = m});
        if (check(plain)) continue;
        plan const ahead = with_recomputation(plain);
        for (costs const& each : {costs{}, costs{.forward = 2, .backward_input = 3, .communication = 0.5, .recompute = 1.5},
                                  costs{.communication = 1, .communication_occupies = occupies::sender}}) {
          double const before = makespan(ahead, each);
          for (std::int64_t const more : {0, 100, 300}) {
            std::int64_t const most = peak_bytes(ahead, bytes) + more;
            plan const placed = search::place_recomputation(ahead, each, bytes, most);
            CAPTURE(one.name);
            CHECK(!check(placed));
            CHECK(placed.actions.count == ahead.actions.count);
            CHECK(makespan(placed, each) <= before);
            CHECK(peak_bytes(placed, bytes) <= most);
            shorter += makespan(placed, each) < before ? 1 : 0;
          }
          // Recomputation ahead of the gradient is no longer than within the backward.
          costs inside = each;
          inside.backward_input += each.recompute > 0 ? each.recompute : each.forward;
          CHECK(before <= makespan(plain, inside));
        }
      }
    }
  });
  CHECK(shorter > 20);
}
