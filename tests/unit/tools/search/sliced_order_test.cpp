// Orders of microbatches that are cut into slices: slices stay together, and ascending order is a lawful one.
#include <algorithm>
#include <string>
#include <vector>

#include <chevron/plan/gradient_order.hpp>
#include <chevron/plan/lengths.hpp>
#include <chevron/plan/slices.hpp>
#include <chevron/schedule.hpp>
#include <chevron/tools/search/find.hpp>
#include <chevron/tools/search/lengths/input_order.hpp>

#include <doctest/doctest.h>

using namespace chevron;

namespace {

/// Microbatches in descending order in each stage, as another order of inputs has them.
plan descending(plan const& from) {
  plan to = copy_of(from);
  int const slices = from.size.slices, last = from.size.micro_batches - 1;
  for (int i = 0; i < to.view().total(); ++i) {
    action& one = to.actions.data[i];
    int const unit = static_cast<int>(one.micro_batch);
    int const turned = (last - unit / slices) * slices + unit % slices;
    one.micro_batch = make_action(one.kind, static_cast<int>(one.stage), turned).micro_batch;
  }
  return to;
}

}  // namespace

TEST_CASE("ascending order of microbatches in slices is lawful: backwards go from the last slice to the first") {
  for (char const* name : {"Seq1F1B", "SeqZB-H1", "SeqInterleaved1F1B", "GPipe"}) {
    for (int slices = 1; slices <= 4; ++slices) {
      plan const made = catalogue::make_plan(name, {.ranks = 3, .micro_batches = 3, .slices = slices});
      INFO(std::string(name) << " slices " << slices);
      REQUIRE_FALSE(check(made));
      REQUIRE_FALSE(check(descending(made)));
      for (plan const& given : {copy_of(made), descending(made)}) {
        plan const ascending = in_ascending_order(given);
        CHECK_FALSE(check(ascending));
        CHECK(same_gradient_order(ascending, in_ascending_order(made)));
      }
    }
  }
}

TEST_CASE("an order in which microbatches go in keeps the slices of each together") {
  constexpr int micro_batches = 6, slices = 3;
  shape const size{.ranks = 3, .micro_batches = micro_batches, .slices = slices};
  std::vector<double> const lengths{0.5, 2.5, 1, 0.25, 2, 0.75};
  length_factors const factors = factors_of_slices(slice_ends(slices, 0.5), 0.5, lengths);
  costs const each{10, 13, 7, 1};
  cost_view costs = each;
  costs.lengths = factors.view();
  search::problem const asked{.where = placed_on(placement::linear, size), .costs = costs};
  plan const runs = catalogue::make_plan("Seq1F1B", size);
  for (search::order_found const& got : {search::reorder(runs, asked), search::find_order(asked, {.trials = 500})}) {
    REQUIRE_FALSE(check(got.best));
    std::vector<int> sorted = got.order;
    std::sort(sorted.begin(), sorted.end());
    REQUIRE(sorted == std::vector<int>{0, 1, 2, 3, 4, 5});
    std::vector<double> in_order;
    for (int const m : got.order) in_order.push_back(lengths[static_cast<std::size_t>(m)]);
    length_factors const expected = factors_of_slices(slice_ends(slices, 0.5), 0.5, in_order);
    CHECK(std::ranges::equal(got.lengths.computation, expected.computation));
    CHECK(std::ranges::equal(got.lengths.transfer, expected.transfer));
    cost_view seen = each;
    seen.lengths = expected.view();
    CHECK(got.length == makespan(got.best, seen));
    CHECK(got.length < got.as_given);
  }
}
