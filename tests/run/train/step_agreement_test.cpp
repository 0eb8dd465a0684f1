// Agreement of the ranks on a step: number of calls, learning rate, and place of a failure. And no change in between of
// parameters that may still be restored.

#include "support/rank_ends.hpp"
#include "support/small_model.hpp"

#include <array>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/schedulers/step_lr.h>

#include <doctest/doctest.h>

using namespace small_model;
using namespace rank_ends;

namespace {

std::vector<over> const both{over::threads, over::gloo};
chevron::plan const two = plan_of("1F1B", 2, 4);

void refused(chevron::trainer& train, at::Tensor const& input, at::Tensor const& target) {
  CHECK_THROWS_WITH_AS(train.step(input, target), doctest::Contains("samples"), chevron::usage_error);
}

}  // namespace

TEST_CASE("a batch that one rank alone refuses is told by the next step, on every rank") {
  for (over const which : both) {
    for (bool const later : {false, true}) {
      for (bool const accumulates : {false, true}) {
        auto const e = run(which, 2, 1, [&](transport& comm) {
          chevron::trainer train(small_model::setup(two, comm, build_stage, {.post_validation = later, .stable_steps = 0}));
          for (int step = 0; step < 4; ++step) {
            std::int64_t const samples = step == 2 && comm.topology().global_rank == 1 ? 3 : 8;  // for 4 microbatches
            auto const data = make_batch(samples, step);
            try {
              if (accumulates) train.accumulate({data.input}, {data.target}, 16);
              train.step({data.input}, {data.target}, accumulates ? 16 : 0);
            } catch (chevron::usage_error const&) {
              CHECK(samples == 3);
            }
          }
          train.synchronize();
        });
        check_all_say(e, accumulates ? "rank 0 has called step() and accumulate() 6 times, rank 1 7 times"
                                     : "rank 0 has called step() and accumulate() 3 times, rank 1 4 times");
      }
    }
  }
}

TEST_CASE("a batch that all ranks refuse changes nothing") {
  for (over const which : both) {
    std::array<double, 2> losses{};
    for (bool const with_refused : {false, true}) {
      check_all_well(run(which, 2, 1, [&](transport& comm) {
        chevron::trainer train(small_model::setup(two, comm, build_stage, {}, adamw));
        for (int step = 0; step < 3; ++step) {
          auto const small = make_batch(3, 9), data = make_batch(8, step);
          if (with_refused) refused(train, small.input, small.target);
          auto const report = train.step({data.input}, {data.target});
          if (comm.topology().global_rank == 0) losses[with_refused ? 1 : 0] = report.loss;
        }
      }));
    }
    CHECK(losses[0] == losses[1]);
  }
}

TEST_CASE("what is changed while a step may yet be undone is refused, with the remedy; after synchronize() it counts") {
  enum class what { parameter, data_pointer, state, rate };
  auto const change = [](chevron::trainer& train, what which) {
    at::NoGradGuard const off;
    if (which == what::rate) return train.optimizer()->param_groups()[0].options().set_lr(0.1);
    for (chevron::stage& s : train.stages()) {
      if (!s) continue;
      at::Tensor p = s.parameters()[2].value;
      if (which == what::parameter) p.clamp_(-0.1, 0.1);
      if (which == what::data_pointer) p.set_data(p.detach().clamp(-0.1, 0.1));
      if (which == what::state) chevron::detail::tensors_of(*train.optimizer()->state().at(p.unsafeGetTensorImpl()))[0].zero_();
    }
  };
  auto const job = [&](over const which, what changed, bool later, bool synchronizes, std::array<double, 2>& last) {
    return run(which, 2, 1, [&](transport& comm) {
      chevron::trainer train(
          {.program = chevron::lower(chevron::prove(two)),
           .transport = comm,
           .stages = build_stage,
           .loss = mean_square,
           .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.5).momentum(0.9)),
           .options = {.clip_grad_norm = changed == what::state ? 0 : 0.2, .post_validation = later, .stable_steps = 0}});
      for (int step = 0; step < 4; ++step) {
        auto const data = make_batch(8, step);
        train.step({data.input}, {data.target});
        if (synchronizes) train.synchronize();
        change(train, changed);
      }
      last[static_cast<std::size_t>(comm.topology().global_rank)] = train.synchronize().loss;
    });
  };
  for (over const which : both) {
    for (what const changed : {what::parameter, what::data_pointer, what::state}) {
      std::array<double, 2> without{}, with{};
      check_all_well(job(which, changed, false, false, without));
      check_all_well(job(which, changed, true, true, with));
      CHECK(without == with);
      auto const e = job(which, changed, true, false, with);
      for (std::size_t r = 0; r < 2; ++r) {
        CHECK(e.codes[r] == 2);
        std::string const words =
            "stage " + std::to_string(r) +
            "'s 1.weight, or the optimizer's state for this parameter, was changed after step 0. With post_validation that step "
            "may yet be undone, together with the change. Remedy: trainer.synchronize() before the change";
        CHECK_MESSAGE(e.said[r].find(words) != std::string::npos, e.said[r]);
      }
    }
    std::array<double, 2> without{}, with{};
    check_all_well(job(which, what::rate, false, false, without));  // a rate is for the step to come
    check_all_well(job(which, what::rate, true, false, with));
    CHECK(without == with);
  }
}

TEST_CASE("of gradients that are not finite the one is named that the backward came to first") {
  for (over const which : both) {
    auto const e = run(which, 3, 1, [](transport& comm) {
      auto const build = [](int s) -> chevron::stage {
        if (s != 1) return build_stage(s);
        at::manual_seed(s);
        torch::nn::Linear first(width, width), second(width, width);
        auto const root_of_zero = [=](at::Tensor x) mutable {
          at::Tensor h = first(x);
          return second(h + (h - h.detach()).abs().sqrt());
        };
        return {root_of_zero,
                {{"first", first->weight}, {"bias", first->bias}, {"second", second->weight}, {"end", second->bias}}};
      };
      chevron::trainer train(small_model::setup(plan_of("ZB-H1", 3, 4), comm, build));
      auto const data = make_batch(8, 1);
      train.step({data.input}, {data.target});
    });
    check_all_say(e,
                  "the gradient of stage 1's bias is not finite; no parameter was changed. Of the gradients that are not finite "
                  "the backward "
                  "computed this one first",
                  6);
  }
}

TEST_CASE("a microbatch all of whose labels are ignored is named beside those that are finite, with the remedy, which helps") {
  namespace F = torch::nn::functional;
  auto const job = [](over const which, bool weighs, int replicas) {
    return run(which, 2, replicas, [&](transport& comm) {
      chevron::trainer_options options;
      if (weighs) options.loss_weight = [](chevron::batch const& b) { return b.targets[0].ne(-100).sum().item<double>(); };
      chevron::trainer train(
          {.program = chevron::lower(chevron::prove(two)),
           .transport = comm,
           .stages = build_stage,
           .loss = [](at::Tensor a,
                      at::Tensor b) { return F::cross_entropy(a, b, F::CrossEntropyFuncOptions().ignore_index(-100)); },
           .optimizer = sgd,
           .options = options});
      at::Tensor labels = at::arange(8).remainder(width);
      labels.narrow(0, 2, 2).fill_(-100);
      train.step(make_batch(8, 1).input, labels);
    });
  };
  for (over const which : both) {
    for (int const replicas : {1, 2}) {
      std::string const where = replicas == 1 ? ", unlike 3 others," : " of replica 0, unlike 6 others,";
      check_all_say(
          job(which, false, replicas),
          "the loss of microbatch 1" + where +
              " is not finite; no parameter was changed. Remedy: a lower learning rate, clip_grad_norm, or "
              "not_finite::skip; where a loss is a mean over targets that count and a microbatch may have none (all of its "
              "labels ignored, say), trainer_options::loss_weight",
          6);
      check_all_well(job(which, true, replicas));
    }
  }
}

TEST_CASE("every rank reports one learning rate, also where a rank has nothing to train") {
  auto const frozen = [](int s) {
    chevron::stage made = build_stage(s);
    for (auto const& p : made.parameters()) p.value.set_requires_grad(s > 0);
    return made;
  };
  for (over const which : both) {
    for (bool const later : {false, true}) {
      for (bool const scheduled : {false, true}) {
        check_all_well(run(which, 2, 1, [&](transport& comm) {
          chevron::trainer_options options{.post_validation = later, .stable_steps = 0};
          if (scheduled) options.learning_rate = [](long step) { return 1.0 / static_cast<double>(2 + step); };
          chevron::trainer train(small_model::setup(two, comm, frozen, options));
          CHECK((train.optimizer() == nullptr) == (comm.topology().global_rank == 0));
          std::unique_ptr<torch::optim::StepLR> halves;
          if (train.optimizer() != nullptr && !scheduled)
            halves = std::make_unique<torch::optim::StepLR>(*train.optimizer(), 1, 0.5);
          auto const data = make_batch(8, 1);
          for (int step = 0; step < 3; ++step) {
            train.step({data.input}, {data.target});
            double const expected =
                scheduled ? 1.0 / static_cast<double>(2 + step) : std::array{0.1, 0.1, 0.05}.at(static_cast<std::size_t>(step));
            CHECK(train.synchronize().learning_rate == expected);
            if (halves) halves->step();  // of LibTorch's the first step keeps the rate
          }
        }));
      }
    }
  }
}
