#include "support/recomputed_model.hpp"

#include <atomic>
#include <chrono>
#include <thread>

#include <chevron/describe/recomputed.hpp>
#include <chevron/describe/table.hpp>

#include <doctest/doctest.h>

using namespace small_model;
using chevron::letters::B, chevron::letters::F, chevron::letters::R;

namespace {

/// A schedule of the catalogue with an R for each microbatch of these stages.
chevron::plan with_r(char const* name, int ranks, int micro_batches, bool last = true) {
  chevron::plan const plain = plan_of(name, ranks, micro_batches);
  chevron::buffer<bool> stages(plain.stages);
  for (int s = 0; s < plain.stages; ++s) stages.data[s] = last || s + 1 < plain.stages;
  return chevron::with_recomputation(plain, stages.data);
}

constexpr int count = 6;

struct needed {
  std::int64_t measured = 0;  // peak of a step, above the bytes before the step
  std::int64_t planned = 0;   // the most that the plan holds, by the bytes of its stages
};

/// One rank with two stages. All forwards, then each stage backward from the last: R's directly before their B's, or all at
/// first.
needed of_order(bool early) {
  std::vector<chevron::action> list;
  for (int s = 0; s < 2; ++s) {
    for (int m = 0; m < count; ++m) list.push_back(F(s, m));
  }
  for (int s = 1; s >= 0; --s) {
    for (int m = 0; m < count && early; ++m) list.push_back(R(s, m));
    for (int m = 0; m < count; ++m) {
      if (!early) list.push_back(R(s, m));
      list.push_back(B(s, m));
    }
  }
  int const begin[] = {0, static_cast<int>(list.size())};
  chevron::plan const plan = chevron::plan_of_actions(list.data(), begin, 1);
  needed out;
  chevron::run_threads({}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm, [](int s) { return widening_stage(s).recompute(); }));
    out.measured = peak_of_step(train, count);
    train.measure_bytes();
    at::Tensor const x = at::ones({samples * count, wide});
    train.step({x}, {x});
    std::int64_t activation[2] = {}, input[2] = {};
    for (chevron::measured_bytes const& s : train.bytes_by_stage()) {
      activation[s.stage] = s.activation;
      input[s.stage] = s.input;
    }
    out.planned = peak_bytes(plan, chevron::size_view{activation, nullptr, 1, input, 1}, 0);
  });
  return out;
}

}  // namespace

TEST_CASE("with R's every schedule gives the same gradients to the last bit, with dropout") {
  check_recomputed_gradients([](auto... of) { return with_r(of...); }, {1, 2, 3});
}

TEST_CASE("twenty steps with R's, two replicas") {
  check_recomputed_training({"1F1B", "ZBVZeroBubble", "ZB-H1", "DualPipeV"}, [](auto... of) { return with_r(of..., false); });
}

TEST_CASE("an R runs its forward while the gradient is still to come, and the B does not run it again") {
  auto const data = make_batch(4, 1);
  std::atomic<int> forwards = 0;
  std::atomic<bool> in_time = true;
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    auto const build = [&](int s) {
      torch::nn::Linear layer(width, width);
      if (s == 1) return chevron::stage(layer);
      chevron::stage made(layer, [&forwards, layer](at::Tensor x) mutable {
        ++forwards;
        return layer(x);
      });
      return made.recompute();
    };
    // Rank 0 does 0F0 0F1 0R0 0B0 …: no loss is given before its third forward, that of 0R0.
    auto const loss = [&](at::Tensor output, at::Tensor target) {
      auto const late = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (forwards < 3 && in_time) {
        in_time = in_time && std::chrono::steady_clock::now() < late;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return mean_square(output, target);
    };
    chevron::trainer train({.program = chevron::lower(chevron::prove(plan_of("1F1B-R", 2, 2))),
                            .transport = comm,
                            .stages = build,
                            .loss = loss,
                            .optimizer = sgd});
    train.step({data.input}, {data.target});
  });
  CHECK(in_time);
  CHECK(forwards == 4);
}

TEST_CASE("a step needs the bytes that the plan says: inputs alone from F to R, everything from R on") {
  needed const early = of_order(true), late = of_order(false);
  // Apart from chunks (gradients under way, the loss), both orders need equal bytes.
  double const measured = static_cast<double>(early.measured - late.measured);
  double const planned = static_cast<double>(early.planned - late.planned);
  CHECK(planned > 0.5 * static_cast<double>(early.planned));
  CHECK(measured == doctest::Approx(planned).epsilon(0.02));
}

TEST_CASE("a stage that recomputes nothing is refused under a schedule with R's") {
  auto const run = [&](int recomputing) {
    chevron::run_threads({.pipeline_ranks = 3}, [&](transport& comm) {
      chevron::trainer train(
          small_model::setup(plan_of("1F1B-R", 3, 4), comm, [&](int s) { return build_stage(s).recompute(s < recomputing); }));
    });
  };
  run(2);  // the last rank has no R
  CHECK_THROWS_WITH_AS(run(1),
                       doctest::Contains("the schedule has 1R0, but stage 1 recomputes nothing. Remedy: call recompute() on the "
                                         "stage that is built, or take a schedule without R"),
                       chevron::usage_error);
}
