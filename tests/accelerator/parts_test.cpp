// timeout: 60
// Parts of the runtime that do something else on an accelerator than in main memory, one by one.
#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <cmath>
#include <limits>
#include <span>
#include <stdexcept>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/run/core/compute_streams.hpp>
#include <chevron/run/core/scalar_reader.hpp>
#include <chevron/run/execute/memory_meter.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/train/gradient_norm.hpp>

#include "accelerator/allocator.hpp"
#include "accelerator/device.hpp"

#include <doctest/doctest.h>

using accelerator::device;

TEST_CASE("halves of a pair that throw on a lost device: the first cause is told, and LibTorch does not warn of lanes") {
  at::globalContext().setWarnOnAccumulateGradStreamMismatch(true);
  {
    chevron::detail::compute_streams streams(device(0), true);
    CHECK(!at::globalContext().warnOnAccumulateGradStreamMismatch());
    auto const fails = [] {
      accelerator::lose_device(true);
      throw std::runtime_error("the cause");
    };
    CHECK_THROWS_WITH(streams.both(0, fails, [] {}), "the cause");
    accelerator::lose_device(false);
    CHECK_THROWS_WITH(streams.both(
                          0, [] {}, fails),
                      "the cause");
    accelerator::lose_device(false);
    CHECK_THROWS(streams.both(
        0, [] { accelerator::lose_device(true); }, [] {}));
    accelerator::lose_device(false);
  }
  CHECK(accelerator::start_over() == 0);
}

TEST_CASE("what an F retains is not less because its input came in main memory") {
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("GPipe", {.ranks = 2, .micro_batches = 1})));
  for (bool const in_main_memory : {false, true}) {
    chevron::detail::memory_meter meter(program.view(), 1, device(1));
    REQUIRE(meter.watches());
    meter.begin_step();
    std::int64_t const before = meter.stats().in_use();
    chevron::program_view const view = program.view();
    chevron::instruction const* forward = nullptr;
    for (int i = 0; i < view.length(1); ++i) {
      if (view.at(1, i).op.kind == chevron::kind::forward) forward = &view.at(1, i);
    }
    REQUIRE(forward != nullptr);
    chevron::detail::activation slot;
    std::vector<at::Tensor> const inputs{
        at::ones({1000}, at::TensorOptions().device(in_main_memory ? at::Device(at::kCPU) : device(1)))};
    at::Tensor kept;
    meter.measure(*forward, inputs, slot, [&] { kept = at::ones({1000}, at::TensorOptions().device(device(1))); });
    // A received input is counted as retained, as it is kept for it.
    std::int64_t const block = meter.stats().in_use() - before - (in_main_memory ? 0 : 4096);
    CHECK(block == 4096);
    CHECK(meter.peak(0).planned - before == (in_main_memory ? block : block + static_cast<std::int64_t>(inputs[0].nbytes())));
  }
  CHECK(accelerator::start_over() == 0);
}

TEST_CASE("workspaces that libraries take in the first step are no activations from the second step on") {
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("GPipe", {.ranks = 2, .micro_batches = 1})));
  auto const on_device = at::TensorOptions().device(device(1));
  {
    chevron::detail::memory_meter meter(program.view(), 1, device(1));
    chevron::program_view const view = program.view();
    int first = 0;
    while (view.at(1, first).op.kind != chevron::kind::forward) ++first;
    at::Tensor workspace, kept;  // the first lasts, the second until its backward
    std::vector<std::int64_t> planned;
    for (int step = 0; step < 3; ++step) {
      meter.begin_step();
      chevron::detail::activation slot;
      std::int64_t const before = meter.stats().in_use();
      meter.measure(view.at(1, first), {}, slot, [&] {
        if (!workspace.defined()) workspace = at::ones({100000}, on_device);
        kept = at::ones({1000}, on_device);
      });
      planned.push_back(meter.peak(0).planned - before);
      kept.reset();
    }
    std::int64_t const of_microbatch = planned[1];
    CHECK(of_microbatch == 4096);
    CHECK(planned[0] >= 400000 + of_microbatch);
    CHECK(planned[2] == of_microbatch);
  }
  CHECK(accelerator::start_over() == 0);
}

TEST_CASE("the norms of all gradients on a device are those of main memory") {
  at::Tensor const values = at::arange(100000, at::kFloat).sin().view({100, 1000}).t();
  chevron::tensors const here{values,
                              values[3],
                              values.to(at::kBFloat16),
                              values.to(at::kDouble),
                              at::empty({0}),
                              at::full({3}, std::numeric_limits<float>::infinity())};
  {
    chevron::tensors there;
    for (at::Tensor const& t : here) there.push_back(t.to(device(0)));
    std::vector<double> norms;
    chevron::detail::scalar_reader numbers;
    numbers.ask(chevron::norms_of(there), [&](std::span<double const> all) { norms.assign(all.begin(), all.end()); });
    CHECK(norms.empty());
    numbers.read();
    REQUIRE(norms.size() == here.size());
    for (double& norm : norms) norm *= norm;
    for (std::size_t i = 0; i < here.size(); ++i) {
      CAPTURE(i);
      double const expected = chevron::sum_of_squares(here[i]);
      CHECK((std::isinf(expected) ? norms[i] == expected : norms[i] == doctest::Approx(expected).epsilon(1e-13)));
    }
  }
  CHECK(chevron::norms_of({}).empty());
  CHECK(accelerator::start_over() == 0);
}

TEST_CASE("lists of scalars, of a device and of main memory, reach the host in their order and in one wait") {
  auto const on_device = at::TensorOptions().device(device(0));
  std::vector<std::vector<double>> read;
  auto const keep = [&](std::span<double const> values) { read.emplace_back(values.begin(), values.end()); };
  {
    chevron::detail::scalar_reader numbers;
    numbers.ask({at::full({}, 1.5, on_device), at::full({}, 2, on_device.dtype(at::kLong))}, keep);
    numbers.ask({}, keep);
    numbers.ask({at::full({}, 0.1f)}, keep);
    numbers.ask({at::full({}, 0.25, on_device.dtype(at::kBFloat16))}, keep);
    long const before = accelerator::detector::instance().host_waits(0);
    numbers.read();
    CHECK(accelerator::detector::instance().host_waits(0) == before + 1);
    CHECK(read == std::vector<std::vector<double>>{{1.5, 2}, {}, {static_cast<double>(0.1f)}, {0.25}});
    numbers.read();
    CHECK(read.size() == 4);
  }
  CHECK(accelerator::start_over() == 0);
}

TEST_CASE("what the user draws on a device between steps does not depend on what stages draw") {
  std::vector<at::Tensor> drawn[2];
  for (bool const stages_draw : {false, true}) {
    accelerator::generator_of(0).unsafeGetGeneratorImpl()->set_current_seed(11);
    auto const on_device = at::TensorOptions().device(device(0));
    for (int step = 0; step < 3; ++step) {
      drawn[stages_draw].push_back(at::randn({4}, on_device).cpu());
      if (!stages_draw) continue;
      at::Tensor const near[] = {at::ones({2}, on_device), at::ones({2}, on_device)};
      chevron::random_scope const outer({.seed = 5, .step = step}, near);
      at::Tensor const first = at::randn({4}, on_device);
      CHECK(outer.drew());
      {
        chevron::random_scope const inner({.seed = 6}, near);
        CHECK(!inner.drew());
        at::randn({4}, on_device);
      }
      CHECK(outer.drew());
      CHECK(!at::equal(first.cpu(), at::randn({4}, on_device).cpu()));
    }
  }
  for (std::size_t i = 0; i < 3; ++i) CHECK(at::equal(drawn[0][i], drawn[1][i]));
  CHECK(accelerator::start_over() == 0);
}
