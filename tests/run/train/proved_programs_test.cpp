// Only programs of proved plans can run.
#include "support/small_model.hpp"

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <chevron/lower/lowered.hpp>
#include <chevron/run/execute/executor.hpp>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

template <class Program>
concept trains = requires(Program given, transport& comm) {
  chevron::trainer_setup{
      .program = given, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = sgd, .options = {}};
};
template <class Program>
concept evaluates = std::is_constructible_v<chevron::evaluator, Program, chevron::trainer&>;
template <class Program>
concept executes = std::is_constructible_v < chevron::detail::executor,
        Program, transport&, std::vector<chevron::stage>
&, chevron::loss_function, chevron::detail::executor_settings > ;

static_assert(trains<chevron::proved_program> && evaluates<chevron::proved_program> && executes<chevron::proved_program>);
static_assert(!trains<chevron::owned_program> && !evaluates<chevron::owned_program> && !executes<chevron::owned_program>);
static_assert(!trains<chevron::program_view> && !evaluates<chevron::program_view> && !executes<chevron::program_view>);
static_assert(!trains<chevron::plan> && !evaluates<chevron::plan> && !executes<chevron::plan>);
static_assert(!trains<chevron::proved_plan> && !evaluates<chevron::proved_plan> && !executes<chevron::proved_plan>);
static_assert(!std::is_default_constructible_v<chevron::proved_plan> &&
              !std::is_default_constructible_v<chevron::proved_program>);

}  // namespace

TEST_CASE("a plan that breaks a law is refused in its words, and never trains") {
  auto broken = chevron::catalogue::make_plan("1F1B", {.ranks = 2, .micro_batches = 4});
  std::swap(broken.actions.data[0], broken.actions.data[2]);  // rank 0: F0 F1 B0 becomes B0 F1 F0
  auto const found = chevron::check(broken);
  REQUIRE(found.broken != chevron::law::none);
  try {
    static_cast<void>(chevron::prove(broken));
    FAIL("a broken plan was proved");
  } catch (chevron::invalid_schedule_error const& e) {
    CHECK(e.found().broken == found.broken);
    CHECK(std::string(e.what()) == chevron::describe(found).str());
    CHECK(std::string(e.what()).find("rank 0") != std::string::npos);
  }
}

TEST_CASE("a program outlives the plan that it was made of, and copies of it train alike") {
  std::vector<double> losses;
  auto const train = [&](chevron::proved_program const& program) {
    chevron::run_threads(program, {}, [&](transport& comm) {
      chevron::trainer trainer(
          {.program = program, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = sgd});
      auto const data = make_batch(8, 1);
      auto const report = trainer.step(data.input, data.target);
      if (comm.topology().global_rank == 0) losses.push_back(report.loss);
    });
  };
  auto const made = [] {
    auto const plan = plan_of("ZB-H1", 2, 4);
    auto const proof = chevron::prove(plan);
    return chevron::lower(proof);
  }();
  auto const copy = made;
  CHECK(copy.view().instructions == made.view().instructions);  // of the one program that both are handles to
  train(made);
  train(copy);
  train(chevron::lowered<chevron::catalogue::zb_h1, chevron::shape{.ranks = 2, .micro_batches = 4}>);
  REQUIRE(losses.size() == 3);
  CHECK(losses[0] == losses[1]);
  CHECK(losses[0] == losses[2]);
}
