#include "support/plan_claims.hpp"

using namespace chevron;
using namespace chevron::letters;
using namespace chevron::tests;

// 1F1B on two ranks, written out.
inline constexpr auto by_hand = table(row(F(0, 0), F(0, 1), B(0, 0), B(0, 1)), row(F(1, 0), B(1, 0), F(1, 1), B(1, 1)));
static_assert(by_hand.size() == shape{2, 2, 1});
constexpr auto proved = checked<by_hand, by_hand.size()>;
constexpr auto described = checked<catalogue::one_f_one_b, shape{2, 2}>;
constexpr bool same(plan_view const& a, plan_view const& b) {
  if (a.total() != b.total() || a.stages != b.stages || !(a.size == b.size)) return false;
  for (int i = 0; i < a.total(); ++i) {
    if (!(a.actions[i] == b.actions[i]) || a.actions[i].fused != b.actions[i].fused) return false;
  }
  return true;
}
static_assert(same(proved, described));
static_assert(check(lowered<by_hand, shape{2, 2}>.view()).broken == law::none);

// Rows from arrays that a program makes: of one length, or each of its own.
constexpr auto gpipe_rows() {
  std::array<std::array<action, 6>, 3> rows{};
  for (int r = 0; r < 3; ++r) {
    for (int m = 0; m < 3; ++m) {
      rows[static_cast<std::size_t>(r)][static_cast<std::size_t>(m)] = make_action(kind::forward, r, m);
      rows[static_cast<std::size_t>(r)][static_cast<std::size_t>(m) + 3] = make_action(kind::backward, r, m);
    }
  }
  return rows;
}
inline constexpr auto made = table(gpipe_rows()).named("mine");
static_assert(same(checked<made, shape{3, 3}>, checked<catalogue::gpipe, shape{3, 3}>));
static_assert(std::string_view(checked<made, shape{3, 3}>.view().name) == "mine");
constexpr std::array<action, 4> first_two_stages{F(0, 0), F(1, 0), B(1, 0), B(0, 0)};
inline constexpr auto uneven_rows = table(first_two_stages, row(F(2, 0), I(2, 0), W(2, 0)));
constexpr auto three_stages = checked<uneven_rows, shape{2, 1}>;
static_assert(three_stages.view().size.chunks == 2 && three_stages.view().rank_of[1] == 0 && three_stages.view().rank_of[2] == 1);

// Fused pairs; forwards alone.
inline constexpr auto paired = table(row(F(0, 0), F(1, 0), overlap(F(0, 1), B(1, 0)), B(0, 0), F(1, 1), B(1, 1), B(0, 1)));
static_assert(checked<paired, paired.size()>.view().actions[2].fused == 1 && checked<paired, paired.size()>.view().actions[3].fused == 0);
inline constexpr auto evaluating = table(row(F(0, 0), F(0, 1)), row(F(1, 0), F(1, 1)));
static_assert(checked<evaluating, evaluating.size()>.view().forward_only);

// A fault is reported with rank and step, which are the table's row and column.
template <class Table>
constexpr bool says(Table const& wrong, std::string_view expected) {
  return describe(check(wrong(wrong.size()))).view() == expected;
}
static_assert(says(table(row(F(0, 0), B(0, 0)), row(F(1, 0), F(1, 0), B(1, 0))),
                   "rank 1, step 1: 1F0 was already done at step 0"));
static_assert(says(table(row(F(0, 0), B(0, 0)), row(F(1, 0))),
                   "rank 1: 1B0 is missing: every F is followed by its B, or by its I and its W"));
static_assert(says(table(row(F(0, 0), B(0, 0)), row(F(1, 0), B(1, 0), F(0, 0))),
                   "rank 1, step 2: 0F0 is on the wrong rank: its stage lives on rank 0"));
static_assert(says(table(row(F(0, 0), B(0, 0)), row(F(2, 0), B(2, 0))),
                   "rank 0: 1F0 is missing: every stage runs every microbatch forward"));
static_assert(says(table(row(F(0, 0), B(0, 0)), row()), "a rank has no stage, rank 1"));
static_assert(describe(by_hand({3, 2}).problem).view() == "a table has a row for each rank: with this one ranks can be 2, not 3");
static_assert(describe(by_hand({2, 4}).problem).view() == "with this table micro_batches can be 2, not 4");
static_assert(describe(by_hand({2, 2, 2}).problem).view() == "with this table chunks can be 1, not 2");
