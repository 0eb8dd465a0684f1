// timeout: 400
// A sharded optimizer against one that is not sharded: the same bits of everything, and a share of the state's bytes.
#include "support/file_content.hpp"
#include "support/own_optimizer.hpp"
#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"
#include "support/thread_ranks.hpp"

#include <filesystem>
#include <limits>
#include <map>
#include <optional>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>

#include <chevron/run/checkpoint/checkpoint.hpp>
#include <chevron/run/comm/gloo/gloo_transport.hpp>

#include <doctest/doctest.h>

using namespace small_model;
namespace fs = std::filesystem;

namespace {

constexpr int wide = 40, inner = 96;

/// Parameters that hold several blocks of the norm, and some that hold a part of one.
chevron::stage build_wide_stage(int number, at::ScalarType dtype = at::kFloat) {
  at::manual_seed(500 + number);
  torch::nn::Sequential made(torch::nn::LayerNorm(torch::nn::LayerNormOptions({wide})), torch::nn::Linear(wide, inner),
                             torch::nn::Dropout(0.1), torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }),
                             torch::nn::Linear(inner, wide));
  for (auto& p : made->parameters()) p.set_data(p.to(dtype));
  return made;
}

struct setting {
  std::string schedule = "1F1B";
  int ranks = 2, replicas = 2, micro_batches = 4, steps = 6;
  chevron::optimizer_factory make = chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
  chevron::trainer_options options = {};
  at::ScalarType dtype = at::kFloat;
  bool tied = false;
  int passes = 1;                              // batches accumulated in a step
  int spoiled_step = -1;                       // an input that is no number
  std::optional<fs::path> from = {}, to = {};  // checkpoints
};

struct outcome {
  std::vector<chevron::step_report> reports;
  tensors values;  // all parameters of the rank
  std::int64_t state_bytes = 0;
};

outcome train_on(transport& comm, setting const& what) {
  outcome out;
  auto options = what.options;
  options.on_report = [&](chevron::step_report const& report) { out.reports.push_back(report); };
  auto const program = chevron::lower(chevron::prove(plan_of(what.schedule.c_str(), what.ranks, what.micro_batches)));
  int const last = program.view().plan.stages - 1;
  auto const build = [&](int s) {
    chevron::stage made = build_wide_stage(s, what.dtype);
    return what.tied && (s == 0 || s == last) ? made.tie("1.weight", "table") : made;
  };
  auto const loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y.to(at::kFloat), target); };
  chevron::trainer train(
      {.program = program, .transport = comm, .stages = build, .loss = loss, .optimizer = what.make, .options = options});
  if (what.from) chevron::load_checkpoint(train, *what.from);
  for (long const first = train.next_step(); train.next_step() < first + what.steps;) {
    auto const generator =
        at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(100 * train.next_step() + comm.topology().replica()));
    std::int64_t const samples = 2 * what.micro_batches;
    auto const total = static_cast<double>(samples * what.passes * what.replicas);
    for (int pass = 0; pass < what.passes; ++pass) {
      at::Tensor input = at::randn({samples, wide}, generator);
      at::Tensor const target = at::randn({samples, wide}, generator);
      if (train.next_step() == what.spoiled_step) input[0][0] = std::numeric_limits<float>::quiet_NaN();
      input = input.to(what.dtype);
      if (pass + 1 < what.passes) {
        train.accumulate({input}, {target}, total);
      } else {
        train.step({input}, {target}, what.passes > 1 ? chevron::step_total{total} : chevron::step_total{});
      }
    }
  }
  train.synchronize();
  for (auto& s : train.stages()) {
    for (auto& p : s.parameters()) out.values.push_back(p.value.detach().clone());
  }
  if (train.optimizer() != nullptr && !chevron::kind_of(*train.optimizer()).empty()) {
    for (auto& [key, state] : train.optimizer()->state()) {
      for (at::Tensor const& t : chevron::tensors_of(*state))
        out.state_bytes += t.defined() ? static_cast<std::int64_t>(t.nbytes()) : 0;
    }
  }
  if (what.to) chevron::save_checkpoint(train, *what.to);
  return out;
}

std::vector<outcome> on_threads(setting const& what) {
  std::vector<outcome> all(static_cast<std::size_t>(what.ranks * what.replicas));
  chevron::run_threads({.pipeline_ranks = what.ranks, .replicas = what.replicas}, [&](transport& comm) {
    all[static_cast<std::size_t>(comm.topology().global_rank)] = train_on(comm, what);
  });
  return all;
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

void check_same(std::vector<outcome> const& expected, std::vector<outcome> const& got) {
  REQUIRE(expected.size() == got.size());
  for (std::size_t r = 0; r < expected.size(); ++r) {
    CAPTURE(r);
    REQUIRE(expected[r].reports.size() == got[r].reports.size());
    for (std::size_t k = 0; k < expected[r].reports.size(); ++k) {
      auto const &a = expected[r].reports[k], &b = got[r].reports[k];
      CAPTURE(k);
      CHECK(same(a.loss, b.loss));
      CHECK(same(a.grad_norm, b.grad_norm));
      CHECK(a.skipped == b.skipped);
      CHECK(a.clipped == b.clipped);
      CHECK(a.loss_factor == b.loss_factor);
    }
    REQUIRE(expected[r].values.size() == got[r].values.size());
    int different = 0;
    for (std::size_t i = 0; i < expected[r].values.size(); ++i)
      different += expected[r].values[i].equal(got[r].values[i]) ? 0 : 1;
    CHECK(different == 0);
  }
}

setting sharded(setting what) {
  what.options.shard = chevron::sharding::optimizer;
  return what;
}

void check_same_as_unsharded(setting const& what) {
  CAPTURE(what.schedule);
  CAPTURE(what.replicas);
  check_same(on_threads(what), on_threads(sharded(what)));
}

std::map<std::string, chevron::optimizer_factory> const optimizers{
    {"AdamW", chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(true))},
    {"Adam", chevron::optimizer<torch::optim::Adam>(torch::optim::AdamOptions(1e-2))},
    {"SGD", chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true))},
    {"RMSprop", chevron::optimizer<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3).centered(true).momentum(0.5))},
    {"Adagrad", chevron::optimizer<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2).initial_accumulator_value(0.1))},
    {"fused AdamW", chevron::optimizer<chevron::fused_adamw>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1))},
    {"fused SGD", chevron::optimizer<chevron::fused_sgd>(torch::optim::SGDOptions(1e-2).momentum(0.9))}};

}  // namespace

TEST_CASE("50 steps of five schedules over 1 to 4 replicas, some of them clipped: every bit as without shares") {
  at::set_num_threads(1);
  for (char const* const schedule : {"GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble"}) {
    for (int const replicas : {1, 2, 3, 4}) {
      setting what{.schedule = schedule, .replicas = replicas, .steps = replicas == 3 ? 50 : 12};
      what.options.clip_grad_norm = 0.35;
      check_same_as_unsharded(what);
    }
  }
}

TEST_CASE("every optimizer that checkpoints know, and one that they do not, whose parameters are not cut") {
  at::set_num_threads(1);
  for (auto const& [name, make] : optimizers) {
    CAPTURE(name);
    check_same_as_unsharded({.replicas = 3, .make = make});
  }
  check_same_as_unsharded({.replicas = 3, .make = [](std::vector<at::Tensor> all) {
                             return std::make_unique<own_optimizer>(std::move(all), torch::optim::SGDOptions(0.1).momentum(0.9));
                           }});
}

TEST_CASE("groups of parameters by their shapes: the factory sees whole parameters") {
  at::set_num_threads(1);
  setting what{.replicas = 3};
  what.make = [](std::vector<chevron::named_parameter> const& all) {
    std::vector<at::Tensor> decays, stays;
    for (auto const& p : all) (p.value.dim() > 1 ? decays : stays).push_back(p.value);
    auto const options = torch::optim::AdamWOptions(1e-2);
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::move(decays),
                        std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(options).weight_decay(0.5)));
    groups.emplace_back(std::move(stays),
                        std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(options).weight_decay(0)));
    return std::make_unique<torch::optim::AdamW>(std::move(groups), options);
  };
  check_same_as_unsharded(what);
}

TEST_CASE("tied parameters, loss scaling, skipped steps, accumulated batches, half precision, post-validation") {
  at::set_num_threads(1);
  for (bool const post_validation : {false, true}) {
    for (int const replicas : {2, 3}) {
      CAPTURE(post_validation);
      setting what{.schedule = "ZB-H1", .replicas = replicas, .steps = 10};
      what.options.post_validation = post_validation;
      what.options.stable_steps = 1;
      what.options.clip_grad_norm = 0.36;
      what.options.check_copies = 2;
      auto one = what;
      one.tied = true;
      check_same_as_unsharded(one);
      one = what;
      one.spoiled_step = 5;
      one.options.when_not_finite = chevron::not_finite::skip;
      one.options.scaling = chevron::loss_scaling{.initial = 1024, .growth_interval = 3};
      check_same_as_unsharded(one);
      one = what;
      one.passes = 2;
      check_same_as_unsharded(one);
      one = what;
      one.dtype = at::kBFloat16;
      check_same_as_unsharded(one);
      one.options.bucket_bytes = 3000;
      one.dtype = at::kFloat;
      check_same_as_unsharded(one);
    }
  }
}

TEST_CASE("a step that is refused leaves the parameters of all replicas as they were") {
  at::set_num_threads(1);
  for (bool const post_validation : {false, true}) {
    for (bool const shares : {false, true}) {
      setting what{.replicas = 3, .steps = 4, .spoiled_step = 4};
      what.options.post_validation = post_validation;
      what.options.stable_steps = 0;
      if (shares) what = sharded(what);
      auto const before = on_threads(what);
      what.steps = 5;
      std::vector<tensors> left(before.size());
      std::atomic<int> refused{0};
      try {
        chevron::run_threads({.pipeline_ranks = what.ranks, .replicas = what.replicas}, [&](transport& comm) {
          auto seen = what;
          auto& mine = left[static_cast<std::size_t>(comm.topology().global_rank)];
          tensors held;
          seen.make = [&](std::vector<at::Tensor> all) {
            held = all;
            return what.make(all);
          };
          try {
            train_on(comm, seen);
          } catch (chevron::numerical_error const&) {
            for (at::Tensor const& t : held) mine.push_back(t.detach().clone());
            ++refused;
            throw;
          }
        });
      } catch (chevron::numerical_error const&) {
      }
      CHECK(refused == static_cast<int>(before.size()));
      for (std::size_t r = 0; r < before.size(); ++r) {
        REQUIRE(left[r].size() == before[r].values.size());
        for (std::size_t i = 0; i < left[r].size(); ++i) CHECK(left[r][i].equal(before[r].values[i]));
      }
    }
  }
}

TEST_CASE("a replica holds its share of the state's bytes, and all shares are the whole") {
  at::set_num_threads(1);
  for (int const replicas : {2, 3, 4}) {
    setting what{.replicas = replicas, .steps = 1};
    auto const whole = on_threads(what), shares = on_threads(sharded(what));
    for (std::size_t stage : {0u, 1u}) {
      std::int64_t sum = 0;
      for (int replica = 0; replica < replicas; ++replica) {
        auto const bytes = shares[stage + 2 * static_cast<std::size_t>(replica)].state_bytes;
        // Of 7,856 elements a cut is at most half a block of 1,024 off.
        CHECK(std::abs(static_cast<double>(bytes) - static_cast<double>(whole[stage].state_bytes) / replicas) <= 2 * 4 * 1024.);
        sum += bytes;
      }
      CHECK(sum == whole[stage].state_bytes);
    }
  }
}

TEST_CASE("large parameters: shares of the state within 2 % of equal ones") {
  std::vector<std::int64_t> sizes{50257 * 64, 64 * 256, 64, 256 * 64, 256, 300}, blocks;
  std::int64_t total = 0;
  for (std::int64_t const size : sizes) {
    blocks.push_back(chevron::norm_block(size));
    total += size;
  }
  for (int const replicas : {1, 2, 3, 4, 7, 64}) {
    auto const cut = chevron::detail::cut_into_shares(sizes, blocks, replicas);
    REQUIRE(cut.size() == static_cast<std::size_t>(replicas) + 1);
    CHECK(cut.front() == 0);
    CHECK(cut.back() == total);
    for (std::size_t r = 0; r + 1 < cut.size(); ++r) {
      double const share = static_cast<double>(cut[r + 1] - cut[r]), equal = static_cast<double>(total) / replicas;
      if (replicas <= 4) CHECK(std::abs(share - equal) <= 0.02 * equal);
      CHECK(share >= 0);
    }
  }
}

TEST_CASE("over Gloo, in shared memory and without: as on threads") {
  at::set_num_threads(1);
  for (bool const near : {true, false}) {
    setting what{.schedule = "ZB-H1", .replicas = near ? 3 : 2};
    what.options.clip_grad_norm = 0.35;
    std::vector<outcome> got(static_cast<std::size_t>(what.ranks * what.replicas));
    auto const said = thread_ranks::said(
        thread_ranks::run(what.ranks, what.replicas, [&](chevron::topology const& where, auto const& store, auto const& watch) {
          chevron::gloo_transport comm(where, store, watch, {.shared_memory = near});
          comm.deadline(std::chrono::seconds(60));
          got[static_cast<std::size_t>(where.global_rank)] = train_on(comm, sharded(what));
          comm.close();
        }));
    for (auto const& each : said) CHECK(each == "");
    check_same(on_threads(what), got);
  }
}

TEST_CASE("a checkpoint holds no trace of the cut: the same bytes, and training goes on over any number of replicas") {
  at::set_num_threads(1);
  scratch_folder const place;
  for (char const* const name : {"AdamW", "SGD", "Adagrad"}) {
    CAPTURE(name);
    for (int const replicas : {1, 2, 3, 4}) {
      for (bool const shares : {false, true}) {
        setting what{.replicas = replicas, .steps = 3, .make = optimizers.at(name)};
        what.to = place.path / (std::string(name) + std::to_string(replicas) + (shares ? "s" : "w"));
        on_threads(shares ? sharded(what) : what);
      }
      fs::path const folder = place.path / (name + std::to_string(replicas));
      for (char const* const file : {"model-0", "optimizer-0", "model-1", "optimizer-1"}) {
        auto const in = [&](char const* which) {
          return content_of(fs::path(folder.string() + which) / "step-00000003" / (std::string(file) + ".safetensors"));
        };
        CHECK(in("s") == in("w"));
      }
    }
    for (int const from : {1, 2, 3, 4}) {
      for (int const to : {1, 2, 3, 4}) {
        CAPTURE(from);
        setting what{.replicas = to, .steps = 2, .make = optimizers.at(name)};
        what.from = place.path / (std::string(name) + std::to_string(from) + "s");
        check_same_as_unsharded(what);
      }
    }
  }
}

TEST_CASE("a factory that leaves parameters out, and adds a tensor of its own") {
  at::set_num_threads(1);
  scratch_folder const place;
  setting what{.replicas = 3, .steps = 3};
  what.make = [](std::vector<chevron::named_parameter> const& all) {
    std::vector<at::Tensor> stepped{at::zeros({3}).requires_grad_()};
    for (auto const& p : all) {
      if (p.name.ends_with("weight")) stepped.push_back(p.value);
    }
    return std::make_unique<torch::optim::AdamW>(std::move(stepped), torch::optim::AdamWOptions(1e-2));
  };
  check_same_as_unsharded(what);
  what.to = place.path / "whole";
  on_threads(what);
  what.to = place.path / "shares";
  on_threads(sharded(what));
  for (char const* const file : {"optimizer-0.safetensors", "optimizer-1.safetensors"}) {
    auto const in = [&](char const* folder) { return content_of(place.path / folder / "step-00000003" / file); };
    CHECK(!in("whole").empty());
    CHECK(in("whole") == in("shares"));
  }
}

TEST_CASE("refused, with the remedy: a step that needs whole gradients, LBFGS, saving a state that is not known") {
  setting what = sharded({});
  what.options.before_optimizer_step = [](chevron::final_gradients const&) {};
  CHECK_THROWS_WITH_AS(on_threads(what), doctest::Contains("before_optimizer_step does not go with a sharded optimizer"),
                       chevron::usage_error);
  what = sharded({});
  what.make = chevron::optimizer<torch::optim::LBFGS>(torch::optim::LBFGSOptions(1));
  CHECK_THROWS_WITH_AS(on_threads(what), doctest::Contains("LBFGS wants the gradient several times"), chevron::usage_error);
  scratch_folder const place;
  what = sharded({.steps = 1, .make = [](std::vector<at::Tensor> all) {
                    return std::make_unique<own_optimizer>(std::move(all), torch::optim::SGDOptions(0.1));
                  }});
  what.to = place.path;
  CHECK_THROWS_WITH_AS(on_threads(what), doctest::Contains("can neither be saved nor loaded"), chevron::error);
}
