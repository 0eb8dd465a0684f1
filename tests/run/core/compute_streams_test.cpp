// timeout: 60
#include "support/small_model.hpp"

#include <chevron/run/core/compute_streams.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <thread>

TEST_CASE("two lanes run at the same time, with the caller's modes, and both end before an error is told") {
  chevron::detail::compute_streams two(at::kCPU, true);
  std::atomic<int> met = 0;
  auto const meet = [&] {
    ++met;
    while (met < 2) std::this_thread::yield();
  };
  bool followed = true;
  std::thread::id there, here;
  {
    at::NoGradGuard const off;
    two.both(
        0,
        [&] {
          meet();
          followed = at::GradMode::is_enabled();
          there = std::this_thread::get_id();
        },
        [&] {
          meet();
          here = std::this_thread::get_id();
        });
  }
  CHECK(met == 2);
  CHECK(!followed);
  CHECK(there != here);
  CHECK(here == std::this_thread::get_id());

  bool ended = false;
  CHECK_THROWS_WITH(two.both(
                        1, [] { throw std::runtime_error("beside"); },
                        [&] {
                          ended = true;
                          throw std::runtime_error("here");
                        }),
                    "beside");
  CHECK(ended);
  CHECK_THROWS_WITH(two.both(
                        1, [] {}, [] { throw std::runtime_error("here"); }),
                    "here");
}

TEST_CASE("fused pairs beside each other train bit for bit as one after the other do, with dropout and recomputing") {
  for (int const recomputed : {0, 1, 3}) {
    for (int const ranks : {1, 2, 4}) {
      int const micro_batches = 2 * ranks + 2;
      auto const program = chevron::lower(chevron::prove(small_model::plan_of("DualPipeV", ranks, micro_batches)));
      std::vector<std::vector<at::Tensor>> parameters[2];
      std::vector<double> losses[2];
      for (bool const beside : {false, true}) {
        parameters[beside].resize(static_cast<std::size_t>(2 * ranks));
        std::mutex mutex;
        chevron::run_threads({.pipeline_ranks = ranks}, [&](chevron::transport& comm) {
          chevron::trainer train(small_model::setup(
              program, comm, [&](int s) { return small_model::build_dropping_stage(s, recomputed); },
              {.seed = 3, .overlap_pairs = beside}, chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.05))));
          for (int step = 0; step < 4; ++step) {
            auto const b = small_model::make_batch(2 * micro_batches + 1, step);
            auto const report = train.step({b.input}, {b.target});
            if (comm.topology().global_rank == 0) losses[beside].push_back(report.loss);
            auto const entries = train.last_trace().entries();
            std::lock_guard const hold(mutex);
            for (std::size_t i = 0; i + 1 < entries.size(); ++i) {
              if (entries[i].op.fused == 0) continue;
              // The inputs of both halves had arrived before either half began.
              CHECK((entries[i].start >= entries[i + 1].reached) == beside);
              CHECK(entries[i].end >= entries[i].start);
              CHECK(entries[i + 1].end >= entries[i + 1].start);
            }
          }
          std::lock_guard const hold(mutex);
          for (std::size_t s = 0; s < train.stages().size(); ++s) {
            if (!train.stages()[s]) continue;
            for (auto const& p : train.stages()[s].parameters()) parameters[beside][s].push_back(p.value.detach().clone());
          }
        });
      }
      INFO(ranks << " ranks, recomputed " << recomputed);
      CHECK(losses[0] == losses[1]);
      for (std::size_t s = 0; s < parameters[0].size(); ++s) {
        REQUIRE(parameters[0][s].size() == parameters[1][s].size());
        for (std::size_t i = 0; i < parameters[0][s].size(); ++i) CHECK(at::equal(parameters[0][s][i], parameters[1][s][i]));
      }
    }
  }
}
