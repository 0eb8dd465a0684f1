// A search in the compiler finds the actions that the running program finds for the same arguments. constant_search.sh compiles
// this file with each compiler and runs it. Also assertions that users make of the result.
#include <cstdio>

#include <chevron/schedule.hpp>
#include <chevron/search.hpp>

using namespace chevron;
using namespace chevron::terms;
using search::best;
using search::objective;

namespace {

int failed = 0;

void expect(bool right, char const* what, char const* which) {
  std::printf("%s: %s, %s\n", right ? "ok" : "FAILED", which, what);
  failed += right ? 0 : 1;
}

bool alike(plan_view const& a, plan_view const& b) {
  bool same = a.total() == b.total() && a.size == b.size && a.in_flight_limit == b.in_flight_limit;
  for (int i = 0; same && i < a.total(); ++i) same = a.actions[i] == b.actions[i];
  for (int r = 0; same && r <= a.size.ranks; ++r) same = a.begin[r] == b.begin[r];
  return same;
}

/// Checks that a constant and the same description, expanded when run, are the same plan. The size is also an argument, since
/// a compiler would compute `now`, too, if it knew the size.
template <auto const& Source, shape Size>
void same(char const* which, shape size) {
  static constexpr auto constant = checked<Source, Size>;
  plan const now = expand(Source, size);
  expect(!check(now), "lawful at run time", which);
  expect(alike(constant, now), "the constant is what the program finds", which);
}

// A V as docs/guides/search.md has it: no schedule of the catalogue is as short within this memory.
constexpr costs measured{10, 13, 7, 1};
constexpr shape usual{.ranks = 8, .micro_batches = 32};
constexpr auto in_a_v = best(placement::vee, measured).at_most_in_flight(2 * ranks);
constexpr auto found = checked<in_a_v, usual>;
static_assert(peak_in_flight(found) <= 16);
static_assert(makespan(found, measured) < makespan(checked<catalogue::zb_v, usual>, measured));
static_assert(makespan(found, measured) >= bounds(found, measured).makespan);

// A head on the last stage, so little memory that orders which repeat are tried, and a length by span.
constexpr stage_costs<8> uneven{{10, 10, 10, 10, 10, 10, 10, 16}, {11, 11, 11, 11, 11, 11, 11, 17}, {9, 9, 9, 9, 9, 9, 9, 13},
                                {.5, .5, .5, 0, .5, .5, .5}};
constexpr shape small{.ranks = 4, .micro_batches = 8};
constexpr auto in_little = best(placement::vee, uneven).at_most_in_flight(4).trying({.trials = 2000, .seed = 7});  // two periods
constexpr auto by_span = best(placement::loop, uneven).at_most_in_flight(8).by(objective::span).trying({.trials = 200});
constexpr auto in_line = best(placement::linear, measured).at_most_in_flight(ranks).trying({.trials = 200});
constexpr auto whole = best(placement::linear, measured, work_graph::full_backward).trying({.trials = 100}).named("mine");
static_assert(peak_in_flight(checked<in_little, small>) <= 4);
static_assert(span(checked<by_span, small>, uneven) <= span(checked<catalogue::interleaved_zero_bubble, small>, uneven) ||
              peak_in_flight(checked<catalogue::interleaved_zero_bubble, small>) > 8);
// With one stage a rank, at the memory of 1F1B, ZB-H1 is the best there is if W takes no longer than F and I.
static_assert(makespan(checked<in_line, small>, measured) == makespan(checked<catalogue::zb_h1, small>, measured));
static_assert(plan_view(checked<whole, small>).name[0] == 'm' && plan_view(checked<whole, small>).total() == 2 * 4 * 8);

}  // namespace

int main() {
  same<in_a_v, usual>("a V of 8 ranks", usual);
  same<in_little, small>("little memory", small);
  same<by_span, small>("by span", small);
  same<in_line, small>("in line", small);
  same<whole, small>("whole backwards", small);
  // The comparison itself: other random numbers find something else.
  auto const other = in_little.trying({.trials = 2000, .seed = 8});
  shape const size = small;
  expect(!alike(checked<in_little, small>, expand(other, size)), "another seed is noticed", "little memory");
  std::printf("a V of 8 ranks: %g, bound %g\n", makespan(found, measured), bounds(found, measured).makespan);
  return failed == 0 ? 0 : 1;
}
