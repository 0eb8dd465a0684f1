#include "support/plan_claims.hpp"

using namespace chevron;
using namespace chevron::letters;
using namespace chevron::tests;

// Ranks with different numbers of stages: written down, from an array, or from a map of one's own.
inline constexpr auto three_and_two = placement::of({0, 0, 0, 1, 1});
inline constexpr auto back_and_forth = placement::of(std::array<int, 5>{0, 1, 0, 1, 0});
// The first rank has a stage more than the others, on a loop.
inline constexpr auto one_more =
    placement::mapped([](shape size) { return 2 * size.ranks + 1; }, [](int stage, shape size) { return stage % size.ranks; });
// Twice as many stages on the last rank as on each other, one after another: a head that is cut in two.
inline constexpr auto heavy_end = placement::mapped(
    [](shape size) { return size.ranks + 1; }, [](int stage, shape size) { return stage < size.ranks ? stage : size.ranks - 1; });
static_assert(placement_policy<decltype(three_and_two)> && counted_placement<decltype(one_more)> &&
              !counted_placement<placement::vee_t>);

inline constexpr auto breadth = schedule(three_and_two, breadth_first, steady(F) | cooldown(B));
inline constexpr auto looped = schedule(one_more, breadth_first, steady(F) | cooldown(I, W));
inline constexpr auto listed = schedule_of(work_graph::split_backward).place(back_and_forth).prefer(I, F, W).at_most_in_flight(9);
inline constexpr auto eager_end =
    schedule_of(work_graph::full_backward).place(heavy_end).prefer(B, F).at_most_in_flight(2 * ranks);

constexpr auto first = checked<breadth, shape{.ranks = 2, .micro_batches = 4}>;
static_assert(first.view().stages == 5 && first.view().size.chunks == 3 && first.view().rank_of[2] == 0 && first.view().rank_of[3] == 1);
static_assert(messages(first) == 2 * 4);  // one crossing
static_assert(reads(first, 1, "3F0 3F1 3F2 3F3 4F0 4F1 4F2 4F3 4B3 4B2 4B1 4B0 3B3 3B2 3B1 3B0"));
static_assert(peak_in_flight(first, 0) == 12 && peak_in_flight(first, 1) == 8);

// Through laws and lowering, over shapes; always with fewer stages than the largest number on a rank times ranks.
template <class Description>
constexpr bool lawful_and_lowered(Description const& one, int first_ranks, int last_ranks) {
  for (int p = first_ranks; p <= last_ranks; ++p) {
    for (int m = 1; m <= 6; ++m) {
      plan const made = expand(one, shape{p, m});
      if (!lawful(made.view()) || made.stages >= p * made.size.chunks) return false;
      owned_program const lowered = lower(prove(made)).copy();
      if (check(lowered).broken != law::none) return false;
    }
  }
  return true;
}
static_assert(lawful_and_lowered(breadth, 2, 2) && lawful_and_lowered(listed, 2, 2));
static_assert(lawful_and_lowered(looped, 2, 5) && lawful_and_lowered(eager_end, 2, 5));
static_assert(check(lowered<listed, shape{2, 3}>.view()).broken == law::none);

// Rank expressions see the number of stages on each rank.
inline constexpr auto all_forward_first = schedule(three_and_two, warmup(F*(chunks* micro_batches)) | cooldown(B));
static_assert(lawful_and_lowered(all_forward_first, 2, 2));

// A shape may say the largest number of chunks, or leave it out.
static_assert(describe(check(expand(breadth, shape{2, 4, 3}))).view() == "all laws hold");
static_assert(describe(check(expand(breadth, shape{2, 4, 2}))).view() ==
              "with this placement chunks can be 3, not 2: rank 0 has 3 stages, rank 1 has 2");
static_assert(describe(check(expand(breadth, shape{3, 4}))).view() == "a rank has no stage, rank 2");
static_assert(describe(check(expand(breadth, shape{1, 4}))).view() ==
              "the placement puts a stage on a rank that does not exist, stage 3 (there are 1 ranks)");
inline constexpr auto nothing = placement::mapped([](shape) { return 0; }, [](int, shape) { return 0; });
static_assert(describe(check(expand(schedule(nothing, steady(F) | cooldown(B)), shape{1, 4}))).view() ==
              "the placement must have at least 1 stage, not 0");
inline constexpr auto too_many = placement::mapped([](shape size) { return 3000 * size.ranks; }, [](int, shape) { return 0; });
static_assert(describe(check(expand(schedule(too_many, steady(F) | cooldown(B)), shape{1, 4}))).view() ==
              "the placement must have at most 1024 stages, not 3000");
// A map with chunks per rank may be uneven too; the plan says the largest number.
inline constexpr auto lopsided = placement::mapped(2, [](int stage, shape) { return stage < 3 ? 0 : 1; });
inline constexpr auto on_lopsided = schedule_of(work_graph::full_backward).place(lopsided);
static_assert(checked<on_lopsided, shape{2, 2}>.view().size.chunks == 3 && checked<on_lopsided, shape{2, 2}>.view().stages == 4);
