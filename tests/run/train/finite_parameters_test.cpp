// Parameters that a step with finite gradients makes infinite or NaN: named before a save, where a loss is no number, and in every
// n-th step.

#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

#include <limits>

#include <chevron/checkpoint.hpp>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// A parameter that no loss depends on: with eps 0 AdamW divides 0 by 0.
struct with_unused : torch::nn::Module {
  torch::nn::Linear used{nullptr};
  at::Tensor unused;
  explicit with_unused(int s, at::ScalarType dtype) {
    at::manual_seed(s);
    used = register_module("used" + std::to_string(s), torch::nn::Linear(width, width));
    if (s == 1) unused = register_parameter("unused1", at::ones({2}));
    to(dtype);
  }
  at::Tensor forward(at::Tensor x) { return used(x); }
};

struct setting {
  chevron::optimizer_factory make = chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2).eps(0));
  chevron::trainer_options options = {};
  int steps = 3, replicas = 1;
  bool reads_unused = false;  // the loss is NaN where the parameter is
  at::ScalarType dtype = at::kFloat;
  std::string save_to = {};
  std::function<void(chevron::trainer&, long)> after = {};
};

/// \returns the message of the error that ends the run; empty if none does \param code receives its exit code
std::string ended_by(setting const& what, int& code) {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  code = 0;
  try {
    chevron::run_threads({.pipeline_ranks = 2, .replicas = what.replicas}, [&](transport& comm) {
      auto const build = [&](int s) {
        auto const made = std::make_shared<with_unused>(s, what.dtype);
        return chevron::stage(made, [made, reads = what.reads_unused](at::Tensor x) {
          return reads && made->unused.defined() ? made->forward(x) + made->unused.sum() * 0 : made->forward(x);
        });
      };
      chevron::trainer train({.program = program,
                              .transport = comm,
                              .stages = build,
                              .loss = [](at::Tensor y, at::Tensor t) { return at::mse_loss(y.to(at::kFloat), t.to(at::kFloat)); },
                              .optimizer = what.make,
                              .options = what.options});
      for (long k = 0; k < what.steps; ++k) {
        auto const data = make_batch(8, static_cast<int>(k));
        train.step(data.input.to(what.dtype), data.target.to(what.dtype));
        if (what.after) what.after(train, k);
      }
      if (!what.save_to.empty()) chevron::save_checkpoint(train, what.save_to);
    });
  } catch (chevron::error const& e) {
    code = e.code();
    return e.what();
  }
  return "";
}

constexpr char const* lost = "stage 1's unused1 on rank 1 is infinite or NaN before step";

}  // namespace

TEST_CASE("a loss that is no number because of a parameter says so, and skip does not skip for ever") {
  for (bool const post : {false, true}) {
    for (auto const then : {chevron::not_finite::stop, chevron::not_finite::skip}) {
      CAPTURE(post);
      setting what{.reads_unused = true};
      what.options.when_not_finite = then;
      what.options.post_validation = post;
      what.options.stable_steps = 0;
      int code = 0;
      std::string const said = ended_by(what, code);
      CHECK(said.find(lost + std::string(" 1: a step whose gradients were finite made it so")) != said.npos);
      CHECK(said.find("eps above 0") != said.npos);
      CHECK(code == 6);
    }
  }
}

TEST_CASE("no checkpoint is written of such parameters, and the last one stays") {
  for (auto const shard : {chevron::sharding::nothing, chevron::sharding::optimizer}) {
    scratch_folder const folder;
    setting what{.options = {.shard = shard}, .replicas = 2, .save_to = folder.path / "saved"};
    int code = 0;
    std::string const said = ended_by(what, code);
    CHECK(said.find("stage 1's unused1") != said.npos);
    CHECK(said.find("is infinite or NaN before step 3") != said.npos);
    CHECK(code == 6);
    CHECK(!std::filesystem::exists(folder.path / "saved"));
    what.make = adamw;
    CHECK(ended_by(what, code) == "");
    CHECK(std::filesystem::exists(folder.path / "saved" / "step-00000003" / "manifest.json"));
  }
}

TEST_CASE("every n-th step looks for them, where no loss depends on them") {
  int code = 0;
  setting what{.options = {.check_copies = 4}, .steps = 4};
  CHECK(ended_by(what, code) == "");
  what.steps = 5;
  CHECK(ended_by(what, code).find(lost + std::string(" 4")) != std::string::npos);
  what.options.check_copies = 0;
  CHECK(ended_by(what, code) == "");
  what.after = [](chevron::trainer& t, long k) {
    if (k == 2) t.check_finite();
  };
  CHECK(ended_by(what, code).find(lost + std::string(" 3")) != std::string::npos);
}

TEST_CASE("half precision: a float16 parameter that a finite step makes infinite, a master that float16 cannot hold, NaN in a state") {
  int code = 0;
  setting half{.make = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(6e4).weight_decay(10)),
               .steps = 3,
               .dtype = at::kHalf};
  half.options.when_not_finite = chevron::not_finite::skip;
  CHECK(ended_by(half, code).find("is infinite or NaN before step") != std::string::npos);
  CHECK(code == 6);
  half.options.master_parameters = true;
  half.make = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(1e7));
  CHECK(ended_by(half, code).find("is infinite or NaN before step") != std::string::npos);

  setting state{.make = adamw, .steps = 2};
  state.after = [](chevron::trainer& t, long k) {
    if (k != 0 || t.comm().topology().global_rank != 0) return;
    for (auto& [key, one] : t.optimizer()->state())
      static_cast<torch::optim::AdamWParamState&>(*one).exp_avg_sq().fill_(std::numeric_limits<float>::quiet_NaN());
    t.check_finite();
  };
  auto const all = [inner = state.after](chevron::trainer& t, long k) {
    if (k == 0 && t.comm().topology().global_rank != 0) t.check_finite();
    inner(t, k);
  };
  state.after = all;
  CHECK(ended_by(state, code).find("the optimizer's exp_avg_sq of stage 0's used0.") != std::string::npos);
}

TEST_CASE("gradients that are not finite are still those of this step") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 2},
                                            [&](transport& comm) {
                                              chevron::trainer train(small_model::setup(program, comm));
                                              auto const data = make_batch(8, 1);
                                              train.step(data.input * std::numeric_limits<float>::infinity(), data.target);
                                            }),
                       doctest::Contains("is not finite; no parameter was changed"), chevron::numerical_error);
}
