#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <chevron/run/train/fused_optimizers.hpp>

#include "support/rank_ends.hpp"
#include "support/small_model.hpp"
#include "support/whole_training.hpp"

#include <doctest/doctest.h>

using namespace small_model;
using namespace rank_ends;

namespace {

namespace optim = torch::optim;

/// Parameters of several shapes, one of them in channels-last order, and gradients of each step; one has none in some steps.
struct leaves {
  std::vector<at::Tensor> values;
  at::Generator from = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{11});

  explicit leaves(at::ScalarType dtype) {
    for (at::IntArrayRef const sizes :
         {at::IntArrayRef{3}, at::IntArrayRef{5, 17}, at::IntArrayRef{2, 3, 4, 5}, at::IntArrayRef{0}})
      values.push_back(at::randn(sizes, from).to(dtype));
    values[2] = values[2].contiguous(at::MemoryFormat::ChannelsLast);
    for (at::Tensor& v : values) v.requires_grad_();
  }
  void give_gradients(int step) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      at::Tensor const g = at::randn(values[i].sizes(), from).to(values[i].scalar_type());
      values[i].mutable_grad() = i == 1 && step % 3 == 1 ? at::Tensor() : g;
    }
  }
};

template <class Optimizer, class Options>
std::unique_ptr<optim::Optimizer> in_two_groups(std::vector<at::Tensor> const& values, Options first, Options second) {
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>(values.begin(), values.begin() + 2), std::make_unique<Options>(first));
  groups.emplace_back(std::vector<at::Tensor>(values.begin() + 2, values.end()), std::make_unique<Options>(second));
  return std::make_unique<Optimizer>(groups, first);
}

/// The parameters after some steps.
std::vector<at::Tensor> stepped(at::ScalarType dtype,
                                std::function<std::unique_ptr<optim::Optimizer>(leaves const&)> const& make) {
  leaves of(dtype);
  auto const optimizer = make(of);
  for (int step = 0; step < 5; ++step) {
    of.give_gradients(step);
    optimizer->step();
  }
  return of.values;
}

template <class Fused, class Plain, class Options>
void check_rounds_alone(Options const& first, Options const& second) {
  for (auto const& [dtype, tolerance] : {std::pair{at::kDouble, 1e-12}, {at::kFloat, 2e-6}, {at::kBFloat16, 4e-2}}) {
    if (dtype == at::kBFloat16 && std::is_same_v<Fused, chevron::fused_sgd>) continue;
    auto const fused = stepped(dtype, [&](leaves const& of) { return in_two_groups<Fused>(of.values, first, second); });
    auto const plain = stepped(dtype, [&](leaves const& of) { return in_two_groups<Plain>(of.values, first, second); });
    for (std::size_t i = 0; i < fused.size(); ++i) CHECK(at::allclose(fused[i], plain[i], tolerance, tolerance));
    CHECK_FALSE(at::allclose(fused[0], leaves(dtype).values[0], tolerance, tolerance));
  }
}

}  // namespace

TEST_CASE("the fused optimizers compute what torch::optim's do, but for rounding") {
  for (bool const amsgrad : {false, true}) {
    auto const of = [&](double rate, double decay) {
      return optim::AdamWOptions(rate).betas({0.8, 0.95}).eps(1e-6).weight_decay(decay).amsgrad(amsgrad);
    };
    check_rounds_alone<chevron::fused_adamw, optim::AdamW>(of(0.05, 0.1), of(0.02, 0));
  }
  for (double const momentum : {0.0, 0.7}) {
    for (bool const nesterov : {false, true}) {
      if (nesterov && momentum == 0) continue;
      auto const of = [&](double rate, double decay) {
        return optim::SGDOptions(rate).momentum(momentum).nesterov(nesterov).dampening(nesterov ? 0 : 0.2).weight_decay(decay);
      };
      check_rounds_alone<chevron::fused_sgd, optim::SGD>(of(0.05, 0.1), of(0.02, 0));
    }
  }
}

// tests/interop/fused_optimizers.py repeats these steps with PyTorch's fused=True, and compares bytes.
TEST_CASE("steps of the fused optimizers are written down") {
  char const* const file = std::getenv("CHEVRON_FUSED_STEPS");
  if (file == nullptr) return;
  std::vector<c10::IValue> written;
  auto const write = [&](std::function<std::unique_ptr<optim::Optimizer>(leaves const&)> const& make, at::ScalarType dtype) {
    leaves of(dtype);
    auto const optimizer = make(of);
    for (int step = 0; step < 6; ++step) {
      of.give_gradients(step);
      for (std::size_t i = 0; i < of.values.size(); ++i) {
        at::Tensor const& v = of.values[i];
        written.push_back(v.detach().clone());
        written.push_back(v.grad().defined() ? v.grad().clone() : at::Tensor(at::empty({0, 0})));
      }
      optimizer->step();
      for (at::Tensor const& v : of.values) written.push_back(v.detach().clone());
    }
  };
  for (at::ScalarType const dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (bool const amsgrad : {false, true}) {
      write(
          [&](leaves const& of) {
            return std::make_unique<chevron::fused_adamw>(
                of.values, optim::AdamWOptions(0.05).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1).amsgrad(amsgrad));
          },
          dtype);
    }
    if (dtype == at::kBFloat16) continue;  // LibTorch's SGD is wrong there, and refused
    for (double const momentum : {0.0, 0.7}) {
      write(
          [&](leaves const& of) {
            return std::make_unique<chevron::fused_sgd>(of.values, optim::SGDOptions(0.05).momentum(momentum).weight_decay(0.1));
          },
          dtype);
    }
  }
  std::vector<char> const bytes = torch::pickle_save(c10::ivalue::Tuple::create(written));
  std::ofstream(file, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

TEST_CASE("every schedule learns with a fused optimizer as the model in one piece does with the same class") {
  chevron::optimizer_factory const factories[]{
      chevron::optimizer<chevron::fused_adamw>(optim::AdamWOptions(0.01).weight_decay(0.1).amsgrad(true)),
      chevron::optimizer<chevron::fused_sgd>(optim::SGDOptions(0.1).momentum(0.9).nesterov(true))};
  for (char const* name : {"1F1B", "ZBVZeroBubble"}) {
    for (auto const& make : factories) {
      CAPTURE(name);
      auto const plan = plan_of(name, 2, 3);
      auto const program = chevron::lower(chevron::prove(plan));
      whole_training const whole(plan, make_batch(7, 5), make, 3);
      for (over const which : {over::threads, over::gloo}) {
        complaints wrong;
        check_all_well(rank_ends::run(which, 2, 1, [&](transport& comm) { whole.compare(comm, program, wrong); }));
        for (auto const& w : wrong.all) FAIL_CHECK(w);
      }
    }
  }
}

TEST_CASE("replicas that step the same stage with two classes of AdamW are refused, with both names") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 1, 2)));
  auto const done = rank_ends::run(over::threads, 1, 2, [&](transport& comm) {
    optim::AdamWOptions const options(0.01);
    chevron::trainer train(small_model::setup(program, comm, build_stage, {},
                                              comm.topology().replica() == 0
                                                  ? chevron::optimizer<optim::AdamW>(options)
                                                  : chevron::optimizer<chevron::fused_adamw>(options)));
  });
  check_all_say(done, "fused_adamw");
}

TEST_CASE("what a fused kernel cannot walk through is refused with the remedy") {
  auto const step = [](at::Tensor value, at::Tensor gradient) {
    value.requires_grad_();
    value.mutable_grad() = std::move(gradient);
    chevron::fused_sgd({value}, optim::SGDOptions(0.1)).step();
  };
  CHECK_THROWS_WITH_AS(
      step(at::ones({3}), at::ones({3}).to_sparse()),
      "fused_sgd steps real parameters that fill their memory, with gradients of the same dtype: of a parameter [3] of "
      "Float the gradient is sparse. Remedy: the torch::optim class of that name, or another parameter",
      chevron::usage_error);
  CHECK_THROWS_AS(step(at::ones({3}, at::kComplexFloat), at::ones({3}, at::kComplexFloat)), chevron::usage_error);
  for (at::ScalarType const half : {at::kHalf, at::kBFloat16}) {
    CHECK_THROWS_WITH_AS(step(at::ones({40}, half), at::ones({40}, half)),
                         doctest::Contains("on the CPU as they are. Remedy: torch::optim::SGD"), chevron::usage_error);
  }
  CHECK_THROWS_AS(step(at::ones({3, 4}).slice(1, 0, 2), at::ones({3, 2})), chevron::usage_error);
}
