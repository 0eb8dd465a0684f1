// The settings that a resumed run takes from the checkpoint, and those that it takes from its own options: rates, options of an
// optimizer without saved state, the step's number.

#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>

#include <chevron/checkpoint.hpp>
#include <chevron/data.hpp>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

struct resumed {
  std::vector<double> rates;            // of each step
  std::vector<std::string> differences;
  std::string refused;
};

/// Trains `steps`, from a checkpoint if `from` is given, and saves if `to` is given.
resumed run(chevron::optimizer_factory const& make, int steps, std::filesystem::path const& from, std::filesystem::path const& to,
            std::function<double(long)> const& rate = {}, chevron::sharding shard = chevron::sharding::nothing) {
  resumed out;
  std::mutex guard;
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  try {
    chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
      auto const build = [](int s) {
        at::manual_seed(s);
        auto const made = std::make_shared<torch::nn::Module>();
        torch::nn::Linear l(width, width);
        made->register_module("l" + std::to_string(s), l.ptr());
        return chevron::stage(made, [l](at::Tensor x) mutable { return l(x); });
      };
      chevron::trainer train(small_model::setup(program, comm, build, {.learning_rate = rate, .shard = shard}, make));
      if (!from.empty()) {
        chevron::load_checkpoint(train, from, {}, {.on_difference = [&](std::string const& said) {
                                   std::lock_guard const hold(guard);
                                   out.differences.push_back(said);
                                 }});
      }
      for (int k = 0; k < steps; ++k) {
        auto const data = make_batch(8, comm.topology().replica());
        auto const report = train.step(data.input, data.target);
        std::lock_guard const hold(guard);
        if (comm.topology().global_rank == 0) out.rates.push_back(report.learning_rate);
      }
      if (!to.empty()) chevron::save_checkpoint(train, to);
    });
  } catch (chevron::checkpoint_error const& e) {
    out.refused = e.what();
  }
  return out;
}

using adam_options = torch::optim::AdamWOptions;
chevron::optimizer_factory adam(double rate) { return chevron::optimizer<torch::optim::AdamW>(adam_options(rate)); }

/// Weights and biases in groups of their own.
chevron::optimizer_factory groups(double of_weights, double of_biases) {
  return [=](std::vector<chevron::named_parameter> const& all) {
    std::vector<at::Tensor> weights, biases;
    for (auto const& p : all) (p.name.ends_with("bias") ? biases : weights).push_back(p.value);
    std::vector<torch::optim::OptimizerParamGroup> made;
    made.emplace_back(weights, std::make_unique<adam_options>(adam_options(of_weights)));
    made.emplace_back(biases, std::make_unique<adam_options>(adam_options(of_biases)));
    return std::make_unique<torch::optim::AdamW>(made);
  };
}

}  // namespace

TEST_CASE("without a schedule rates are the checkpoint's, and each one that differs from the options is told") {
  scratch_folder const folder;
  run(adam(1e-2), 2, {}, folder.path / "saved");
  auto const same = run(adam(1e-2), 1, folder.path / "saved", {});
  CHECK(same.rates == std::vector<double>{1e-2});
  CHECK(same.differences.empty());
  auto const other = run(adam(1e-3), 1, folder.path / "saved", {});
  CHECK(other.rates == std::vector<double>{1e-2});
  REQUIRE(other.differences.size() == 1);
  CHECK(other.differences[0].find("group 0 of the optimizer goes on with the checkpoint's learning rate, 0.01, and not with its "
                                  "option, 0.001") != std::string::npos);
  auto const near = run(adam(1e-2 + 1e-13), 1, folder.path / "saved", {});
  REQUIRE(near.differences.size() == 1);
  CHECK(near.differences[0].find("learning rate, 0.01, and not with its option, 0.0100000000001") != std::string::npos);
  auto const two = run(groups(1e-2, 1e-3), 1, folder.path / "saved", {}, {}, chevron::sharding::optimizer);
  CHECK(two.rates == std::vector<double>{1e-2});
  REQUIRE(two.differences.size() == 1);
  CHECK(two.differences[0].find("group 1 of the optimizer") != std::string::npos);
}

TEST_CASE("with a schedule rates are its own, and a schedule other than the saved run's is told") {
  scratch_folder const folder;
  auto const falls = [](double highest) { return [highest](long step) { return highest / static_cast<double>(step + 1); }; };
  run(adam(1e-2), 3, {}, folder.path / "saved", falls(0.1));
  auto const same = run(adam(1e-2), 2, folder.path / "saved", {}, falls(0.1));
  CHECK(same.rates == std::vector<double>{0.1 / 4, 0.1 / 5});
  CHECK(same.differences.empty());
  auto const other = run(adam(1e-2), 1, folder.path / "saved", {}, falls(0.3));
  CHECK(other.rates == std::vector<double>{0.3 / 4});
  REQUIRE(other.differences.size() == 1);
  CHECK(other.differences[0].find("trainer_options::learning_rate gives 0.1") != std::string::npos);
  CHECK(other.differences[0].find("for step 2, which was trained with 0.0333") != std::string::npos);
  // From a schedule to the optimizer's own rates, and back.
  auto const without = run(adam(1e-2), 1, folder.path / "saved", {});
  CHECK(without.rates == std::vector<double>{0.1 / 3});
  CHECK(without.differences.size() == 1);
  run(adam(1e-2), 3, {}, folder.path / "fixed");
  CHECK(run(adam(1e-2), 1, folder.path / "fixed", {}, falls(0.1)).differences.size() == 1);
  CHECK(run(adam(1e-2), 1, folder.path / "fixed", {}, [](long) { return 1e-2; }).differences.empty());
}

TEST_CASE("state that an option needs and the checkpoint lacks is refused, with parameter, group, option and remedy") {
  using torch::optim::AdamOptions;
  using torch::optim::RMSpropOptions;
  struct change {
    chevron::optimizer_factory before, after;
    char const* says;
  };
  std::vector<change> const all = {
      {adam(1e-2), chevron::optimizer<torch::optim::AdamW>(adam_options(1e-2).amsgrad(true)),
       "the option amsgrad true, and the checkpoint has no max_exp_avg_sq"},
      {chevron::optimizer<torch::optim::Adam>(AdamOptions(1e-2)),
       chevron::optimizer<torch::optim::Adam>(AdamOptions(1e-2).amsgrad(true)), "no max_exp_avg_sq"},
      {chevron::optimizer<torch::optim::RMSprop>(RMSpropOptions(1e-3)),
       chevron::optimizer<torch::optim::RMSprop>(RMSpropOptions(1e-3).momentum(0.5)),
       "the option momentum 0.5, and the checkpoint has no momentum_buffer"},
      {chevron::optimizer<torch::optim::RMSprop>(RMSpropOptions(1e-3)),
       chevron::optimizer<torch::optim::RMSprop>(RMSpropOptions(1e-3).centered(true)), "the option centered true"}};
  for (change const& one : all) {
    for (auto const shard : {chevron::sharding::nothing, chevron::sharding::optimizer}) {
      scratch_folder const folder;
      run(one.before, 2, {}, folder.path / "saved");
      auto const after = run(one.after, 1, folder.path / "saved", {}, {}, shard);
      CHECK(after.refused.find(one.says) != std::string::npos);
      CHECK(after.refused.find("group 0 of the optimizer has") != std::string::npos);
      CHECK(after.refused.find("of stage 0's l0.weight: the saved run trained without the option. Remedy: the option as in the "
                               "saved run") != std::string::npos);
      CHECK(run(one.after, 2, {}, folder.path / "with").refused.empty());
      CHECK(run(one.after, 1, folder.path / "with", {}, {}, shard).refused.empty());
    }
  }
}

TEST_CASE("momentum that begins anew, which SGD and the fused optimizers can, is told") {
  using torch::optim::SGDOptions;
  auto const plain = chevron::optimizer<torch::optim::SGD>(SGDOptions(0.1));
  auto const momentum = chevron::optimizer<torch::optim::SGD>(SGDOptions(0.1).momentum(0.9));
  scratch_folder const folder;
  run(plain, 2, {}, folder.path / "saved");
  auto const after = run(momentum, 1, folder.path / "saved", {});
  CHECK(after.refused.empty());
  REQUIRE(after.differences.size() == 1);
  CHECK(after.differences[0].find("the option momentum 0.9, and the checkpoint has no momentum_buffer of its parameters, which "
                                  "begins anew") != std::string::npos);
  run(plain, 0, {}, folder.path / "nothing");  // before any step no state is missing
  CHECK(run(momentum, 1, folder.path / "nothing", {}).differences.empty());
  run(momentum, 2, {}, folder.path / "with");
  CHECK(run(momentum, 1, folder.path / "with", {}).differences.empty());
  using fused = chevron::fused_adamw;
  run(chevron::optimizer<fused>(adam_options(1e-2)), 2, {}, folder.path / "fused");
  auto const ams = run(chevron::optimizer<fused>(adam_options(1e-2).amsgrad(true)), 1, folder.path / "fused", {});
  CHECK(ams.refused.empty());
  CHECK(ams.differences.size() == 1);
}

TEST_CASE("a schedule of rates without its number of steps is refused in the first step") {
  for (std::function<double(long)> const& rate : {std::function<double(long)>(chevron::warm_up_cosine{.highest = 0.1, .warm_up = 3}),
                                                  std::function<double(long)>(chevron::warm_up_linear{.highest = 0.1})}) {
    CHECK_THROWS_WITH_AS(run(adam(1e-2), 1, {}, {}, rate),
                         doctest::Contains("::steps is 0: the rate falls until the last step of the training"),
                         chevron::usage_error);
  }
  CHECK(chevron::warm_up_cosine{.highest = 0.1, .warm_up = 3, .steps = 10}(2) == 0.1);
}
