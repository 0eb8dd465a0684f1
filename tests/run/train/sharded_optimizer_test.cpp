// timeout: 400
// A sharded optimizer against one that is not sharded: the same bits of everything, and a share of the state's bytes.
#include "support/file_content.hpp"
#include "support/own_optimizer.hpp"
#include "support/scratch_folder.hpp"
#include "support/sharded_training.hpp"
#include "support/thread_ranks.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>

#include <chevron/transports/gloo/gloo_transport.hpp>

#include <doctest/doctest.h>

using namespace sharded_training;

namespace {

std::map<std::string, chevron::optimizer_factory> const optimizers{
    {"AdamW", chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1).amsgrad(true))},
    {"Adam", chevron::optimizer<torch::optim::Adam>(torch::optim::AdamOptions(1e-2))},
    {"SGD", chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9).nesterov(true))},
    {"RMSprop", chevron::optimizer<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3).centered(true).momentum(0.5))},
    {"Adagrad", chevron::optimizer<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2).initial_accumulator_value(0.1))},
    {"fused AdamW", chevron::optimizer<chevron::fused_adamw>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1))},
    {"fused SGD", chevron::optimizer<chevron::fused_sgd>(torch::optim::SGDOptions(1e-2).momentum(0.9))}};

}  // namespace

TEST_CASE("50 steps of six schedules over 1 to 4 replicas, some of them clipped: every bit as without shares") {
  check_fifty_steps(chevron::sharding::optimizer);
}

TEST_CASE("every optimizer that checkpoints know, and one that they do not, whose parameters are cut only if it is element-wise") {
  at::set_num_threads(1);
  for (auto const& [name, make] : optimizers) {
    CAPTURE(name);
    check_same_as_unsharded({.replicas = 3, .make = make});
  }
  chevron::optimizer_factory const own = [](std::vector<at::Tensor> all) {
    return std::make_unique<own_optimizer>(std::move(all), torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  check_same_as_unsharded({.replicas = 3, .make = own});
  check_same_as_unsharded({.replicas = 3, .make = chevron::element_wise(own)});  // its parameters are cut
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
      demanding const all({.schedule = "ZB-H1", .replicas = replicas, .steps = 10}, post_validation);
      for (setting const& one : {all.tied, all.skipped, all.accumulated}) check_same_as_unsharded(one);
      setting one = all.clipped;
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
        // Of 8,174 elements each end of a share is at most half a block of 1,024 off, and less than an element where R does not
        // divide 8,174.
        CHECK(std::abs(static_cast<double>(bytes) - static_cast<double>(whole[stage].state_bytes) / replicas) <= 2 * 4 * 1025.);
        sum += bytes;
      }
      CHECK(sum == whole[stage].state_bytes);
    }
  }
}

TEST_CASE("a large stage: the state that a replica is measured to hold is within 2 % of an equal share") {
  at::set_num_threads(1);
  for (int const replicas : {2, 3, 4}) {
    CAPTURE(replicas);
    setting what{.replicas = replicas, .steps = 1};
    what.build = [](int number) {
      constexpr int large = 512;
      at::manual_seed(800 + number);
      auto const bounded = [](at::Tensor const& x) { return x.tanh(); };
      return torch::nn::Sequential(torch::nn::Linear(wide, large), torch::nn::Functional(bounded),
                                   torch::nn::Linear(large, large), torch::nn::Functional(bounded),
                                   torch::nn::Linear(large, large), torch::nn::Linear(large, wide));
    };
    auto const whole = on_threads(what), shares = on_threads(sharded(what));
    for (std::size_t stage : {0u, 1u}) {
      CHECK(whole[stage].measured_state == 8 * (2 * 512 * 512 + 2 * 512 * wide + 3 * 512 + wide));
      double const equal = static_cast<double>(whole[stage].measured_state) / replicas;
      std::int64_t sum = 0;
      for (int replica = 0; replica < replicas; ++replica) {
        auto const& share = shares[stage + 2 * static_cast<std::size_t>(replica)];
        CHECK(std::abs(static_cast<double>(share.measured_state) - equal) <= 0.02 * equal);
        CHECK(share.measured_state == share.state_bytes);
        sum += share.measured_state;
      }
      CHECK(sum == whole[stage].measured_state);
    }
  }
}

TEST_CASE("each share begins where a parameter or a block of one does, next to an equal cut") {
  for (std::vector<std::int64_t> const& sizes : std::vector<std::vector<std::int64_t>>{
           {100, 1, 1, 98, 50, 50}, {1, 1, 1, 1000, 1, 1}, {7}, {0, 5, 0, 9, 0}, {3000, 41, 2500, 97, 1024, 5000}}) {
    for (bool const whole : {true, false}) {
      std::vector<std::int64_t> blocks, borders{0};
      for (std::int64_t const size : sizes) {
        blocks.push_back(whole ? std::max<std::int64_t>(size, 1) : chevron::norm_block(size));
        std::int64_t const begin = borders.back();
        for (std::int64_t at = blocks.back(); at < size; at += blocks.back()) borders.push_back(begin + at);
        borders.push_back(begin + size);
      }
      for (int const replicas : {1, 2, 3, 4, 7}) {
        CAPTURE(sizes.size());
        CAPTURE(whole);
        CAPTURE(replicas);
        auto const cut = chevron::detail::cut_into_shares(sizes, blocks, replicas);
        REQUIRE(cut.size() == static_cast<std::size_t>(replicas) + 1);
        CHECK(std::is_sorted(cut.begin(), cut.end()));
        CHECK(cut.front() == 0);
        CHECK(cut.back() == borders.back());
        for (int r = 1; r < replicas; ++r) {
          std::int64_t const at = cut[static_cast<std::size_t>(r)], equal = borders.back() * r / replicas;
          std::int64_t nearest = borders.back();
          for (std::int64_t const border : borders) nearest = std::min(nearest, std::abs(border - equal));
          CHECK(std::find(borders.begin(), borders.end(), at) != borders.end());
          CHECK(std::abs(at - equal) == nearest);
        }
      }
    }
  }
}

TEST_CASE("whole parameters go to replicas by size, not by number") {
  at::set_num_threads(1);
  std::vector<std::int64_t> const sizes{100, 1, 1, 98, 50, 50};
  setting what{.ranks = 1, .steps = 3};
  what.make = [](std::vector<at::Tensor> all) {
    return std::make_unique<own_optimizer>(std::move(all), torch::optim::SGDOptions(0.1).momentum(0.9));
  };
  what.build = [&](int) {
    std::vector<chevron::parameter> all;
    for (std::size_t i = 0; i < sizes.size(); ++i)
      all.push_back({"part " + std::to_string(i), at::full({sizes[i]}, 0.1 * static_cast<double>(i)).requires_grad_()});
    return chevron::stage(
        [all](at::Tensor x) {
          for (auto const& one : all) x = x + one.value.sin().mean();
          return x.tanh();
        },
        all);
  };
  // Of 300 elements. Where R is 2 the first border behind 102 is 200, farther from the half; where R is 4 one parameter is more
  // than an equal share.
  std::map<int, std::vector<std::int64_t>> const shares{{2, {102, 198}}, {3, {100, 100, 100}}, {4, {100, 2, 98, 100}}};
  for (auto const& [replicas, expected] : shares) {
    CAPTURE(replicas);
    what.replicas = replicas;
    auto const whole = on_threads(what), got = on_threads(sharded(what));
    check_same(whole, got);
    CHECK(whole[0].stepped == 300);
    for (std::size_t r = 0; r < expected.size(); ++r) CHECK(got[r].stepped == expected[r]);
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
      // A share ends where a block does, at most a block from an equal cut.
      CHECK(std::abs(share - equal) <= (replicas <= 4 ? 0.02 * equal : static_cast<double>(chevron::norm_block(sizes[0]))));
    }
  }
}

TEST_CASE("over Gloo, in shared memory and without: as on threads") {
  at::set_num_threads(1);
  for (auto const& [is_near, replicas] : std::vector<std::pair<bool, int>>{{true, 2}, {true, 3}, {false, 2}}) {
    CAPTURE(is_near);
    CAPTURE(replicas);
    setting what{.schedule = "ZB-H1", .replicas = replicas, .steps = 12};
    what.options.clip_grad_norm = 0.35;
    std::vector<outcome> got(static_cast<std::size_t>(what.ranks * what.replicas));
    auto const said = thread_ranks::said(
        thread_ranks::run(what.ranks, what.replicas, [&](chevron::topology const& where, auto const& store, auto const& watch) {
          chevron::gloo_transport comm(where, store, watch, {.shared_memory = is_near});
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
  char const* const names[] = {"AdamW", "SGD", "Adagrad"};
  for (int which = 0; which < 3; ++which) {
    char const* const name = names[which];
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
        if ((from + to) % 3 != which) continue;  // the optimizers share these pairs; each meets each number of replicas
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
