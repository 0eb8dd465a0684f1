#include "support/plan_claims.hpp"

using namespace chevron;
using namespace chevron::letters;
using namespace chevron::tests;

// A repeated sequence beside other items runs as a sequence, not letter by letter.
inline constexpr auto two_then_one = schedule(placement::linear, steady((F + I) * 2, W) | cooldown(W));
static_assert(reads(checked<two_then_one, shape{1, 5}>, 0, "0F0 0I0 0F1 0I1 0W0 0F2 0I2 0F3 0I3 0W1 0F4 0I4 0W2 0W3 0W4"));

// A repeated token draws that many times before the next item.
inline constexpr auto letters_then_one = schedule(placement::linear, steady(F * 2, I) | cooldown(I, W) | cooldown(W));
static_assert(reads(checked<letters_then_one, shape{1, 5}>, 0, "0F0 0F1 0I0 0F2 0F3 0I1 0F4 0I2 0I3 0W0 0I4 0W1 0W2 0W3 0W4"));

// Two sequences and a letter in one phase, each with its own count.
inline constexpr auto mixed = schedule(placement::linear, steady((F + I) * 2, (F + W) * 2, I * 2) | cooldown(I) | cooldown(W));
static_assert(reads(checked<mixed, shape{1, 6}>, 0, "0F0 0I0 0F1 0I1 0F2 0W0 0F3 0W1 0I2 0I3 0F4 0I4 0F5 0I5 0W2 0W3 0W4 0W5"));

// Counts are worked out for each rank; none means that the sequence is left out there.
inline constexpr auto by_rank = schedule(placement::linear, steady((F + I) * (2 * rank), F, I, W) | cooldown(I, W) | cooldown(W));
static_assert(reads(expand(by_rank, shape{2, 3}), 0, "0F0 0I0 0W0 0F1 0I1 0W1 0F2 0I2 0W2"));
static_assert(reads(expand(by_rank, shape{2, 3}), 1, "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"));
inline constexpr auto negative =
    schedule(placement::linear, steady((F + I) * (rank - 1), F, I, W) | cooldown(I, W) | cooldown(W));
static_assert(describe(check(expand(negative, shape{2, 3}))).view() ==
              "rank 0: a phase has a negative count, see max_of; it is -1");

// A pair repeats as a pair: forward, backward, forward, backward.
inline constexpr auto pairs =
    schedule(placement::vee,
             warmup(F(0) * 3) | warmup(F(1) * 2) | steady(overlap(F(0), B(1)) * 2, F(1) * 2, B(0) * 2) | cooldown(B(1), B(0)));
constexpr auto six_pairs = checked<pairs, shape{1, 6}>;
static_assert(reads(six_pairs, 0,
                    "0F0 0F1 0F2 1F0 1F1 0F3 1B0 0F4 1B1 1F2 1F3 0B0 0B1 0F5 1B2 1B3 1F4 1F5 0B2 0B3 1B4 0B4 1B5 0B5"));
static_assert(six_pairs.view().actions[5].fused == 1 && six_pairs.view().actions[7].fused == 1 && six_pairs.view().actions[13].fused == 1 &&
              six_pairs.view().actions[9].fused == 0);

// A count far above the work there is ends with the work.
inline constexpr auto far_too_often = schedule(placement::linear, steady((F + I) * 2000000000, W) | cooldown(W));
static_assert(reads(checked<far_too_often, shape{1, 2}>, 0, "0F0 0I0 0F1 0I1 0W0 0W1"));
