#include "support/small_model.hpp"

#include <chevron/describe/list.hpp>
#include <chevron/describe/table.hpp>

#include <doctest/doctest.h>

using namespace small_model;
using namespace chevron::letters;

namespace {

/// Three stages on one rank and two on the other, next to each other or in turns; whole and split backwards; phases, list
/// scheduling and a table.
inline constexpr auto next_to_each_other = chevron::placement::of({0, 0, 0, 1, 1});
inline constexpr auto in_turns = chevron::placement::of({0, 1, 0, 1, 0});

void check_uneven(chevron::plan const& plan, chevron::thread_options options) {
  auto const found = chevron::check(plan);
  REQUIRE_MESSAGE(!found, chevron::describe(found).str());
  REQUIRE(plan.stages == 5);
  auto const data = make_batch(2 * plan.size.micro_batches + 1, 9);
  reference whole(plan.stages);
  whole.run(plan, {data});
  options.pipeline_ranks = 2;
  complaints wrong;
  chevron::run_threads(options, [&](transport& comm) { compare_one_step(comm, plan, data, whole, wrong); });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
  CHECK(whole.grad_norm > 0);
}

}  // namespace

TEST_CASE("three stages on one rank and two on the other: gradients equal those of the un-pipelined model, bit for bit") {
  at::set_num_threads(1);
  chevron::thread_options shaken;
  shaken.rendezvous = true;
  shaken.longest_delay = std::chrono::microseconds(300);
  shaken.deadline = std::chrono::seconds(100);
  auto const breadth = chevron::schedule(next_to_each_other, chevron::breadth_first, chevron::steady(F) | chevron::cooldown(B));
  auto const split =
      chevron::schedule(in_turns, chevron::breadth_first, chevron::steady(F) | chevron::cooldown(I) | chevron::cooldown(W));
  auto const listed =
      chevron::schedule_of(chevron::work_graph::split_backward).place(in_turns).prefer(I, F, W).at_most_in_flight(6);
  for (int const m : {1, 2, 5}) {
    CAPTURE(m);
    for (auto const& options : {chevron::thread_options{}, shaken}) {
      check_uneven(chevron::expand(breadth, {2, m}), options);
      check_uneven(chevron::expand(split, {2, m}), options);
      check_uneven(chevron::expand(listed, {2, m}), options);
    }
  }
}

TEST_CASE("a table with uneven rows trains like any schedule") {
  auto const table = chevron::table(chevron::row(F(0, 0), F(1, 0), F(2, 0), F(0, 1), F(1, 1), F(2, 1), I(2, 0), B(1, 0), B(0, 0),
                                                 W(2, 0), B(2, 1), B(1, 1), B(0, 1)),
                                    chevron::row(F(3, 0), F(4, 0), B(4, 0), B(3, 0), F(3, 1), F(4, 1), B(4, 1), B(3, 1)));
  check_uneven(table(table.size()), {});
}
