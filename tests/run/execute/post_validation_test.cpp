// timeout: 400
#include "support/gloo_ranks.hpp"
#include "support/own_optimizer.hpp"
#include "support/small_model.hpp"

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <random>
#include <string_view>

#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/rmsprop.h>

#include <chevron/checkpoint/checkpoint.hpp>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// The results of a run on one rank: every report, parameters, buffers, and the optimizer's tensors.
struct outcome {
  std::vector<chevron::step_report> reports;
  tensors left;
  int forwards = 0;
};

struct setting {
  chevron::proved_program const* program = nullptr;
  chevron::optimizer_factory make;
  chevron::trainer_options options;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::vector<batch>> data = {};  // by step, by replica
  int evaluate_before = -1;                   // this step
  chevron::proved_program const* evaluation = nullptr;
};

chevron::stage build_counted(int number, at::ScalarType dtype, int* forwards) {
  at::manual_seed(100 + number);
  torch::nn::Sequential inner(torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})), torch::nn::Linear(width, width),
                              torch::nn::BatchNorm1d(width), torch::nn::Functional([forwards, dtype](at::Tensor const& x) {
                                ++*forwards;
                                return x.to(dtype).tanh().mul(2);
                              }));
  for (auto& p : inner->parameters()) p.set_data(p.to(dtype));
  for (auto& b : inner->buffers()) {
    if (b.is_floating_point()) b.set_data(b.to(dtype));
  }
  return inner;
}

at::Tensor mean_square_of(at::Tensor output, at::Tensor target) { return at::mse_loss(output.to(at::kFloat), target); }

outcome train_on(transport& comm, setting const& what) {
  outcome out;
  auto const build = [&](int s) { return build_counted(s, what.dtype, &out.forwards); };
  auto options = what.options;
  options.on_report = [&](chevron::step_report const& report) { out.reports.push_back(report); };
  chevron::trainer train({.program = *what.program,
                          .transport = comm,
                          .stages = build,
                          .loss = mean_square_of,
                          .optimizer = what.make,
                          .options = options});
  std::unique_ptr<chevron::evaluator> evaluate;
  if (what.evaluation != nullptr) evaluate = std::make_unique<chevron::evaluator>(*what.evaluation, train);
  auto const replica = static_cast<std::size_t>(comm.topology().replica());
  for (std::size_t step = 0; step < what.data.size(); ++step) {
    batch const& mine = what.data[step][replica];
    if (static_cast<int>(step) == what.evaluate_before && evaluate) {
      int const before = out.forwards;
      chevron::step_report fake;
      fake.loss = evaluate->loss({mine.input}, {mine.target});
      out.forwards = before;
      out.reports.push_back(fake);
    }
    auto const report = train.step({mine.input.to(what.dtype)}, {mine.target});
    CHECK(report.step == static_cast<long>(step));
    CHECK((report.settled || (what.options.post_validation && std::isnan(report.loss))));
  }
  CHECK(train.synchronize().settled);
  for (auto& s : train.stages()) {
    for (auto& p : s.parameters()) out.left.push_back(p.value.detach().clone());
    for (auto& p : s.buffers()) out.left.push_back(p.value.detach().clone());
    if (train.optimizer() == nullptr) continue;
    for (auto& p : s.parameters()) {
      auto const found = train.optimizer()->state().find(p.value.unsafeGetTensorImpl());
      if (found == train.optimizer()->state().end()) continue;
      for (auto& t : chevron::detail::tensors_of(*found->second)) {
        if (t.defined()) out.left.push_back(t.detach().clone());
      }
      if (auto const* adamw_state = dynamic_cast<torch::optim::AdamWParamState const*>(found->second.get())) {
        out.left.push_back(at::full({}, adamw_state->step(), at::kLong));
      }
    }
  }
  return out;
}

std::vector<outcome> train_threads(chevron::thread_options const& options, setting const& what) {
  std::vector<outcome> all(static_cast<std::size_t>(options.pipeline_ranks * options.replicas));
  chevron::run_threads(
      options, [&](transport& comm) { all[static_cast<std::size_t>(comm.topology().global_rank)] = train_on(comm, what); });
  return all;
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

/// The same to the last bit? An empty text, or the first difference.
std::string difference(std::vector<outcome> const& expected, std::vector<outcome> const& got) {
  for (std::size_t r = 0; r < expected.size(); ++r) {
    std::string const rank = "rank " + std::to_string(r);
    auto const& a = expected[r];
    auto const& b = got[r];
    std::size_t j = 0;
    if (a.reports.size() != b.reports.size()) {
      return rank + ": " + std::to_string(b.reports.size()) + " reports instead of " + std::to_string(a.reports.size());
    }
    // An evaluation's loss comes before the report of the step before it, which was not known earlier.
    auto const in_order = [](std::vector<chevron::step_report> reports) {
      std::stable_sort(reports.begin(), reports.end(), [](auto const& x, auto const& y) { return x.step < y.step; });
      return reports;
    };
    auto const x = in_order(a.reports), y = in_order(b.reports);
    for (; j < x.size(); ++j) {
      std::string const step = rank + ", step " + std::to_string(x[j].step) + ": ";
      if (x[j].step != y[j].step) return step + "reported as " + std::to_string(y[j].step);
      if (!same(x[j].loss, y[j].loss))
        return step + "loss " + std::to_string(y[j].loss) + " instead of " + std::to_string(x[j].loss);
      if (!same(x[j].grad_norm, y[j].grad_norm)) return step + "norm";
      if (x[j].skipped != y[j].skipped || x[j].clipped != y[j].clipped) return step + "skipped or clipped";
      if (x[j].learning_rate != y[j].learning_rate) return step + "learning rate";
      if (x[j].samples != y[j].samples || x[j].peak_in_flight != y[j].peak_in_flight) return step + "samples or peak";
    }
    if (a.left.size() != b.left.size()) return rank + ": another number of tensors";
    for (std::size_t i = 0; i < a.left.size(); ++i) {
      // An infinite input leaves its mark in running means.
      if (!at::allclose(a.left[i], b.left[i], 0, 0, /*equal_nan=*/true)) return rank + ": tensor " + std::to_string(i);
    }
  }
  return {};
}

struct named_optimizer {
  char const* name;
  chevron::optimizer_factory make;
};

std::vector<named_optimizer> const optimizers{
    {"SGD", chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.05))},
    {"SGD with momentum", chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01))},
    {"Adam", chevron::optimizer<torch::optim::Adam>(torch::optim::AdamOptions(1e-2))},
    {"Adam with amsgrad", chevron::optimizer<torch::optim::Adam>(torch::optim::AdamOptions(1e-2).amsgrad(true))},
    {"AdamW", chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2))},
    {"RMSprop", chevron::optimizer<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3).momentum(0.5).centered(true))},
    {"Adagrad", chevron::optimizer<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2))},
    {"fused AdamW", chevron::optimizer<chevron::fused_adamw>(torch::optim::AdamWOptions(1e-2))},
    {"fused SGD", chevron::optimizer<chevron::fused_sgd>(torch::optim::SGDOptions(0.05).momentum(0.9))},
};

std::vector<std::vector<batch>> plain_data(int steps, int replicas, std::int64_t samples) {
  std::vector<std::vector<batch>> out;
  for (int step = 0; step < steps; ++step) {
    out.emplace_back();
    for (int r = 0; r < replicas; ++r) out.back().push_back(make_batch(samples, 1000 * r + step));
  }
  return out;
}

double rate(long step) { return 1e-2 / static_cast<double>(step + 1); }

}  // namespace

TEST_CASE("what may run before the verdict is closed: it needs nothing that comes after it on any rank") {
  int checked = 0;
  for (char const* name : schedules) {
    for (int const ranks : {1, 2, 3, 4, 7}) {
      for (int const m : {1, 2, 5, 8, 20}) {
        auto const plan = chevron::catalogue::make_plan(name, {.ranks = ranks, .micro_batches = m});
        if (chevron::check(plan)) continue;
        auto const program = chevron::lower(chevron::prove(plan));
        auto const view = program.view();
        std::vector<chevron::detail::speculation> all;
        for (int r = 0; r < ranks; ++r) all.push_back(chevron::detail::speculation_of(view, r));
        auto const before = [&](chevron::kind what, int stage, int micro_batch) {
          int const r = view.plan.rank_of_stage(stage);
          for (int i = 0; i < all[static_cast<std::size_t>(r)].end; ++i) {
            if (view.at(r, i).op == chevron::make_action(what, stage, micro_batch)) return true;
          }
          return false;
        };
        for (int r = 0; r < ranks; ++r) {
          auto const& s = all[static_cast<std::size_t>(r)];
          auto const has = [](std::vector<int> const& list, int i) { return std::find(list.begin(), list.end(), i) != list.end(); };
          for (int i = 0; i < s.end; ++i) {
            auto const a = view.at(r, i).op;
            if (chevron::is_compute(a.kind)) REQUIRE(a.kind == chevron::kind::forward);
            if (a.kind == chevron::kind::forward && a.stage > 0) {
              REQUIRE(before(chevron::kind::forward, static_cast<int>(a.stage) - 1, static_cast<int>(a.micro_batch)));
            }
            bool const receives = a.kind == chevron::kind::receive_forward || a.kind == chevron::kind::receive_backward;
            if (receives) {
              bool const sent =
                  a.kind == chevron::kind::receive_forward &&
                  before(chevron::kind::send_forward, static_cast<int>(a.stage) - 1, static_cast<int>(a.micro_batch));
              REQUIRE(has(s.before, i) == sent);
              REQUIRE(has(s.postponed, i) == !sent);
            }
          }
          // Every message sent before the verdict is either used before it or listed to be taken off.
          int sent = 0, taken = static_cast<int>(s.unread.size());
          for (int stage = 1; stage < view.plan.stages; ++stage) {
            if (view.plan.rank_of_stage(stage) != r || view.plan.rank_of_stage(stage - 1) == r) continue;
            for (int i = 0; i < m; ++i) {
              sent += before(chevron::kind::send_forward, stage - 1, i) ? 1 : 0;
              taken += before(chevron::kind::forward, stage, i) ? 1 : 0;
            }
          }
          REQUIRE(sent == taken);
          // The beginning ends before an action that is no forward, or that needs a result from outside of the beginning.
          REQUIRE(s.end < view.length(r));
          bool const starts = view.plan.rank_of_stage(0) == r;
          if (starts) REQUIRE(before(chevron::kind::forward, 0, 0));
          ++checked;
        }
      }
    }
  }
  CHECK(checked > 500);

  auto const h2 = chevron::lower(chevron::prove(plan_of("ZB-H2", 4, 8)));
  for (int r = 0; r < 4; ++r) {
    auto const s = chevron::detail::speculation_of(h2.view(), r);
    int forwards = 0;
    for (int i = 0; i < s.end; ++i) forwards += h2.view().at(r, i).op.kind == chevron::kind::forward ? 1 : 0;
    CHECK(forwards == 2 * (3 - r) + 1);
    CHECK(s.unread.size() == (r == 0 ? 0u : 2u));
  }
}

TEST_CASE("twenty steps give what the synchronous optimizer gives, whether none is wrong or every one") {
  for (char const* name : schedules) {
    for (int const ranks : {2, 4}) {
      for (double const clip : {1e9, 1e-3}) {
        CAPTURE(name);
        CAPTURE(ranks);
        CAPTURE(clip);
        auto const program = chevron::lower(chevron::prove(plan_of(name, ranks, 5)));
        setting what{.program = &program, .make = adamw, .options = {.clip_grad_norm = clip, .learning_rate = rate}};
        what.data = plain_data(20, 1, 11);
        auto const expected = train_threads({.pipeline_ranks = ranks}, what);
        what.options.post_validation = true;
        what.options.stable_steps = 0;
        auto const got =
            train_threads({.pipeline_ranks = ranks, .rendezvous = ranks == 4, .deadline = std::chrono::seconds(100)}, what);
        CHECK(difference(expected, got) == "");
        CHECK(expected[0].reports.back().clipped == (clip < 1));
        int more = 0;
        for (std::size_t r = 0; r < got.size(); ++r) more += got[r].forwards - expected[r].forwards;
        CHECK((more > 0) == (clip < 1));
      }
    }
  }
}

TEST_CASE("the loss curve is the un-pipelined model's") {
  at::set_num_threads(1);
  for (char const* name : schedules) {
    for (int const replicas : {1, 2}) {
      CAPTURE(name);
      auto const plan = plan_of(name, 2, 3);
      std::vector<batch> data;
      for (int r = 0; r < replicas; ++r) data.push_back(make_batch(7, 70 + r));
      curve const whole(plan, data, 20);
      complaints wrong;
      chevron::run_threads({.pipeline_ranks = 2, .replicas = replicas}, [&](transport& comm) {
        long told = 0;
        auto const reported = [&](chevron::step_report const& report) {
          auto const i = static_cast<std::size_t>(report.step);
          wrong.require(report.step == told++ && report.settled, "report of step " + std::to_string(i));
          wrong.require(report.loss == whole.losses[i] && report.grad_norm == whole.norms[i], "step " + std::to_string(i));
        };
        // A limit in the middle of the norms: some steps are right at once.
        chevron::trainer train(
            {.program = chevron::lower(chevron::prove(plan)),
             .transport = comm,
             .stages = build_stage,
             .loss = mean_square,
             .optimizer = adamw,
             .options = {.clip_grad_norm = curve::clip,
                         .learning_rate = curve::rate,
                         .post_validation = true,
                         .on_report = reported,
                         .stable_steps = 0}});
        auto const& mine = data[static_cast<std::size_t>(comm.topology().replica())];
        for (long step = 0; step < 20; ++step) {
          auto const report = train.step({mine.input}, {mine.target});
          wrong.require(report.step == step && !report.settled, "step " + std::to_string(report.step) + " returned another");
          wrong.require(told == step, std::to_string(told) + " reports at the end of step " + std::to_string(step));
        }
        wrong.require(train.synchronize().step == 19 && told == 20, "the last step");
        train.synchronize();
        wrong.require(told == 20, "a report came twice");
      });
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    }
  }
}

TEST_CASE("a hundred seeds: steps that are not finite or too large, any optimizer, fp32 and bf16, replicas, delays") {
  int skipped = 0, clipped = 0, calm = 0, more = 0;
  for (unsigned seed = 0; seed < 100; ++seed) {
    std::mt19937 random(seed);
    auto const pick = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    char const* const name = schedules[static_cast<std::size_t>(pick(static_cast<int>(schedules.size())))];
    int const ranks = 1 + pick(4), m = 1 + pick(6), replicas = ranks <= 2 ? 1 + pick(2) : 1;
    auto const& optimizer = optimizers[static_cast<std::size_t>(pick(static_cast<int>(optimizers.size())))];
    auto const program = chevron::lower(chevron::prove(plan_of(name, ranks, m)));
    setting what{.program = &program, .make = optimizer.make, .options = {.when_not_finite = chevron::not_finite::skip}};
    what.options.clip_grad_norm = pick(4) == 0 ? 0 : 3;
    if (pick(2) == 0) what.options.learning_rate = rate;
    if (pick(2) == 0) what.options.bucket_bytes = 100;
    bool const single = std::string_view(optimizer.name) == "fused SGD";  // on the CPU it takes no other precision
    what.dtype = pick(2) == 0 || single ? at::kFloat : at::kBFloat16;
    std::int64_t const samples = 2 * m + pick(m);
    what.data = plain_data(8, replicas, samples);
    for (auto& step : what.data) {
      auto& victim = step[static_cast<std::size_t>(pick(replicas))];
      int const event = pick(5);
      if (event == 0) victim.target[pick(static_cast<int>(samples))][pick(width)] = std::numeric_limits<float>::quiet_NaN();
      if (event == 1) victim.input[pick(static_cast<int>(samples))][pick(width)] = std::numeric_limits<float>::infinity();
      if (event == 2) victim.target *= 100;
      if (event >= 3) victim.target *= 0.01;
    }
    chevron::thread_options options{.pipeline_ranks = ranks, .replicas = replicas};
    auto const expected = train_threads(options, what);
    what.options.post_validation = true;
    what.options.stable_steps = pick(3);
    options.rendezvous = pick(2) == 0;
    if (pick(2) == 0) options.longest_delay = std::chrono::microseconds(300);
    options.seed = seed;
    options.deadline = std::chrono::seconds(100);
    auto const got = train_threads(options, what);
    std::string const different = difference(expected, got);
    CHECK_MESSAGE(different.empty(), "seed " << seed << ", " << std::string(name) << ", " << std::string(optimizer.name)
                                             << ", P=" << ranks << ", M=" << m << ": " << different);
    for (auto const& report : expected[0].reports) {
      skipped += report.skipped ? 1 : 0;
      clipped += report.clipped ? 1 : 0;
      calm += report.skipped || report.clipped ? 0 : 1;
    }
    for (std::size_t r = 0; r < got.size(); ++r) more += got[r].forwards - expected[r].forwards;
  }
  CHECK(skipped > 100);
  CHECK(clipped > 50);
  CHECK(calm > 100);
  CHECK(more > 100);
}

TEST_CASE("a step that must stop the job stops it with parameters as they were before") {
  auto const program = chevron::lower(chevron::prove(plan_of("ZBVZeroBubble", 2, 4)));
  auto const good = make_batch(8, 1);
  auto bad = make_batch(8, 2);
  bad.target[5][0] = std::numeric_limits<float>::quiet_NaN();
  for (bool const settled : {true, false}) {
    std::atomic<int> unchanged = 0, stopped = 0;
    auto const run = [&] {
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        chevron::trainer train(
            small_model::setup(program, comm, build_stage, {.post_validation = true, .stable_steps = 0}, adamw));
        train.step({good.input}, {good.target});
        train.synchronize();
        tensors before;
        for (auto& s : train.stages()) {
          for (auto& p : s.parameters()) before.push_back(p.value.detach().clone());
        }
        train.step({bad.input}, {bad.target});
        try {
          if (settled) {
            train.synchronize();
          } else {
            train.step({good.input}, {good.target});
          }
        } catch (chevron::error const& e) {
          bool same_as_before = true;
          std::size_t i = 0;
          for (auto& s : train.stages()) {
            for (auto& p : s.parameters()) same_as_before = same_as_before && at::equal(p.value, before[i++]);
          }
          if (dynamic_cast<chevron::numerical_error const*>(&e) != nullptr) {
            ++stopped;
            unchanged += same_as_before ? 1 : 0;
          }
          throw;
        }
      });
    };
    CHECK_THROWS_WITH_AS(
        run(), doctest::Contains("step 1, OPTIMIZER_STEP: the loss of microbatch 2, unlike 3 others, is not finite; no parameter was changed"),
        chevron::numerical_error);
    CHECK(stopped == 2);
    CHECK(unchanged == 2);
  }
}

TEST_CASE("evaluation, other batch sizes and calm steps in between change nothing") {
  for (char const* name : {"1F1B", "ZB-H2", "ZBVZeroBubble"}) {
    auto const plan = plan_of(name, 2, 4);
    auto const program = chevron::lower(chevron::prove(plan));
    auto const evaluation = chevron::lower(chevron::prove(chevron::forward_part(plan)));
    setting what{.program = &program, .make = adamw, .options = {.clip_grad_norm = 3}};
    what.data = plain_data(9, 1, 8);
    for (std::size_t i : {2u, 5u}) what.data[i][0].target *= 100;
    what.data[3][0] = make_batch(13, 3);
    what.data[6][0] = make_batch(9, 4);
    what.evaluation = &evaluation;
    what.evaluate_before = 3;
    auto const expected = train_threads({.pipeline_ranks = 2}, what);
    for (int const calm : {0, 1, 3, 100}) {
      CAPTURE(name);
      CAPTURE(calm);
      what.options.post_validation = true;
      what.options.stable_steps = calm;
      CHECK(difference(expected, train_threads({.pipeline_ranks = 2}, what)) == "");
      what.options.post_validation = false;
    }
  }
}

TEST_CASE("with tied weights, dropout, recomputed stages and gradients accumulated") {
  for (char const* name : {"1F1B", "ZB-H2", "ZBVZeroBubble", "DualPipeV"}) {
    for (int const replicas : {1, 2}) {
      CAPTURE(name);
      CAPTURE(replicas);
      auto const plan = plan_of(name, 2, 4);
      auto const run = [&](bool early) {
        std::vector<outcome> all(static_cast<std::size_t>(2 * replicas));
        chevron::run_threads(
            {.pipeline_ranks = 2, .replicas = replicas, .rendezvous = true, .deadline = std::chrono::seconds(100)},
            [&](transport& comm) {
              auto& out = all[static_cast<std::size_t>(comm.topology().global_rank)];
              auto const build = [&](int s) {
                at::manual_seed(300 + s);
                torch::nn::Linear layer(width, width);
                chevron::stage made(layer, [layer, forwards = &out.forwards](at::Tensor x) mutable {
                  ++*forwards;
                  return at::dropout(layer(x).tanh(), 0.2, true);
                });
                if (s == 0 || s + 1 == plan.stages) made.tie("weight", "shared");
                return made.recompute(s % 2 == 1);
              };
              chevron::trainer train(small_model::setup(plan, comm, build,
                                                        {.clip_grad_norm = 1,
                                                         .when_not_finite = chevron::not_finite::skip,
                                                         .seed = 5,
                                                         .post_validation = early,
                                                         .on_report = [&](auto const& report) { out.reports.push_back(report); },
                                                         .stable_steps = 0},
                                                        adamw));
              for (int step = 0; step < 8; ++step) {
                auto data = make_batch(9, 10 * step + comm.topology().replica());
                data.target *= step % 3 == 1 ? 100 : 0.1;
                if (step == 5) data.target[0][0] = std::numeric_limits<float>::quiet_NaN();
                train.accumulate({data.input}, {data.target}, 18 * replicas);
                train.step({data.target.nan_to_num(0)}, {data.input}, 18 * replicas);
              }
              train.synchronize();
              for (auto& s : train.stages()) {
                for (auto& p : s.parameters()) out.left.push_back(p.value.detach().clone());
              }
            });
        return all;
      };
      auto const expected = run(false), got = run(true);
      CHECK(difference(expected, got) == "");
      int clipped = 0, skipped = 0;
      for (auto const& report : expected[0].reports) {
        clipped += report.clipped ? 1 : 0;
        skipped += report.skipped ? 1 : 0;
      }
      CHECK(clipped > 1);
      CHECK(clipped < 7);
      CHECK(skipped == 1);
      CHECK(got[0].forwards > expected[0].forwards);
    }
  }
}

TEST_CASE("an optimizer that may keep more than is known is refused before the first step; without post-validation it trains") {
  auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2)));
  auto const data = make_batch(4, 1);
  auto const make = [](std::vector<at::Tensor> parameters) {
    return std::make_unique<own_optimizer>(std::move(parameters), torch::optim::SGDOptions(0.1));
  };
  for (bool const early : {false, true}) {
    auto const run = [&] {
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        chevron::trainer train(small_model::setup(program, comm, build_stage, {.post_validation = early}, make));
        train.step({data.input}, {data.target});
      });
    };
    if (early) {
      CHECK_THROWS_WITH_AS(
          run(),
          doctest::Contains("the state of an optimizer of this class is unknown, so a step cannot be undone. Remedy: SGD, Adam"),
          chevron::usage_error);
    } else {
      run();
    }
  }
}

TEST_CASE(
    "half precision, a scaled loss, gradients accumulated, replicas, parameters that are frozen or of several dtypes, rates set "
    "by hand "
    "for each group, evaluation and a checkpoint while steps are pending: all at once") {
  struct {
    char const* name;
    std::size_t which;  // of the optimizers
  } const cases[] = {{"ZB-H2", 1}, {"ZBVZeroBubble", 3}, {"1F1B", 5}, {"ZB-H2", 6}, {"1F1B", 7}};
  for (auto const [name, number] : cases) {
    std::size_t const which = number;
    CAPTURE(which);
    auto const plan = plan_of(name, 2, 3);
    auto const program = chevron::lower(chevron::prove(plan)),
               evaluation = chevron::lower(chevron::prove(chevron::forward_part(plan)));
    auto const build = [&](int s) -> chevron::stage {
      at::manual_seed(700 + s);
      if (s == 1 && plan.stages > 2) return chevron::stage([](at::Tensor x) { return x * 1.5; });
      torch::nn::Linear in(width, width), out(width, width);
      // bfloat16 needs no larger epsilon, float16 has the smaller range.
      in->to(s == 0 ? at::kHalf : at::kBFloat16);
      if (s == 0) out->bias.set_requires_grad(false);
      std::vector<chevron::parameter> parameters;
      for (auto const& [where, layer] : {std::pair("in.", in), std::pair("out.", out)}) {
        for (auto const& p : layer->named_parameters()) parameters.push_back({where + p.key(), p.value()});
      }
      return {[in, out](at::Tensor x) mutable { return out(in(x.to(in->weight.scalar_type())).to(at::kFloat).tanh()); },
              parameters};
    };
    // In half precision the epsilon of Adam and RMSprop is 0: they step only parameters in single precision.
    auto const make = [&](std::vector<at::Tensor> parameters) {
      std::vector<at::Tensor> stepped;
      for (auto& p : parameters) {
        if (p.scalar_type() != at::kHalf || which == 1) stepped.push_back(p);
      }
      auto made = optimizers[which].make({stepped[0]});
      std::vector<at::Tensor> const others(stepped.begin() + 1, stepped.end());
      if (which == 6) return optimizers[which].make(stepped);  // Adagrad makes its states when it is made
      made->add_param_group(torch::optim::OptimizerParamGroup(others, made->param_groups()[0].options().clone()));
      return made;
    };
    auto const run = [&](bool early) {
      std::vector<outcome> all(4);
      std::string folder = (std::filesystem::temp_directory_path() / "chevron-all-XXXXXX").string();
      if (::mkdtemp(folder.data()) == nullptr) throw std::runtime_error("no folder");
      chevron::run_threads(
          {.pipeline_ranks = 2, .replicas = 2, .rendezvous = true, .deadline = std::chrono::seconds(100)}, [&](transport& comm) {
            auto& out = all[static_cast<std::size_t>(comm.topology().global_rank)];
            chevron::trainer train(small_model::setup(program, comm, build,
                                                      {.clip_grad_norm = 2,
                                                       .when_not_finite = chevron::not_finite::skip,
                                                       .scaling = chevron::loss_scaling{.initial = 4096, .growth_interval = 3},
                                                       .post_validation = early,
                                                       .on_report = [&](auto const& report) { out.reports.push_back(report); },
                                                       .stable_steps = 0},
                                                      make));
            chevron::evaluator evaluate(evaluation, train);
            for (int step = 0; step < 12; ++step) {
              auto data = make_batch(7, 10 * step + comm.topology().replica());
              data.target *= step == 7 ? 1e5 : step % 4 == 1 ? 30 : 0.5;  // step 7: too large for half precision
              if (step == 5 && comm.topology().replica() == 1) data.target[0][0] = std::numeric_limits<float>::quiet_NaN();
              if (train.optimizer() != nullptr) {
                double rate = 1e-2 / (step + 1);
                for (auto& group : train.optimizer()->param_groups()) group.options().set_lr(rate *= 0.5);
              }
              train.accumulate({data.input}, {data.target}, 28);
              train.step({data.input * 0.5}, {data.target}, 28);
              if (step % 5 == 2) {
                chevron::step_report of_evaluation;
                of_evaluation.loss = evaluate.loss({data.input}, {data.target.nan_to_num(0)});
                out.reports.push_back(of_evaluation);
              }
              if (step == 9) chevron::save_checkpoint(train, folder);
            }
            train.synchronize();
            for (int half = 0; half < 2; ++half) {
              for (auto& s : train.stages()) {
                for (auto& p : s.parameters()) out.left.push_back(p.value.detach().clone());
              }
              if (train.optimizer() != nullptr) {
                for (auto& group : train.optimizer()->param_groups())
                  out.left.push_back(at::full({}, group.options().get_lr(), at::kDouble));
              }
              out.left.push_back(at::full({}, train.scaling().factor(), at::kDouble));
              if (half == 0) chevron::load_checkpoint(train, folder);
            }
          });
      std::filesystem::remove_all(folder);
      return all;
    };
    auto const expected = run(false), got = run(true);
    CHECK(difference(expected, got) == "");
    int clipped = 0, skipped = 0, scaled = 0;
    for (auto const& report : expected[0].reports) {
      clipped += report.clipped ? 1 : 0;
      skipped += report.skipped ? 1 : 0;
      scaled += report.loss_factor != 4096 ? 1 : 0;
    }
    CHECK(clipped > 0);
    CHECK(skipped > 1);
    CHECK(skipped + clipped < 12);
    CHECK(scaled > 3);
  }
}

TEST_CASE("over Gloo too, with steps that are wrong") {
  for (char const* name : schedules) {
    for (int const replicas : {1, 2}) {
      CAPTURE(name);
      CAPTURE(replicas);
      int const ranks = replicas == 2 ? 2 : 4;
      auto const program = chevron::lower(chevron::prove(plan_of(name, ranks, 4)));
      setting what{
          .program = &program, .make = adamw, .options = {.clip_grad_norm = 3, .when_not_finite = chevron::not_finite::skip}};
      what.data = plain_data(6, replicas, 9);
      what.data[0][0].target *= 100;
      what.data[2][0].target[0][0] = std::numeric_limits<float>::quiet_NaN();
      what.data[3][0] = make_batch(9, 33);
      what.data[4][0].target *= 100;
      auto const expected = train_threads({.pipeline_ranks = ranks, .replicas = replicas}, what);
      what.options.post_validation = true;
      what.options.stable_steps = 0;
      std::vector<outcome> got(static_cast<std::size_t>(ranks * replicas));
      gloo_ranks::check_all_well(gloo_ranks::run(ranks, replicas, std::chrono::seconds(100), [&](transport& comm) {
        got[static_cast<std::size_t>(comm.topology().global_rank)] = train_on(comm, what);
      }));
      CHECK(difference(expected, got) == "");
    }
  }
}
