#include "support/small_model.hpp"

#include <map>
#include <set>
#include <tuple>

#include <chevron/describe/expand.hpp>
#include <chevron/describe/own_action.hpp>

#include <doctest/doctest.h>

using namespace small_model;
using namespace chevron::letters;

namespace {

inline constexpr auto X = chevron::own_action<'X'>({.after = {W}, .every = true});
inline constexpr auto Y = chevron::own_action<'Y'>({});
inline constexpr auto with_own =
    chevron::schedule(chevron::placement::linear,
                      chevron::warmup(F*(ranks - 1 - rank), Y) | chevron::steady(F, I, W, X, Y) | chevron::cooldown(I, W, X, Y));

chevron::plan own_plan(int count) { return expand(with_own, {.ranks = 2, .micro_batches = count}); }

/// A trainer's setup with a handler.
chevron::trainer trainer_with(transport& comm, chevron::plan const& plan, chevron::own_handler handler,
                              bool post_validation = false) {
  return chevron::trainer(small_model::setup(plan, comm, [](int s) { return build_stage(s); },
                                             {.post_validation = post_validation, .own_actions = std::move(handler)}));
}

}  // namespace

TEST_CASE("own actions run once each, on the rank of their stage and in its place, and change no bit of what others compute") {
  auto const data = make_batch(8, 5);
  for (bool const post_validation : {false, true}) {
    std::mutex mutex;
    std::set<std::tuple<char, int, int, long>> seen;
    std::vector<double> losses[2];
    bool in_place = true;
    for (bool const own : {false, true}) {
      chevron::plan const plan = own ? own_plan(4) : plan_of("ZB-H1", 2, 4);
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        auto const handler = [&](chevron::own_work const& work) {
          std::lock_guard const hold(mutex);
          in_place = in_place && work.stage_number == comm.topology().pipeline_rank() &&
                     seen.emplace(work.letter, work.stage_number, work.micro_batch, work.step).second;
          // X comes after the W of its microbatch: there are gradients.
          if (work.letter == 'X') in_place = in_place && work.of.parameters().front().value.grad().defined();
          in_place = in_place && !at::GradMode::is_enabled();
        };
        chevron::trainer train = trainer_with(comm, plan, handler, post_validation);
        for (int step = 0; step < 3; ++step) {
          double const loss = train.step({data.input}, {data.target}).loss;
          if (comm.topology().global_rank == 0) losses[own].push_back(loss);
        }
        train.synchronize();
      });
    }
    CHECK(in_place);
    CHECK(seen.size() == 3 * 2 * 2 * 4);
    CHECK(losses[0] == losses[1]);
  }
}

TEST_CASE("an own action that throws is the step's error, with rank and action; one without a handler is refused") {
  auto const data = make_batch(4, 5);
  auto const run = [&](chevron::own_handler const& handler) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train = trainer_with(comm, own_plan(2), handler);
      train.step({data.input}, {data.target});
    });
  };
  auto const fails = [](chevron::own_work const& work) {
    if (work.letter == 'X' && work.stage_number == 1) throw std::runtime_error("no average");
  };
  CHECK_THROWS_WITH_AS(run(fails), doctest::Contains("rank 1, step 0, 1X0: own_actions threw: no average"), chevron::stage_error);
  CHECK_THROWS_WITH_AS(run({}), doctest::Contains("but nothing is said to run for it. Remedy: give trainer_options::own_actions"),
                       chevron::usage_error);
}
