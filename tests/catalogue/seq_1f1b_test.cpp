#include <cmath>
#include <vector>

#include <chevron/plan/slices.hpp>

#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::seq_1f1b;
using catalogue::seq_interleaved_1f1b;
using catalogue::seq_zb_h1;

namespace {

/// Slices of equal time: every action takes the share of one slice.
constexpr costs of_slice(costs const& whole, int slices, int chunks) {
  double const by = static_cast<double>(slices * chunks);
  return {whole.forward / by, whole.backward_input / by, whole.backward_weight / by, 0};
}

constexpr bool near(double a, double b) { return a - b < 1e-9 * (a + b) && b - a < 1e-9 * (a + b); }

/// A claim for every P, M, V and k up to these.
template <class Description, class Claim>
constexpr grid_result over_slices(Description const& schedule, Claim claim, int most_ranks, int most_batches, int most_slices,
                                  int most_chunks) {
  grid_result result;
  for (int chunks = 1; chunks <= most_chunks; ++chunks) {
    for (int ranks = 1; ranks <= most_ranks; ++ranks) {
      for (int m = 1; m <= most_batches; ++m) {
        for (int slices = 1; slices <= most_slices; ++slices) {
          ++result.points;
          shape const size{ranks, m, chunks, slices};
          plan const made = expand(schedule, size);
          if (!claim(made.view())) return {result.points, size};
        }
      }
    }
  }
  return result;
}

template <class Expected>
constexpr bool makespans_of_slices(plan_view const& plan, Expected expected) {
  for (costs const& c : {equal_costs, light_weights, uneven}) {
    costs const each = of_slice(c, plan.size.slices, plan.size.chunks);
    double const work = plan.size.micro_batches * (c.forward + c.backward_input + c.backward_weight);
    if (!near(makespan(plan, each), work + expected(c))) return false;
  }
  return true;
}

constexpr double of(costs const& c) { return c.forward + c.backward_input + c.backward_weight; }

constexpr auto seq_1f1b_holds = [](plan_view const& plan) {
  int const last = plan.size.ranks - 1, slices = plan.size.slices;
  return lawful(plan) && makespans_of_slices(plan, [&](costs const& c) { return last * of(c) / slices; }) &&
         peaks_are(plan, [&](int rank) { return smaller_of(plan.size.units(), last - rank + slices); });
};

constexpr auto seq_zb_h1_holds = [](plan_view const& plan) {
  int const last = plan.size.ranks - 1, slices = plan.size.slices;
  if (!lawful(plan) || !peaks_are(plan, [&](int) { return smaller_of(plan.size.units(), last + slices); })) return false;
  if (plan.size.units() < last + slices) return true;
  return makespans_of_slices(plan,
                             [&](costs const& c) { return last * (c.forward + c.backward_input - c.backward_weight) / slices; });
};

constexpr auto seq_interleaved_holds = [](plan_view const& plan) {
  int const last = plan.size.ranks - 1, slices = plan.size.slices, chunks = plan.size.chunks, units = plan.size.units();
  int const least = (last + slices) / slices;
  int const rounds = plan.size.micro_batches / least > 1 ? plan.size.micro_batches / least : 1;
  int const round = (plan.size.micro_batches + rounds - 1) / rounds;
  if (!lawful(plan) || !peaks_are(plan, [&](int rank) {
        return smaller_of(units * chunks, (chunks - 1) * round * slices + slices + 2 * (last - rank));
      }))
    return false;
  if (units < plan.size.ranks) return true;
  return makespans_of_slices(plan, [&](costs const& c) { return last * of(c) / (slices * chunks); });
};

static_assert(over_slices(seq_1f1b, seq_1f1b_holds, 4, 3, 3, 1).holds());
static_assert(over_slices(seq_zb_h1, seq_zb_h1_holds, 4, 3, 3, 1).holds());
static_assert(over_slices(seq_interleaved_1f1b, seq_interleaved_holds, 3, 3, 3, 2).holds());

constexpr auto small = checked<seq_1f1b, shape{.ranks = 2, .micro_batches = 2, .slices = 2}>;
// Units: 0 and 1 are the slices of microbatch 0, 2 and 3 those of microbatch 1.
static_assert(reads(small, 0, "0F0 0F1 0F2 0B1 0F3 0B0 0B3 0B2"));
static_assert(reads(small, 1, "1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2"));
static_assert(to_text(small.view().at(1, 3), 2).view() == "1F1.0");

/// The peak of Seq1F1B in microbatches: of the n slices in flight the first a belong to the oldest microbatch and the first b to
/// the newest, whole microbatches lie between.
double planned_peak(plan_view const& plan, std::vector<double> const& ends, int rank) {
  int const slices = plan.size.slices, last = plan.size.ranks - 1;
  int const count = smaller_of(plan.size.units(), last - rank + slices);
  double most = 0;
  for (int a = 0; a <= slices; ++a) {
    for (int b = 0; b <= slices; ++b) {
      int const between = count - a - b;
      if (between < 0 || between % slices != 0 || between / slices + (a > 0) + (b > 0) > plan.size.micro_batches) continue;
      double const share = between / slices + (a > 0 ? ends[static_cast<std::size_t>(a - 1)] : 0) +
                           (b > 0 ? ends[static_cast<std::size_t>(b - 1)] : 0);
      most = larger_of(most, share);
    }
  }
  return most;
}

}  // namespace

TEST_CASE("Seq1F1B over P, M and k: lawful, bubble (P-1)(T_F+T_B)/k, peak P-1-r+k slices") {
  CHECK(over_slices(seq_1f1b, seq_1f1b_holds, 10, 14, 8, 1).holds());
}
TEST_CASE("SeqZB-H1 over P, M and k: lawful, bubble (P-1)(T_F+T_I-T_W)/k, peak P-1+k slices") {
  CHECK(over_slices(seq_zb_h1, seq_zb_h1_holds, 10, 14, 8, 1).holds());
}
TEST_CASE("SeqInterleaved1F1B over P, M, V and k: lawful, bubble (P-1)(T_F+T_B)/(kV)") {
  CHECK(over_slices(seq_interleaved_1f1b, seq_interleaved_holds, 8, 8, 5, 3).holds());
}

TEST_CASE("slices of equal time: the bubble to the digit at every share of attention, the peak in closed form") {
  for (double const attention : {0.0, 0.3, 0.5, 0.8, 1.0}) {
    for (int ranks = 2; ranks <= 8; ++ranks) {
      for (int m : {ranks, 2 * ranks, 3 * ranks}) {
        for (int slices = 1; slices <= 8; ++slices) {
          CAPTURE(attention);
          CAPTURE(ranks);
          CAPTURE(m);
          CAPTURE(slices);
          plan const made = expand(seq_1f1b, {.ranks = ranks, .micro_batches = m, .slices = slices});
          auto const ends = slice_ends(slices, attention);
          length_factors const factors = factors_of_slices(ends, attention);
          costs const whole{1, 1.2, 0.8, 0};
          cost_view priced = whole;
          priced.lengths = factors.view();
          CHECK(makespan(made.view(), priced) ==
                doctest::Approx(m * of(whole) + (ranks - 1) * of(whole) / slices).epsilon(1e-12));
          for (int r = 0; r < ranks; ++r)
            CHECK(peak_share(made.view(), factors.view(), r) ==
                  doctest::Approx(planned_peak(made.view(), ends, r)).epsilon(1e-9));
        }
      }
    }
  }
}

TEST_CASE("a slice's W takes its share of tokens, and its I the rest of what the whole backward takes") {
  for (double const attention : {0.0, 0.3, 0.5, 0.8, 1.0}) {
    for (int slices = 1; slices <= 8; ++slices) {
      for (costs const& c : {equal_costs, light_weights, uneven, costs{2, 1, 3, 0}}) {
        CAPTURE(attention);
        CAPTURE(slices);
        auto const ends = slice_ends(slices, attention);
        length_factors const factors = factors_of_slices(ends, attention);
        cost_view each = c;
        each.lengths = factors.view();
        double all_inputs = 0, all_weights = 0, before = 0;
        for (int unit = 0; unit < slices; ++unit) {
          auto const of_kind = [&](kind what) { return each.of_action(make_action(what, 1, unit)); };
          double const of_input = of_kind(kind::backward_input), of_weight = of_kind(kind::backward_weight);
          double const tokens = ends[static_cast<std::size_t>(unit)] - before;
          before += tokens;
          CHECK(of_input >= -1e-12);
          CHECK(of_input + of_weight == doctest::Approx(of_kind(kind::backward)));
          // Where the I alone can have all the attention.
          bool const all_in_input = attention * (c.backward_input + c.backward_weight) <= c.backward_input;
          if (all_in_input) CHECK(of_weight == doctest::Approx(tokens * c.backward_weight));
          all_inputs += of_input;
          all_weights += of_weight;
        }
        CHECK(all_inputs == doctest::Approx(c.backward_input));
        CHECK(all_weights == doctest::Approx(c.backward_weight));
      }
    }
  }
}

TEST_CASE("SeqZB-H1 with attention: no closed form, above that of equal slices and below Seq1F1B") {
  struct point {
    double attention, bubble;
  };
  for (auto const [attention, bubble] : {point{0, 1.75}, point{0.3, 2.9208}, point{0.5, 3.7654}}) {
    CAPTURE(attention);
    length_factors const factors = factors_of_slices(slice_ends(4, attention), attention);
    cost_view each = equal_costs;
    each.lengths = factors.view();
    plan const made = expand(seq_zb_h1, shape{.ranks = 8, .micro_batches = 16, .slices = 4});
    CHECK(makespan(made, each) - 48 == doctest::Approx(bubble).epsilon(1e-4));
    CHECK(bounds(made, each).makespan <= makespan(made, each) + 1e-9);
    CHECK(bounds(made, each).makespan == doctest::Approx(48 + 1.75));
    plan const whole = expand(seq_1f1b, shape{.ranks = 8, .micro_batches = 16, .slices = 4});
    CHECK(makespan(whole, each) - 48 == doctest::Approx(5.25));
  }
}

TEST_CASE("slices of equal length waste what attention makes unequal") {
  plan const made = expand(seq_1f1b, {.ranks = 8, .micro_batches = 16, .slices = 4});
  costs const whole{1, 2, 0, 0};
  cost_view priced = whole;
  length_factors const equal = factors_of_slices(slice_ends(4, 0), 0.5);
  priced.lengths = equal.view();
  CHECK(makespan(made.view(), priced) - 48 == doctest::Approx(24.09).epsilon(1e-3));
  length_factors const planned = factors_of_slices(slice_ends(4, 0.5), 0.5);
  priced.lengths = planned.view();
  CHECK(makespan(made.view(), priced) - 48 == doctest::Approx(5.25));
  CHECK(peak_share(made.view(), planned.view()) == doctest::Approx(2.984).epsilon(1e-3));
}

TEST_CASE("forwards ahead: over slow links the bubble of long slices, for as many slices more in memory") {
  using namespace chevron::letters;
  shape const size{.ranks = 8, .micro_batches = 16, .slices = 4};
  plan const near_by = expand(seq_1f1b, size), ahead = expand(catalogue::seq_1f1b_with(ranks - 1 - rank), size);
  CHECK(!check(ahead));
  CHECK(peaks_are(ahead.view(), [](int of) { return 2 * (7 - of) + 4; }));
  costs slow{1, 2, 0, 0};
  slow.latency = 0.05;
  cost_view priced = slow;
  length_factors const factors = factors_of_slices(slice_ends(4, 0.5), 0.5);
  priced.lengths = factors.view();
  CHECK(makespan(near_by.view(), priced) - 48 == doctest::Approx(11.15));
  CHECK(makespan(ahead.view(), priced) - 48 == doctest::Approx(5.95));
  CHECK(peak_share(ahead.view(), factors.view()) == doctest::Approx(4.732).epsilon(1e-3));
  CHECK(!check(expand(catalogue::seq_1f1b_with(3), size)));
}

TEST_CASE("schedules that other rules make: with slices lawful, or refused with the remedy") {
  shape const sliced{.ranks = 3, .micro_batches = 2, .slices = 3};
  CHECK(!check(expand(catalogue::gpipe, sliced)));
  CHECK(!check(expand(catalogue::forward_only, sliced)));
  CHECK(!check(expand(catalogue::looped_bfs, sliced)));
  CHECK(describe(check(expand(catalogue::one_f_one_b, sliced))).str().find("warmup(F * (ranks - 1 - rank + slices - 1))") !=
        std::string::npos);
  CHECK(describe(expand(catalogue::v_half, sliced).problem).str() ==
        "a building block repeats whole microbatches: slices must be 1, not 3");
  CHECK(describe(expand(seq_1f1b, {.ranks = 2, .micro_batches = 2, .slices = 0}).problem).str() ==
        "slices must be at least 1, not 0");
  CHECK(describe(expand(seq_1f1b, {.ranks = 2, .micro_batches = 300, .slices = 300}).problem).str() ==
        "micro_batches x slices must be at most 65535, not 90000");
  // One slice: the schedules without.
  auto const same = [](plan const& a, plan const& b) {
    bool equal = a.actions.count == b.actions.count;
    for (int i = 0; equal && i < a.actions.count; ++i) equal = a.actions[i] == b.actions[i];
    return equal;
  };
  shape const whole{.ranks = 4, .micro_batches = 7};
  CHECK(same(expand(seq_1f1b, whole), expand(catalogue::one_f_one_b, whole)));
  CHECK(same(expand(seq_zb_h1, whole), expand(catalogue::zb_h1, whole)));
  shape const looped{.ranks = 4, .micro_batches = 7, .chunks = 2};
  CHECK(same(expand(seq_interleaved_1f1b, looped), expand(catalogue::interleaved_1f1b, looped)));
}

TEST_CASE("tokens that name a chunk draw slices of backwards in reverse, too") {
  using namespace chevron::letters;
  auto const by_chunk = schedule(placement::loop, warmup(F(0) * (micro_batches * slices)) |
                                                      warmup(F(1) * (micro_batches * slices)) | steady(B(1)) | cooldown(B(0)));
  auto const split = schedule(placement::loop, warmup(F(0) * (micro_batches * slices)) | warmup(F(1) * (micro_batches * slices)) |
                                                   steady(I(1), W(1)) | cooldown(I(0), W(0)));
  shape const size{.ranks = 2, .micro_batches = 2, .chunks = 2, .slices = 3};
  CHECK(describe(check(expand(by_chunk, size))).str() == "all laws hold");
  CHECK(describe(check(expand(split, size))).str() == "all laws hold");
}
