// Ranges for PyTorch's profilers: exactly the plan's computations, in its order, under PyTorch's names.
// timeout: 60
#include <ATen/record_function.h>
#include "support/small_model.hpp"

#include <doctest/doctest.h>

#include <chevron/run/core/profiler_range.hpp>
#include <chevron/run/execute/action_record.hpp>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

namespace {

/// A profiler's view: ranges of users by name, in the order in which they begin, and how many have ended.
struct seen_ranges {
  std::mutex mutex;
  std::vector<std::string> names;
  std::size_t ended = 0;
};
seen_ranges seen;

std::unique_ptr<at::ObserverContext> begins(at::RecordFunction const& range) {
  std::lock_guard const hold(seen.mutex);
  seen.names.emplace_back(range.name());
  return nullptr;
}
void ends(at::RecordFunction const&, at::ObserverContext*) {
  std::lock_guard const hold(seen.mutex);
  ++seen.ended;
}

/// A profiler that listens while this lives.
struct listening {
  at::CallbackHandle const handle =
      at::addGlobalCallback(at::RecordFunctionCallback(&begins, &ends).scopes({at::RecordScope::USER_SCOPE}));
  ~listening() { at::removeCallback(handle); }
};

void train_steps(chevron::plan const& plan, int steps) {
  auto const data = small_model::make_batch(2 * plan.size.micro_batches, 1);
  chevron::run_threads({.pipeline_ranks = plan.size.ranks}, [&](chevron::transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm));
    for (int i = 0; i < steps; ++i) train.step({data.input}, {data.target});
  });
}

}  // namespace

TEST_CASE("a profiler sees every rank's computations in the order of its plan") {
  for (char const* name : {"1F1B", "ZB-H1", "ZBVZeroBubble", "Interleaved1F1B", "DualPipeV"}) {
    CAPTURE(name);
    auto const plan = small_model::plan_of(name, 2, name == std::string("Interleaved1F1B") ? 4 : 6);
    seen.names.clear();
    seen.ended = 0;
    {
      listening const profiler;
      train_steps(plan, 2);
    }
    chevron::plan_view const view = plan;
    CHECK(seen.names.size() == 2 * static_cast<std::size_t>(view.total()));
    CHECK(seen.ended == seen.names.size());
    // A name tells the stage, and the stage its rank.
    std::vector<std::vector<std::string>> of_rank(static_cast<std::size_t>(view.size.ranks));
    for (std::string const& one : seen.names) {
      REQUIRE(one.starts_with("PP:"));
      of_rank.at(static_cast<std::size_t>(view.rank_of[std::stoi(one.substr(3))])).push_back(one);
    }
    for (int r = 0; r < view.size.ranks; ++r) {
      auto& names = of_rank[static_cast<std::size_t>(r)];
      std::vector<std::string> wanted;
      for (int step = 0; step < 2; ++step) {
        for (int i = 0; i < view.length(r); ++i) {
          wanted.push_back("PP:" + chevron::to_text(view.at(r, i)).str());
          // The halves of a fused pair begin in either order.
          std::size_t const k = wanted.size() - 1;
          if (view.at(r, i).fused != 0 && k + 1 < names.size() && names[k] != wanted[k]) std::swap(names[k], names[k + 1]);
        }
      }
      CHECK(names == wanted);
    }
  }
}

TEST_CASE("without a profiler a label costs next to nothing") {
  seen.names.clear();
  auto const plan = small_model::plan_of("1F1B", 2, 4);
  train_steps(plan, 1);
  CHECK(seen.names.empty());

  constexpr int count = 20000;
  double best = 1e9;
  for (int round = 0; round < 20; ++round) {
    auto const begin = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) chevron::detail::profiler_range const label(plan.actions.data[0], 1, false);
    best = std::min(best, std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() / count);
  }
  MESSAGE("a label without a profiler: " << best << " ns");
  CHECK(best < 1000);
}
