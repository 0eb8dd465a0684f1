// A wish to stop that one rank knows of: all ranks hear of it with the numbers of a step, and stop after the same one. The wish is the
// process's; ranks that are threads read it at different times, and the process tests (train_stopped.sh) signal one rank alone.
#include "support/small_model.hpp"

#include <chevron/run/core/stop_request.hpp>

#include <csignal>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

using namespace small_model;
using namespace std::chrono_literals;

namespace {

/// The wish is a process's; the next test's is another.
struct no_wish {
  no_wish() { forget(); }
  ~no_wish() { forget(); }
  static void forget() {
    chevron::detail::stop_wish = 0;
    chevron::detail::stop_at = std::numeric_limits<std::int64_t>::max();
  }
};

struct outcome {
  long steps = 0;
  std::string reason;
};

/// Trains until a stop is requested, at most 40 steps; returns each rank's outcome. `ask(rank, step)` is called before each step.
template <class Ask>
std::vector<outcome> train(bool post_validation, Ask const& ask) {
  auto const plan = plan_of("ZB-H1", 2, 3);
  auto const data = make_batch(6, 1);
  std::vector<outcome> out(4);
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2, .longest_delay = 2000us}, [&](transport& comm) {
    chevron::trainer trainer(small_model::setup(plan, comm, build_stage, {.post_validation = post_validation, .stable_steps = 0},
                                                chevron::optimizer<torch::optim::SGD>(1e-3)));
    int const rank = comm.topology().global_rank;
    while (trainer.next_step() < 40 && !trainer.should_stop()) {
      ask(rank, trainer.next_step());
      trainer.step(data.input, data.target);
    }
    out[static_cast<std::size_t>(rank)] = {trainer.next_step(), trainer.stop_reason()};
    trainer.synchronize();
  });
  return out;
}

void check_all(std::vector<outcome> const& all, long steps, std::string const& words) {
  for (outcome const& each : all) {
    CHECK(each.steps == steps);
    CHECK(each.reason.find(words) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("without a wish training goes on, and no reason is given") {
  no_wish const clean;
  check_all(train(false, [](int, long) {}), 40, "");
  for (auto const& each : train(true, [](int, long) {})) CHECK(each.reason.empty());
}

TEST_CASE("all ranks stop after the same step, whichever of them hears of the wish first") {
  for (int culprit = 0; culprit < 4; ++culprit) {
    no_wish const clean;
    auto const all = train(false, [&](int rank, long step) {
      if (rank == culprit && step == 7) chevron::request_stop();
    });
    // A rank may still be in the step before when another one asks.
    CHECK((all[0].steps == 7 || all[0].steps == 8));
    check_all(all, all[0].steps, "asked for it");
  }
}

TEST_CASE("with post-validation they stop alike, after the step that follows") {
  for (int culprit = 0; culprit < 4; ++culprit) {
    no_wish const clean;
    auto const all = train(true, [&](int rank, long step) {
      if (rank == culprit && step == 7) chevron::request_stop();
    });
    CHECK((all[0].steps == 8 || all[0].steps == 9));
    check_all(all, all[0].steps, "asked for it");
  }
}

TEST_CASE("a time limit is a wish from then on") {
  no_wish const clean;
  chevron::request_stop_after(1h);
  CHECK(chevron::detail::stop_cause_now() == 0);
  chevron::request_stop_after(30ms);
  auto const all = train(false, [](int, long) { std::this_thread::sleep_for(2ms); });
  CHECK(all[0].steps < 40);
  check_all(all, all[0].steps, "came to its time limit");
}

TEST_CASE("a signal is a wish while stop_signals lives, and its doubles say nothing new; afterwards it is as it was") {
  no_wish const clean;
  auto const before = std::signal(SIGUSR1, SIG_IGN);
  {
    chevron::stop_signals const stop;
    auto const all = train(false, [](int rank, long step) {
      if (rank == 1 && step == 5) {
        std::raise(SIGUSR1);
        std::raise(SIGTERM);
        std::raise(SIGUSR1);
      }
    });
    CHECK((all[0].steps == 5 || all[0].steps == 6));
    check_all(all, all[0].steps, "was sent signal 10 (User defined signal 1)");
  }
  no_wish::forget();
  std::raise(SIGUSR1);  // ignored again
  CHECK(chevron::detail::stop_cause_now() == 0);
  std::signal(SIGUSR1, before);
}
