// The ranks' batches: a batch that differs between ranks of the pipeline is found before a parameter is changed.

#include "support/rank_ends.hpp"
#include "support/small_model.hpp"

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <set>

#include <c10/util/Exception.h>

#include <chevron/plan/forward_part.hpp>

#include <doctest/doctest.h>

using namespace small_model;
using namespace rank_ends;

namespace {

chevron::plan const two = plan_of("1F1B", 2, 2);
chevron::plan const three = plan_of("ZB-H1", 3, 2);

/// Samples in the order of this rank, as where each rank shuffles for itself.
batch shuffled(transport& comm, int step = 0) {
  auto const whole = make_batch(8, 5 + comm.topology().replica());
  auto const generator =
      at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(10 * step + comm.topology().global_rank));
  auto const order = at::randperm(8, generator);
  return {whole.input.index_select(0, order), whole.target.index_select(0, order)};
}

chevron::stage with_mask(int number) {
  at::manual_seed(number);
  torch::nn::Linear layer(width, width);
  return chevron::stage(layer, [layer](at::Tensor x, at::Tensor mask) mutable { return layer(x) * mask; }).side_inputs({"mask"});
}

/// The parameters of this rank, as they are now.
tensors values_of(chevron::trainer& train) {
  tensors out;
  for (auto const& each : train.stages()) {
    for (auto const& p : each.parameters()) out.push_back(p.value.detach().clone());
  }
  return out;
}
int changed_since(tensors const& before, chevron::trainer& train) {
  tensors const now = values_of(train);
  int out = 0;
  for (std::size_t q = 0; q < now.size(); ++q) out += at::equal(before[q], now[q]) ? 0 : 1;
  return out;
}

}  // namespace

TEST_CASE("each rank shuffles for itself: an error on all ranks, in the first step, parameters as they were") {
  for (over const which : {over::threads, over::gloo, over::streams}) {
    int changed = 0;
    auto const e = run(which, 2, 1, [&](transport& comm) {
      chevron::trainer train(small_model::setup(two, comm));
      auto const before = values_of(train);
      auto const mine = shuffled(comm);
      try {
        train.step({mine.input}, {mine.target});
      } catch (chevron::preflight_error const&) {
        changed += changed_since(before, train);
        throw;
      }
    });
    check_all_say(
        e,
        "step 0, OPTIMIZER_STEP: ranks 0 and 1 were given different inputs and targets: all ranks of a pipeline take the same "
        "batch, samples in one order. No parameter was changed. Remedy: chevron::distributed_sampler");
    CHECK(changed == 0);
  }
}

TEST_CASE("what differs is named, and what a rank does not use may differ") {
  auto const with = [](auto const& change, chevron::plan const& plan = three) {
    return run(over::threads, plan.size.ranks, 1, [&](transport& comm) {
      auto data = make_batch(6, 1);
      chevron::trainer train(small_model::setup(plan, comm));
      change(comm.topology().global_rank, data);
      train.step(data.input.defined() ? tensors{data.input} : tensors{}, {data.target});
    });
  };
  auto const last = [](int rank) { return rank == 2; };
  check_all_say(with([&](int r, batch& b) {
                  if (last(r)) b.input = b.input + 1;
                }),
                "ranks 0 and 2 were given different inputs: ");
  check_all_say(with([&](int r, batch& b) {
                  if (r == 0) b.target = b.target.flip(0);
                }),
                "ranks 0 and 2 were given different targets: ");
  // As bytes they are the same, or as numbers, but not as tensors.
  check_all_say(with([&](int r, batch& b) {
                  if (last(r)) b.input = b.input.view({6, 2, 3});
                }),
                "different inputs: ");
  check_all_say(with([&](int r, batch& b) {
                  if (last(r)) b.input = b.input.to(at::kDouble);
                }),
                "different inputs: ");
  check_all_well(with([](int r, batch& b) {
    if (r == 1) b.input = b.input + 1, b.target = b.target.flip(0);
  }));
  check_all_well(with([&](int r, batch& b) {
    if (last(r)) b.input = at::Tensor();
  }));
  // However a tensor lies in memory.
  check_all_well(with([&](int r, batch& b) {
    if (last(r)) b.input = b.input.t().contiguous().t();
  }));
  check_all_well(with([](int r, batch& b) {
    if (r == 0) b.target = at::stack({b.target, b.target}, 2).select(2, 1);
  }));
  // One rank has the first stage and the last, so whatever is given elsewhere is used nowhere.
  check_all_well(with(
      [](int r, batch& b) {
        if (r == 1) b.input = b.input + 1, b.target = b.target.flip(0);
      },
      plan_of("ZBVZeroBubble", 2, 2)));
}

TEST_CASE("extras are compared among the ranks that take them") {
  for (bool const first_takes : {true, false}) {
    auto const e = run(over::threads, 3, 1, [&](transport& comm) {
      auto const data = make_batch(6, 1);
      auto const build = [&](int s) { return s == 1 || (s == 0 && first_takes) ? with_mask(s) : build_stage(s); };
      chevron::trainer train(small_model::setup(three, comm, build));
      auto const mask = at::full({6, 1}, comm.topology().global_rank + 1);
      train.step(chevron::batch{{data.input}, {data.target}, {{"mask", mask}}});
    });
    if (first_takes) check_all_say(e, "ranks 0 and 1 were given different `mask`: ");
    if (!first_takes) check_all_well(e);
  }
}

TEST_CASE("by default each step compares a sample: ranks that part later are found in that step") {
  for (over const which : {over::threads, over::gloo}) {
    for (int const wrong_from : {0, 1, 3}) {
      auto const e = run(which, 3, 1, [&](transport& comm) {
        chevron::trainer train(small_model::setup(three, comm));
        for (int step = 0; step < 5; ++step) {
          auto mine = step < wrong_from ? make_batch(8, step) : shuffled(comm, step);
          // However a tensor lies in memory.
          if (comm.topology().global_rank == 0) mine.input = mine.input.t().contiguous().t();
          train.step({mine.input}, {mine.target});
        }
      });
      check_all_say(e, "step " + std::to_string(wrong_from) + ", OPTIMIZER_STEP: ranks 0 and 2 were given different inputs and");
    }
  }
  // Each hundredth step compares all values: one element that no sample reads differs from step 50 on.
  auto const e = run(over::threads, 2, 1, [&](transport& comm) {
    chevron::trainer train(small_model::setup(two, comm));
    for (int step = 0; step < 102; ++step) {
      auto mine = make_batch(8, step);
      if (step >= 50 && comm.topology().global_rank == 1) mine.target.view({-1})[2] += 1e-3;
      train.step({mine.input}, {mine.target});
    }
  });
  check_all_say(e, "step 100, OPTIMIZER_STEP: ranks 0 and 1 were given different targets");
}

TEST_CASE("an evaluator's later losses compare samples, too") {
  auto const e = run(over::threads, 2, 1, [&](transport& comm) {
    chevron::trainer train(small_model::setup(two, comm));
    chevron::evaluator evaluate(train);
    for (int call = 0; call < 3; ++call) {
      auto const mine = call < 2 ? make_batch(8, call) : shuffled(comm, call);
      evaluate.loss({mine.input}, {mine.target});
    }
  });
  check_all_say(e, "step 0, evaluation: ranks 0 and 1 were given different inputs and targets");
}

TEST_CASE("shards that are given different batches are refused") {
  std::vector<std::string> said(2);
  chevron::run_threads({.pipeline_ranks = 1, .shards = 2}, [&](transport& comm) {
    try {
      chevron::trainer train(small_model::setup(plan_of("1F1B", 1, 2), comm));
      auto const mine = make_batch(8, comm.topology().shard());
      train.step({mine.input}, {mine.target});
    } catch (chevron::preflight_error const& e) {
      said[static_cast<std::size_t>(comm.topology().global_rank)] = e.what();
    }
    comm.all_gather_text("over");
  });
  for (auto const& each : said)
    CHECK_MESSAGE(
        each.find("step 0, comparison of data: ranks 0 and 1 were given different inputs and targets") != std::string::npos,
        each);
}

TEST_CASE("a side input that nobody takes is refused in the first step and by evaluators, with its name") {
  auto const data = make_batch(6, 1);
  at::Tensor const mask = at::ones({6, 1});
  enum class call { step, step_of_parts, loss, outputs };
  auto const with = [&](call which, std::vector<chevron::side_input> const& given, chevron::data_check check = {}) {
    return run(over::threads, 3, 1, [&](transport& comm) {
      auto const build = [&](int s) { return s == 1 ? with_mask(s) : build_stage(s); };
      chevron::trainer train(small_model::setup(three, comm, build, {.check_data = check}));
      chevron::batch const whole{{data.input}, {data.target}, given};
      chevron::evaluator evaluate(train);
      if (which == call::step) train.step(whole);
      if (which == call::step_of_parts) train.step(std::vector<chevron::batch>{whole, whole});
      if (which == call::loss) evaluate.loss(whole);
      if (which == call::outputs) evaluate.outputs(whole);
    });
  };
  for (call const which : {call::step, call::step_of_parts, call::loss, call::outputs}) {
    check_all_well(with(which, {{"mask", mask}}));
    for (auto const check : {chevron::data_check::sampled, chevron::data_check::never})
      check_all_say(with(which, {{"mask", mask}, {"padding", mask}, {"extra", mask}}, check),
                    "no stage and no loss takes the side inputs `padding`, `extra` of the batch; those that are taken are `mask`",
                    2);
    check_all_say(with(which, {{"maks", mask}}), "takes the side input `maks` of the batch", 2);
  }
}

TEST_CASE("in the first step, in every step, or never") {
  for (auto const check : {chevron::data_check::first_step, chevron::data_check::every_step, chevron::data_check::never}) {
    for (int const wrong_from : {0, 1}) {
      for (over const which : {over::threads, over::gloo}) {
        auto const e = run(which, 2, 1, [&](transport& comm) {
          chevron::trainer train(small_model::setup(two, comm, build_stage, {.check_data = check}));
          train.next_step(7);
          for (int step = 0; step < 3; ++step) {
            auto const mine = step < wrong_from ? make_batch(8, step) : shuffled(comm, step);
            train.step({mine.input}, {mine.target});
          }
        });
        bool const found =
            check == chevron::data_check::every_step || (check == chevron::data_check::first_step && wrong_from == 0);
        if (found)
          check_all_say(e, "step " + std::to_string(7 + wrong_from) + ", OPTIMIZER_STEP: ranks 0 and 1 were given different");
        if (!found) check_all_well(e);
      }
    }
  }
}

TEST_CASE("ranks must be told the same about it") {
  check_all_say(run(over::threads, 2, 1,
                    [&](transport& comm) {
                      auto const check =
                          comm.topology().global_rank == 0 ? chevron::data_check::never : chevron::data_check::every_step;
                      chevron::trainer train(small_model::setup(two, comm, build_stage, {.check_data = check}));
                    }),
                "data compared: ");
}

TEST_CASE("batches accumulated are part of their step") {
  for (int const wrong : {-1, 0, 1, 2}) {
    auto const e = run(over::threads, 2, 1, [&](transport& comm) {
      chevron::trainer train(small_model::setup(two, comm));
      for (int pass = 0; pass < 3; ++pass) {
        auto const mine = pass == wrong ? shuffled(comm) : make_batch(8, pass);
        if (pass < 2) train.accumulate({mine.input}, {mine.target}, 24);
        if (pass == 2) train.step({mine.input}, {mine.target}, 24);
      }
    });
    if (wrong >= 0) check_all_say(e, "step 0, OPTIMIZER_STEP: ranks 0 and 1 were given different inputs and targets");
    if (wrong < 0) check_all_well(e);
  }
}

TEST_CASE("the ranks that differ are named by replica; replicas may be given what they like") {
  auto const e = run(over::threads, 2, 2, [&](transport& comm) {
    chevron::trainer train(small_model::setup(two, comm));
    auto const mine = comm.topology().replica() == 1 ? shuffled(comm) : make_batch(8, 3);
    train.step({mine.input}, {mine.target});
  });
  check_all_say(e, "ranks 2 and 3 were given different inputs and targets");
}

TEST_CASE("counts come first, then data, then what is not finite") {
  auto const with = [](auto const& change) {
    return run(over::threads, 2, 1, [&](transport& comm) {
      chevron::trainer train(small_model::setup(two, comm, build_stage, {.loss_weight = [&](chevron::batch const& b) {
                                                  return b.targets[0].ne(9).sum().template item<double>();
                                                }}));
      auto data = shuffled(comm);
      change(comm.topology().global_rank, data);
      train.step({data.input}, {data.target});
    });
  };
  check_all_say(with([](int r, batch& b) {
                  if (r == 1) b.target[0][0] = 9;
                }),
                "were given batches that count 48 and 47 samples", 2);
  check_all_say(with([](int, batch& b) { b.input[0][0] = std::numeric_limits<float>::quiet_NaN(); }),
                "were given different inputs and targets");
}

TEST_CASE("not a number is like itself") {
  auto const e = run(over::threads, 2, 1, [&](transport& comm) {
    chevron::trainer train(small_model::setup(two, comm));
    auto data = make_batch(8, 1);
    data.input[0][0] = std::numeric_limits<float>::quiet_NaN();
    train.step({data.input}, {data.target});
  });
  check_all_say(e, "is not finite", 6);
}

TEST_CASE("with post-validation it is found by the verdict, and the step is undone") {
  for (over const which : {over::threads, over::gloo}) {
    for (bool const settles : {true, false}) {
      for (int const stable_steps : {0, 10}) {
        int changed = 0;
        auto const e = run(which, 2, 1, [&](transport& comm) {
          chevron::trainer train(
              small_model::setup(two, comm, build_stage, {.post_validation = true, .stable_steps = stable_steps}));
          auto const before = values_of(train);
          auto const mine = shuffled(comm), other = make_batch(8, 1);
          try {
            train.step({mine.input}, {mine.target});
            if (settles) train.synchronize();
            train.step({other.input}, {other.target});
          } catch (chevron::preflight_error const&) {
            changed += changed_since(before, train);
            throw;
          }
        });
        check_all_say(e, "step 0, OPTIMIZER_STEP: ranks 0 and 1 were given different inputs and targets");
        CHECK(changed == 0);
      }
    }
  }
}

TEST_CASE("evaluation compares in its first call, too") {
  for (over const which : {over::threads, over::gloo}) {
    for (int const wrong : {0, 1}) {
      for (auto const check : {chevron::data_check::first_step, chevron::data_check::every_step, chevron::data_check::never}) {
        auto const e = run(which, 2, 1, [&](transport& comm) {
          chevron::trainer train(small_model::setup(two, comm, build_stage, {.check_data = check}));
          chevron::evaluator evaluate(chevron::lower(chevron::prove(chevron::forward_part(two))), train);
          auto const good = make_batch(8, 1), bad = shuffled(comm);
          std::set<double> losses;
          for (int call = 0; call < 3; ++call) {
            auto const& mine = call == wrong ? bad : good;
            double const loss = evaluate.loss({mine.input}, {mine.target});
            if (call != wrong) losses.insert(loss);
          }
          if (losses.size() != 1) throw chevron::usage_error("held-out losses differ");
          train.step({good.input}, {good.target});
        });
        bool const found = check == chevron::data_check::every_step || (check == chevron::data_check::first_step && wrong == 0);
        if (found) check_all_say(e, "step 0, evaluation: ranks 0 and 1 were given different inputs and targets");
        if (!found) check_all_well(e);
      }
    }
  }
}

TEST_CASE("a tensor that ranks share may be changed in place by the first stage") {
  for (int round = 0; round < 20; ++round) {
    auto const data = make_batch(512, round);
    auto const e = run(over::threads, 2, 1, [&](transport& comm) {
      auto const build = [](int s) -> chevron::stage {
        at::manual_seed(s);
        if (s == 0)
          return torch::nn::Sequential(torch::nn::Functional([](at::Tensor x) { return x.mul_(2); }),
                                       torch::nn::Linear(width, width));
        return torch::nn::Sequential(torch::nn::Linear(width, width));
      };
      chevron::trainer train(small_model::setup(two, comm, build));
      if (comm.topology().global_rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(round % 3));
      train.step({data.input}, {data.target});
    });
    check_all_well(e);
  }
}

TEST_CASE("a batch is the same whoever cuts it") {
  auto const e = run(over::threads, 2, 1, [&](transport& comm) {
    chevron::trainer train(small_model::setup(two, comm));
    auto const data = make_batch(7, 1);
    if (comm.topology().global_rank == 0) {
      train.step({data.input}, {data.target});
    } else {
      train.step(std::vector<chevron::batch>{{{data.input.narrow(0, 0, 4).clone()}, {data.target.narrow(0, 0, 4).clone()}},
                                             {{data.input.narrow(0, 4, 3).clone()}, {data.target.narrow(0, 4, 3).clone()}}});
    }
  });
  check_all_well(e);
}

TEST_CASE("where no stage has anything to train, nothing would be learned: an error on all ranks") {
  for (over const which : {over::threads, over::gloo}) {
    for (bool const frozen : {true, false}) {
      auto const e = run(which, 2, 2, [&](transport& comm) {
        auto const build = [&](int s) -> chevron::stage {
          if (!frozen) return chevron::stage([](at::Tensor x) { return x.sin(); });
          auto made = build_stage(s);
          for (auto const& p : made.parameters()) p.value.requires_grad_(false);
          return made;
        };
        chevron::trainer train(small_model::setup(two, comm, build));
      });
      check_all_say(e, "no stage has a parameter that needs a gradient: nothing would be learned", 2);
    }
  }
  // One that has none is nothing special.
  check_all_well(run(over::threads, 2, 1, [&](transport& comm) {
    auto const build = [](int s) { return s == 0 ? build_stage(s) : chevron::stage([](at::Tensor x) { return x.sin(); }); };
    chevron::trainer train(small_model::setup(two, comm, build));
    auto const data = make_batch(8, 1);
    train.step({data.input}, {data.target});
  }));
}

namespace {

/// LibTorch's warnings of this thread.
class heard : public c10::WarningHandler {
 public:
  heard() : before_(c10::WarningUtils::get_warning_handler()) { c10::WarningUtils::set_warning_handler(this); }
  ~heard() override { c10::WarningUtils::set_warning_handler(before_); }
  void process(c10::Warning const& w) override { said.push_back(w.msg()); }
  std::vector<std::string> said;

 private:
  c10::WarningHandler* before_;
};

}  // namespace

TEST_CASE("replicas that are given the same batch: a warning, an error, or neither") {
  enum class given { same, same_inputs, each_its_own };
  auto const first_steps = [](over which, given as, chevron::same_batch when, std::vector<std::string>& heard_of_all) {
    std::mutex mutex;
    return run(which, 2, 3, [&](transport& comm) {
      heard const ears;
      chevron::trainer train(small_model::setup(two, comm, build_stage, {.when_same_batch = when}));
      for (int step = 0; step < 2; ++step) {
        int const replica = comm.topology().replica();
        // Replicas 0 and 2, or none.
        auto mine = make_batch(8, 10 * step + (as == given::each_its_own ? replica : replica % 2));
        if (as == given::same_inputs) mine.target = mine.target + replica;
        train.step({mine.input}, {mine.target});
      }
      std::lock_guard const hold(mutex);
      heard_of_all.insert(heard_of_all.end(), ears.said.begin(), ears.said.end());
    });
  };
  for (over const which : {over::threads, over::gloo}) {
    std::vector<std::string> said;
    check_all_well(first_steps(which, given::same, chevron::same_batch::warn, said));
    REQUIRE(said.size() == 1);
    CHECK(said[0].find("replicas 0 and 2 were given the same batch, so the step's gradient is that of fewer samples") == 0);
    check_all_say(first_steps(which, given::same, chevron::same_batch::stop, said),
                  "step 0, OPTIMIZER_STEP: replicas 0 and 2 were given the same batch");
    said.clear();
    check_all_well(first_steps(which, given::same, chevron::same_batch::allow, said));
    check_all_well(first_steps(which, given::each_its_own, chevron::same_batch::stop, said));
    check_all_well(first_steps(which, given::same_inputs, chevron::same_batch::stop, said));
    CHECK(said.empty());
  }
  // One rank in each replica: nothing else is compared.
  check_all_say(run(over::threads, 1, 2,
                    [&](transport& comm) {
                      chevron::trainer train(small_model::setup(plan_of("1F1B", 1, 2), comm, build_stage,
                                                                {.when_same_batch = chevron::same_batch::stop}));
                      auto const mine = make_batch(8, 1);
                      train.step({mine.input}, {mine.target});
                    }),
                "replicas 0 and 1 were given the same batch");
}
