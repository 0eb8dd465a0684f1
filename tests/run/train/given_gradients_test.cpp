// LibTorch's own calls on the gradients that a trainer hands out: zero_grad, detach_, a gradient emptied or given.

#include "support/gloo_ranks.hpp"
#include "support/small_model.hpp"

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// The losses of some steps, with a call between any two of them.
std::vector<double> losses_with(std::function<void(chevron::trainer&)> const& call, char const* name, bool gloo = false,
                                chevron::trainer_options const& options = {}) {
  auto const program = chevron::lower(chevron::prove(plan_of(name, 2, 3)));
  std::vector<double> losses;
  auto const rank = [&](transport& comm) {
    chevron::trainer train(small_model::setup(program, comm, build_stage, options, adamw));
    for (int step = 0; step < 4; ++step) {
      call(train);
      auto const b = make_batch(7, step);
      train.step(b.input, b.target);
      double const loss = train.synchronize().loss;
      if (comm.topology().global_rank == 0) losses.push_back(loss);
    }
  };
  if (gloo) {
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(2, 1, gloo_ranks::all_share, rank));
  } else {
    chevron::run_threads({.pipeline_ranks = 2}, rank);
  }
  return losses;
}

template <class Call>
void each_parameter(chevron::trainer& train, Call const& call) {
  for (auto const& s : train.stages()) {
    for (auto const& p : s.parameters()) call(p.value);
  }
}

struct named_call {
  char const* name;
  std::function<void(chevron::trainer&)> make;
};
std::vector<named_call> const calls{
    {"zero_grad()", [](chevron::trainer& t) { t.optimizer()->zero_grad(); }},
    {"zero_grad(false)", [](chevron::trainer& t) { t.optimizer()->zero_grad(false); }},
    {"detach_()",
     [](chevron::trainer& t) {
       each_parameter(t, [](at::Tensor const& p) {
         if (p.grad().defined()) p.mutable_grad().detach_();
       });
     }},
    {"reset()", [](chevron::trainer& t) { each_parameter(t, [](at::Tensor const& p) { p.mutable_grad().reset(); }); }},
    {"another one",
     [](chevron::trainer& t) { each_parameter(t, [](at::Tensor const& p) { p.mutable_grad() = at::ones_like(p); }); }}};

/// One parameter: its gradient is the mean of the samples.
chevron::stage sum_of_samples(at::Tensor const& w) {
  return {[w](at::Tensor x) { return x * w; }, {{"w", w}}};
}

}  // namespace

TEST_CASE("between steps, LibTorch's calls on gradients change nothing") {
  for (char const* name : {"1F1B", "ZBVZeroBubble"}) {
    for (bool const early : {false, true}) {
      chevron::trainer_options const options{.clip_grad_norm = 0.05, .post_validation = early, .stable_steps = 0};
      auto const expected = losses_with([](chevron::trainer&) {}, name, false, options);
      CHECK(expected.size() == 4);
      for (auto const& call : calls) {
        CAPTURE(call.name);
        CHECK(losses_with(call.make, name, false, options) == expected);
        CHECK(losses_with(call.make, name, true, options) == expected);
      }
    }
  }
}

TEST_CASE("between accumulate() and step(), they do what they do without a pipeline: what was added up is gone, or another") {
  auto const program = chevron::lower(chevron::prove(plan_of("ZB-H1", 1, 2)));
  for (bool const shared : {false, true}) {  // by two stages of the rank
    auto const gradient_after = [&](std::function<void(at::Tensor const&)> const& call) {
      at::Tensor out;
      auto const plan = chevron::lower(chevron::prove(plan_of(shared ? "ZBVZeroBubble" : "ZB-H1", 1, 2)));
      chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
        at::Tensor const w = at::full({1}, 1.).requires_grad_();
        chevron::trainer train({.program = plan,
                                .transport = comm,
                                .stages = [&](int) { return shared ? sum_of_samples(w).tie("w", "both") : sum_of_samples(w); },
                                .loss = [](at::Tensor y) { return y.mean(); },
                                .optimizer = chevron::optimizer<torch::optim::SGD>(0.),
                                .options = {.before_optimizer_step = [&](chevron::final_gradients const& g) {
                                  out = g.parameters[0].value.grad().clone();
                                }}});
        train.accumulate(chevron::batch{{at::full({2, 1}, 8.)}, {}}, 4);
        call(w);
        train.step(chevron::batch{{at::full({2, 1}, 2.)}, {}}, 4);
      });
      return out.item<double>();
    };
    double const uses = shared ? 2 : 1, first = 4 * uses, second = 1 * uses;
    CHECK(gradient_after([](at::Tensor const&) {}) == first + second);
    CHECK(gradient_after([](at::Tensor const& w) { w.mutable_grad().reset(); }) == second);
    CHECK(gradient_after([](at::Tensor const& w) { w.mutable_grad().detach_(); }) == first + second);
    CHECK(gradient_after([](at::Tensor const& w) { w.mutable_grad() = at::full({1}, 16.); }) == 16 + second);
    CHECK_THROWS_WITH_AS(gradient_after([](at::Tensor const& w) { w.mutable_grad() = at::ones({3}); }),
                         doctest::Contains("stage 0's w was given a gradient of other sizes than its own"), chevron::usage_error);
  }
}

TEST_CASE("a gradient that is emptied or replaced while a step runs is an error with stage and parameter") {
  for (bool const replaced : {false, true}) {
    auto const run = [&] {
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        at::Tensor const w = at::full({1}, 1.).requires_grad_();
        auto const hooked = [&](int s) {
          if (s == 0) return sum_of_samples(w);
          return chevron::stage{[w, replaced](at::Tensor x) {
                                  at::Tensor const y = x * w;
                                  y.register_hook([w, replaced](at::Tensor const&) {
                                    w.mutable_grad() = replaced ? at::zeros({1}) : at::Tensor();
                                  });
                                  return y;
                                },
                                {{"w", w}}};
        };
        chevron::trainer train({.program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2))),
                                .transport = comm,
                                .stages = hooked,
                                .loss = [](at::Tensor y) { return y.mean(); },
                                .optimizer = chevron::optimizer<torch::optim::SGD>(0.)});
        train.step(chevron::batch{{at::ones({2, 1})}, {}});
      });
    };
    CHECK_THROWS_WITH_AS(
        run(),
        doctest::Contains("rank 1, step 0, OPTIMIZER_STEP: the gradient of stage 1's w was replaced while the step ran, by a "
                          "hook or within a stage"),
        chevron::usage_error);
  }
}

TEST_CASE("with post_validation, gradients that a step to be done over needs are not lost in silence") {
  auto const run = [&](bool set_to_none) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(plan_of("1F1B", 2, 2), comm, build_stage,
                                                {.clip_grad_norm = 1e-3, .post_validation = true, .stable_steps = 0}));
      auto const b = make_batch(4, 1);
      for (int step = 0; step < 3; ++step) {
        train.step(b.input, b.target);
        train.optimizer()->zero_grad(set_to_none);
      }
    });
  };
  CHECK_NOTHROW(run(true));
  CHECK_THROWS_WITH_AS(run(false), doctest::Contains("gradients were changed in place (zero_grad(false)?) after step() returned"),
                       chevron::usage_error);
}
