#include "support/small_model.hpp"

#include <atomic>
#include <chrono>
#include <numeric>
#include <random>
#include <thread>

#include <torch/nn/modules/batchnorm.h>

#include <chevron/run/stage/partition.hpp>
#include <chevron/run/stage/random_scope.hpp>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

torch::nn::Sequential make_model() {
  at::manual_seed(3);
  torch::nn::Sequential whole;
  for (int i = 0; i < 3; ++i) {
    whole->push_back(torch::nn::Linear(width, width));
    whole->push_back(torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }));
    whole->push_back(torch::nn::Dropout(0.2));
  }
  whole->push_back(torch::nn::Linear(width, width));
  return whole;
}

double largest(std::vector<double> const& costs, std::vector<int> const& sizes) {
  double most = 0;
  std::size_t at = 0;
  for (int const n : sizes) {
    double sum = 0;
    for (int i = 0; i < n; ++i) sum += costs[at++];
    most = std::max(most, sum);
  }
  return most;
}

/// The best of all ways, tried one by one.
double best(std::vector<double> const& costs, std::size_t from, int stages) {
  double sum = 0;
  if (stages == 1) return std::accumulate(costs.begin() + static_cast<std::ptrdiff_t>(from), costs.end(), 0.0);
  double least = std::numeric_limits<double>::infinity();
  for (std::size_t end = from + 1; end + static_cast<std::size_t>(stages) - 1 <= costs.size(); ++end) {
    sum += costs[end - 1];
    least = std::min(least, std::max(sum, best(costs, end, stages - 1)));
  }
  return least;
}

}  // namespace

TEST_CASE("balanced: no other cut has a cheaper costliest stage") {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    std::vector<double> costs(1 + random() % 9);
    for (double& c : costs) c = static_cast<double>(random() % 5);
    int const stages = 1 + static_cast<int>(random() % costs.size());
    auto const sizes = chevron::balance(costs, stages);
    CHECK(static_cast<int>(sizes.size()) == stages);
    CHECK(std::accumulate(sizes.begin(), sizes.end(), 0) == static_cast<int>(costs.size()));
    CHECK(*std::min_element(sizes.begin(), sizes.end()) >= 1);
    CHECK(largest(costs, sizes) == best(costs, 0, stages));
  }
  CHECK(chevron::balance({1, 1, 1, 1, 1}, 2) == std::vector<int>{3, 2});
  CHECK(chevron::balance({5, 1, 1, 1, 1, 1}, 2) == std::vector<int>{1, 5});
  CHECK_THROWS_WITH_AS(chevron::balance({1, 1}, 3), "2 layers cannot be cut into 3 stages of at least one layer",
                       chevron::usage_error);
}

TEST_CASE("a model trains the same wherever it is cut, and its parameters keep their names") {
  at::set_num_threads(1);
  auto const data = make_batch(6, 2);
  auto const counted = chevron::balance(chevron::parameter_counts(make_model()), 4);
  CHECK(counted == std::vector<int>{3, 3, 3, 1});
  std::vector<std::vector<double>> losses;
  // A stage without layers passes its inputs on: in front, in the middle, or before the loss.
  std::vector<std::vector<int>> const cuts{{1, 2, 3, 4}, {4, 4, 1, 1}, counted, {10, 0, 0, 0}, {0, 3, 0, 7}, {5, 0, 5, 0}};
  for (std::size_t cut = 0; cut < cuts.size(); ++cut) {
    auto const& sizes = cuts[cut];
    auto const plan = plan_of(cut % 2 == 0 ? "1F1B" : "ZB-H1", 4, 3);
    losses.emplace_back();
    std::mutex mutex;
    std::vector<std::string> names;
    chevron::run_threads({.pipeline_ranks = 4}, [&](transport& comm) {
      auto const build = [&](int s) {
        auto stages = chevron::partition(make_model(), sizes);
        // Without dropout: that depends on stage numbers.
        stages[static_cast<std::size_t>(s)].training(false);
        return stages[static_cast<std::size_t>(s)];
      };
      chevron::trainer train(small_model::setup(plan, comm, build, {}, adamw));
      for (auto& s : train.stages()) s.training(false);
      for (int step = 0; step < 5; ++step) {
        auto const report = train.step({data.input}, {data.target});
        if (comm.topology().global_rank == 0) losses.back().push_back(report.loss);
      }
      std::lock_guard const hold(mutex);
      for (auto& s : train.stages()) {
        for (auto const& p : s.parameters()) names.push_back(p.name);
      }
    });
    std::sort(names.begin(), names.end());
    CHECK(names ==
          std::vector<std::string>{"0.bias", "0.weight", "3.bias", "3.weight", "6.bias", "6.weight", "9.bias", "9.weight"});
  }
  for (auto const& one : losses) CHECK(losses[0] == one);
  CHECK(losses[0].back() < losses[0].front());
}

TEST_CASE("numbers that do not add up are refused") {
  CHECK_THROWS_WITH_AS(chevron::partition(make_model(), {5, 4}),
                       "a model of 10 layers cannot be cut into 5 + 4. Remedy: a number of layers, 0 or more, for each stage, "
                       "which add up to all layers",
                       chevron::usage_error);
  CHECK_THROWS_AS(chevron::partition(make_model(), {11, -1}), chevron::usage_error);
  CHECK_THROWS_AS(chevron::partition(make_model(), {}), chevron::usage_error);
}

TEST_CASE("measured costs find the slow layer and leave everything as it was") {
  auto const busy = [](at::Tensor const& x) {
    auto const until = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
    while (std::chrono::steady_clock::now() < until) {
    }
    return x.tanh();
  };
  torch::nn::Sequential whole(torch::nn::Linear(width, width), torch::nn::Dropout(0.5), torch::nn::BatchNorm1d(width),
                              torch::nn::Functional(busy), torch::nn::Linear(width, width), torch::nn::Linear(width, width));
  auto const before = [&] {
    std::vector<at::Tensor> all;
    for (auto& p : whole->parameters()) all.push_back(p.detach().clone());
    for (auto& b : whole->buffers()) all.push_back(b.detach().clone());
    return all;
  };
  auto const was = before();
  at::manual_seed(5);
  auto const costs = chevron::measured_costs(whole, {at::ones({4, width})});
  auto const drawn = at::rand({2});
  at::manual_seed(5);
  CHECK(at::equal(drawn, at::rand({2})));
  REQUIRE(costs.size() == 6);
  CHECK(costs[3] >= 0.02);
  for (std::size_t i : {0u, 1u, 2u, 4u, 5u}) CHECK(costs[i] < costs[3]);
  CHECK(chevron::balance(costs, 3) == std::vector<int>{3, 1, 2});
  auto const is = before();
  for (std::size_t i = 0; i < was.size(); ++i) CHECK(at::equal(was[i], is[i]));
  for (auto& p : whole->parameters()) CHECK_FALSE(p.grad().defined());
}

TEST_CASE("ranks that measured for themselves agree on the mean") {
  complaints wrong;
  chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
    auto const costs = chevron::mean_over_ranks(comm, {1.0 * comm.topology().global_rank, 2});
    wrong.require(costs == std::vector<double>{1.5, 2}, "costs");
  });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
  CHECK(wrong.all.empty());
}

TEST_CASE("what is made inside `seeded` is the same in every thread, whatever others draw meanwhile") {
  auto const make = [] { return torch::nn::Linear(32, 32)->weight.detach().clone(); };
  auto const generator = at::globalContext().defaultGenerator(at::kCPU);
  auto const before = generator.get_state();
  auto const alone = chevron::seeded(1, make);
  CHECK(at::equal(generator.get_state(), before));
  CHECK(!at::equal(chevron::seeded(2, make), alone));

  std::atomic<bool> over = false;
  std::atomic<int> others = 0;
  std::thread draws([&] {
    while (!over) at::rand({64});
  });
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&] {
      for (int i = 0; i < 50; ++i) others += at::equal(chevron::seeded(1, make), alone) ? 0 : 1;
    });
  }
  for (std::thread& rank : ranks) rank.join();
  over = true;
  draws.join();
  CHECK(others == 0);
}
