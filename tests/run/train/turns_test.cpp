// timeout: 120
// Trainers and evaluators that take turns on one transport.
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/plan/forward_part.hpp>
#include <chevron/run.hpp>

#include "support/contract_subjects.hpp"
#include "support/small_model.hpp"

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// A model with stages of other widths between them than another's.
struct model {
  chevron::proved_program program;
  int seed, inner;
  bool two_tensors;  // between stages

  chevron::stage_builder builder() const {
    return [*this](int number) -> chevron::stage {
      at::manual_seed(static_cast<std::uint64_t>(seed + number));
      bool const first = number == 0, last = number + 1 == program.view().plan.stages;
      torch::nn::Linear layer(first ? width : inner, last ? width : inner);
      if (!two_tensors) return torch::nn::Sequential(layer, torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }));
      return chevron::stage(layer, [layer, last](std::span<at::Tensor const> all) mutable -> chevron::tensors {
        at::Tensor const x = all.size() == 1 ? all[0] : all[0] * all[1];
        at::Tensor const y = layer(x);
        if (last) return {y};
        return {y.tanh(), y.cos()};
      });
    };
  }
  chevron::trainer_setup setup(transport& comm, chevron::trainer_options options = {}) const {
    return {
        .program = program, .transport = comm, .stages = builder(), .loss = mean_square, .optimizer = adamw, .options = options};
  }
};

chevron::proved_program program_of(char const* name, int ranks, int micro_batches) {
  return chevron::lower(chevron::prove(plan_of(name, ranks, micro_batches)));
}

/// Generator and discriminator: other schedules, microbatches, widths and numbers of tensors.
std::vector<model> two_models(char const* one, char const* other) {
  return {{program_of(one, 2, 4), 0, 6, false}, {program_of(other, 2, 3), 50, 24, true}};
}

/// Reports of a trainer, settled, and its rank's parameters at the end, as text that shows every bit.
struct record {
  std::string text;
  void add(double value) {
    char line[40];
    std::snprintf(line, sizeof line, "%a\n", value);
    text += line;
  }
  void add(chevron::trainer& train) {
    for (chevron::stage const& s : train.stages()) {
      for (auto const& p : s.parameters()) text += std::to_string(chevron::fingerprint(p.value)) + "\n";
    }
  }
};

constexpr int steps = 4;
small_model::batch data_of(std::size_t which, int step, int replica) {
  return make_batch(12 + step / 2, 100 * static_cast<int>(which) + 10 * step + replica);
}

/// The results of each model on this rank; models with `active[i]` train in turn in each step.
std::vector<record> in_turn(transport& comm, std::vector<model> const& models, std::vector<bool> const& active,
                            chevron::trainer_options const& options) {
  std::vector<record> out(models.size());
  std::vector<std::unique_ptr<chevron::trainer>> trainers(models.size());
  std::vector<std::unique_ptr<chevron::evaluator>> evaluators(models.size());
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (!active[i]) continue;
    chevron::trainer_options mine = options;
    mine.on_report = [&out, i](chevron::step_report const& r) { out[i].add(r.loss), out[i].add(r.grad_norm); };
    trainers[i] = std::make_unique<chevron::trainer>(models[i].setup(comm, mine));
    evaluators[i] = std::make_unique<chevron::evaluator>(*trainers[i]);
  }
  for (int step = 0; step < steps; ++step) {
    for (std::size_t i = 0; i < models.size(); ++i) {
      auto const data = data_of(i, step, comm.topology().replica());
      if (active[i]) trainers[i]->step(data.input, data.target);
      if (active[i] && i == 0 && step == 1) out[i].add(evaluators[i]->loss(data.input, data.target));
    }
    if (active[0] && step == 2) {  // between a step of the other model and its next
      auto const held_out = data_of(0, 9, comm.topology().replica());
      out[0].add(evaluators[0]->loss(held_out.input, held_out.target));
    }
  }
  for (std::size_t i = 0; i < models.size(); ++i) {
    if (!active[i]) continue;
    trainers[i]->synchronize();
    out[i].add(*trainers[i]);
  }
  return out;
}

/// Each model beside the other, on this transport, is each model alone on threads.
void compare_turns(transport_contract::subject const& over, std::vector<model> const& models, int replicas,
                   chevron::trainer_options const& options) {
  auto const world = static_cast<std::size_t>(2 * replicas);
  std::vector<std::vector<record>> alone(world, std::vector<record>(models.size())), together(world);
  for (std::size_t i = 0; i < models.size(); ++i) {
    chevron::run_threads({.pipeline_ranks = 2, .replicas = replicas}, [&](transport& comm) {
      std::vector<bool> only(models.size(), false);
      only[i] = true;
      alone[static_cast<std::size_t>(comm.topology().global_rank)][i] = in_turn(comm, models, only, options)[i];
    });
  }
  for (auto const& each : over.run(2, replicas, [&](transport& comm) {
         together[static_cast<std::size_t>(comm.topology().global_rank)] =
             in_turn(comm, models, std::vector<bool>(models.size(), true), options);
       }))
    CHECK(each.text == "");
  for (std::size_t r = 0; r < world; ++r) {
    REQUIRE(together[r].size() == models.size());
    for (std::size_t i = 0; i < models.size(); ++i) {
      INFO("replicas " << replicas << ", rank " << r << ", model " << i);
      CHECK(together[r][i].text == alone[r][i].text);
      CHECK(alone[r][i].text.size() > 100);
    }
  }
}

}  // namespace

TEST_CASE("two trainers and an evaluator take turns on one transport, and each computes what it computes alone") {
  transport_contract::for_each_transport([](transport_contract::subject const& over) {
    compare_turns(over, two_models("ZB-H1", "ZBVZeroBubble"), 1, {});
    compare_turns(over, two_models("1F1B", "GPipe"), 2, {});
  });
}

TEST_CASE("a step that awaits its verdict stands before another trainer's turn") {
  transport_contract::for_each_transport([](transport_contract::subject const& over) {
    for (double const clip : {0.0, 0.05})  // 0.05: each step is done over
      compare_turns(over, two_models("ZB-H1", "1F1B"), 1, {.clip_grad_norm = clip, .post_validation = true, .stable_steps = 0});
  });
}

TEST_CASE("a trainer that goes with its last step unsettled leaves the transport to the next") {
  auto const models = two_models("ZB-H1", "1F1B");
  transport_contract::for_each_transport([&](transport_contract::subject const& over) {
    std::vector<std::vector<double>> losses(2);
    for (auto const& each : over.run(2, 1, [&](transport& comm) {
           for (int i = 0; i < 3; ++i) {
             chevron::trainer train(models[0].setup(comm, {.post_validation = true, .stable_steps = 0}));
             auto const data = data_of(0, 0, 0);
             train.step(data.input, data.target);
             train.step(data.input, data.target);
             if (i != 2) continue;
             losses[static_cast<std::size_t>(comm.topology().global_rank)].push_back(train.synchronize().loss);
           }
         }))
      CHECK(each.text == "");
    CHECK(losses[0] == losses[1]);
    CHECK(losses[0].size() == 1);
  });
}

TEST_CASE("ranks that call models in another order are told before a parameter changes, where shapes do not show it") {
  model const one = two_models("1F1B", "1F1B")[0];
  transport_contract::for_each_transport([&](transport_contract::subject const& over) {
    complaints wrong;
    for (auto const& each : over.run(2, 1, [&](transport& comm) {
           chevron::trainer first(one.setup(comm)), second(one.setup(comm));
           auto const data = data_of(0, 0, 0);
           bool const turned = comm.topology().global_rank == 1;
           auto const before = first.stages()[turned ? 1 : 0].parameters()[0].value.clone();
           try {
             (turned ? second : first).step(data.input, data.target);
           } catch (chevron::error const&) {
             for (auto* const train : {&first, &second})
               wrong.require(at::equal(train->stages()[turned ? 1 : 0].parameters()[0].value, before), "a parameter was changed");
             throw;
           }
         }))
      CHECK(each.text.find("has called another trainer or evaluator than rank ") != std::string::npos);
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  });
}

TEST_CASE("a model that is only evaluated: a teacher's outputs are targets of another trainer's steps") {
  auto const models = two_models("ZB-H1", "1F1B");
  auto const& student = models[0];
  auto const& teacher = models[1];
  int const stages = teacher.program.view().plan.stages;
  // The teacher in one piece, frozen.
  std::vector<chevron::stage> whole;
  for (int s = 0; s < stages; ++s) whole.push_back(teacher.builder()(s));
  auto const data = make_batch(12, 3);
  tensors values{data.input}, next;
  {
    at::NoGradGuard const off;
    for (auto& s : whole) {
      s.forward(values, next);
      values = std::exchange(next, {});
    }
  }
  transport_contract::for_each_transport([&](transport_contract::subject const& over) {
    complaints wrong;
    for (auto const& each : over.run(2, 1, [&](transport& comm) {
           auto const frozen = [&](int s) {
             chevron::stage made = teacher.builder()(s);
             for (auto& p : made.parameters()) p.value.set_requires_grad(false);
             return made;
           };
           chevron::trainer train(student.setup(comm));
           chevron::evaluator said({.program = teacher.program, .transport = comm, .stages = frozen, .loss = mean_square});
           chevron::evaluator silent({.program = chevron::lower(chevron::prove(chevron::forward_part(teacher.program.view(), 2))),
                                      .transport = comm,
                                      .stages = frozen});
           for (int step = 0; step < 3; ++step) {
             auto const outputs = said.outputs(data.input);
             wrong.require(outputs.empty() == !said.stages().back(), "outputs where the last stage is");
             if (!outputs.empty()) wrong.require(at::allclose(outputs[0], values[0]), "outputs");
             train.step({data.input}, outputs);  // on the rank of the last stage, as the loss
             wrong.require(said.loss(data.input, values[0]) < 1e-12, "loss");
             for (chevron::stage const& s : said.stages()) {
               for (auto const& p : s.parameters()) wrong.require(!p.value.grad().defined(), "no gradients");
             }
           }
           auto const fewer = silent.outputs(data.input);
           if (!fewer.empty()) wrong.require(at::allclose(fewer[0], values[0]), "a program of forwards");
           try {
             silent.loss(data.input, data.target);
             wrong.require(false, "a loss without a loss function");
           } catch (chevron::usage_error const& e) {
             wrong.require(std::string(e.what()).find("has no loss function. Remedy: evaluator_setup::loss") != std::string::npos,
                           e.what());
           }
         }))
      CHECK(each.text == "");
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  });
}

TEST_CASE("a model that is only evaluated is compared over the ranks, and needs a program for them") {
  auto const teacher = two_models("ZB-H1", "1F1B")[1];
  auto const run = [&](int replicas, int ranks, chevron::stage_builder const& build) {
    chevron::run_threads({.pipeline_ranks = ranks, .replicas = replicas}, [&](transport& comm) {
      chevron::evaluator const refused({.program = teacher.program, .transport = comm, .stages = [&](int s) {
                                          chevron::stage made = build(s);
                                          at::NoGradGuard const off;
                                          if (comm.topology().replica() == 1) made.parameters()[0].value.add_(1);
                                          return made;
                                        }});
    });
  };
  CHECK_THROWS_WITH_AS(run(2, 2, teacher.builder()), doctest::Contains("has `values of stage "), chevron::preflight_error);
  CHECK_THROWS_WITH_AS(run(1, 3, teacher.builder()), doctest::Contains("the program is for 2 pipeline ranks, there are 3"),
                       chevron::usage_error);
}
