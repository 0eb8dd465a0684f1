// Copies of a parameter that must stay equal: on all replicas of its stage, and wherever it is tied. Whatever makes them part is
// found, with stage, tensor and ranks.

#include "support/rank_ends.hpp"
#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <chevron/checkpoint.hpp>
#include <chevron/run/core/tensor_fingerprint.hpp>

#include <doctest/doctest.h>

using namespace small_model;
using namespace rank_ends;

namespace {

constexpr std::size_t weight = 2;  // of build_stage's parameters: the linear map's
std::vector<over> const both{over::threads, over::gloo};

chevron::stage tied_ends(int s, int stages) {
  chevron::stage made = build_stage(s);
  return s == 0 || s == stages - 1 ? made.tie("1.weight", "words") : made;
}

/// AdamW with options for each parameter.
chevron::optimizer_factory by_parameter(std::function<torch::optim::AdamWOptions(chevron::named_parameter const&)> of) {
  return [of = std::move(of)](std::vector<chevron::named_parameter> const& all) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (auto const& p : all)
      groups.emplace_back(std::vector<at::Tensor>{p.value}, std::make_unique<torch::optim::AdamWOptions>(of(p)));
    return std::make_unique<torch::optim::AdamW>(groups);
  };
}

/// Some steps of a small model; `between(trainer, step)` comes before each.
struct training {
  chevron::plan plan = plan_of("1F1B", 2, 2);
  int replicas = 1, steps = 4;
  chevron::optimizer_factory make = adamw;
  chevron::trainer_options options = {};
  bool tied = false;
  std::function<void(chevron::trainer&, int)> between = [](auto&, int) {};

  ends over_all(over which) const {
    return rank_ends::run(which, plan.size.ranks, replicas, [this](transport& comm) {
      chevron::trainer_options mine = options;
      chevron::trainer train(small_model::setup(
          plan, comm, [this](int s) { return tied ? tied_ends(s, plan.stages) : build_stage(s); }, mine, make));
      auto const data = make_batch(4, comm.topology().replica());
      for (int step = 0; step < steps; ++step) {
        between(train, step);
        train.step({data.input}, {data.target});
      }
      train.synchronize();
    });
  }
};

/// Lets one rank of a job do something before a step.
std::function<void(chevron::trainer&, int)> at_rank(int rank, int step, std::function<void(chevron::trainer&)> act) {
  return [=](chevron::trainer& train, int now) {
    at::NoGradGuard const off;
    if (now == step && train.comm().topology().global_rank == rank) act(train);
  };
}
void change(chevron::trainer& train) {
  for (chevron::stage& s : train.stages()) {
    if (s) s.parameters()[weight].value[0][0] += 1e-6;
  }
}
void change_rate(chevron::trainer& train) {
  for (auto& group : train.optimizer()->param_groups()) group.options().set_lr(0.5);
}
void change_state(chevron::trainer& train) {
  for (auto& [key, state] : train.optimizer()->state()) chevron::detail::tensors_of(*state)[0].mul_(2);
}

}  // namespace

TEST_CASE("tied parameters in groups of different options are refused when the trainer is made") {
  using adamw_options = torch::optim::AdamWOptions;
  for (over const which : both) {
    training job{.tied = true};
    job.make = by_parameter([](auto const& p) { return adamw_options(1e-2).weight_decay(p.stage == 0 ? 0 : 0.1); });
    check_all_say(
        job.over_all(which),
        "stage 0's 1.weight on rank 0 is stepped with weight decay 0 and stage 1's 1.weight on rank 1 with weight decay 0.1, "
        "but they are tied as `words` and would not stay equal. Remedy: groups",
        2);
    job.make = by_parameter([](auto const& p) { return adamw_options(p.stage == 0 ? 1e-3 : 1e-2); });
    check_all_say(job.over_all(which), "with learning rate 0.001 and stage 1's 1.weight on rank 1 with learning rate 0.01", 2);
    // Of two stages on one rank.
    job.plan = plan_of("ZBVZeroBubble", 2, 2);
    job.make = by_parameter([](auto const& p) { return adamw_options(1e-2 / (4 - p.stage)); });
    check_all_say(job.over_all(which),
                  "stage 0's 1.weight on rank 0 is stepped with learning rate 0.0025 and stage 3's 1.weight on rank 0", 2);
  }
  // A parameter in no group of the optimizer is not stepped.
  training job{.tied = true};
  job.make = [](std::vector<chevron::named_parameter> const& all) {
    std::vector<at::Tensor> some;
    for (auto const& p : all) {
      if (p.stage == 0 || p.name != "1.weight") some.push_back(p.value);
    }
    return std::make_unique<torch::optim::AdamW>(some, torch::optim::AdamWOptions(1e-2));
  };
  check_all_say(job.over_all(over::threads), "with AdamW and stage 1's 1.weight on rank 1 with no optimizer", 2);
}

TEST_CASE("groups by name that treat all copies alike train, and copies stay equal") {
  for (char const* const name : {"1F1B", "ZBVZeroBubble"}) {
    training job{.plan = plan_of(name, 2, 2), .options = {.check_copies = 1}, .tied = true};
    job.make = by_parameter([](auto const& p) {
      bool const tied = p.name == "1.weight";
      return torch::optim::AdamWOptions(tied ? 1e-3 : 1e-2).weight_decay(tied ? 0 : 0.1);
    });
    for (over const which : both) check_all_well(job.over_all(which));
  }
}

TEST_CASE("options that part while training are found by the step that would use them, on every rank") {
  for (over const which : both) {
    for (bool const later : {false, true}) {
      chevron::trainer_options const options{.post_validation = later, .stable_steps = 0};
      training tied{.options = options, .tied = true, .between = at_rank(1, 2, change_rate)};
      check_all_say(tied.over_all(which),
                    "step 2, OPTIMIZER_STEP: stage 0's 1.weight on rank 0 is stepped with learning rate 0.01", 2);
      training replicated{.replicas = 2, .options = options, .between = at_rank(1, 2, change_rate)};
      check_all_say(
          replicated.over_all(which),
          "step 2, OPTIMIZER_STEP: stage 1's 0.weight on rank 1 is stepped with learning rate 0.5 and stage 1's 0.weight on "
          "rank 3 with learning rate 0.01, but they are copies of one");
      replicated.between = at_rank(2, 1, [](chevron::trainer& train) {
        static_cast<torch::optim::AdamWOptions&>(train.optimizer()->param_groups()[0].options()).weight_decay(0.25);
      });
      check_all_say(replicated.over_all(which),
                    "step 1, OPTIMIZER_STEP: stage 0's 0.weight on rank 0 is stepped with weight decay 0.01");
    }
  }
}

TEST_CASE("a schedule of learning rates gives all ranks one") {
  for (over const which : both) {
    auto const e = rank_ends::run(which, 2, 2, [](transport& comm) {
      int const rank = comm.topology().global_rank;
      chevron::trainer train(small_model::setup(plan_of("1F1B", 2, 2), comm, build_stage, {.learning_rate = [rank](long step) {
                                                  return rank == 3 && step == 1 ? 0.5 : 0.25;
                                                }}));
      auto const data = make_batch(4, 1);
      for (int step = 0; step < 3; ++step) train.step({data.input}, {data.target});
    });
    check_all_say(e, "step 1, OPTIMIZER_STEP: trainer_options::learning_rate gives rank 0 0.25 for this step and rank 3 0.5");
  }
}

TEST_CASE("values and states that part are found in the next step that compares them") {
  for (over const which : both) {
    for (bool const later : {false, true}) {
      chevron::trainer_options const options{.post_validation = later, .stable_steps = 0, .check_copies = 2};
      auto const settled = [](auto act) {
        return [act](chevron::trainer& train, int step) { train.synchronize(), act(train, step); };
      };
      training job{.replicas = 2, .options = options, .between = settled(at_rank(3, 0, change))};
      check_all_say(
          job.over_all(which),
          "step 0, OPTIMIZER_STEP: the values of stage 1's 1.weight on rank 1 and stage 1's 1.weight on rank 3 differ, which "
          "are copies of one: copies of a parameter must stay equal. Remedy: ");
      job.between = settled(at_rank(0, 1, change_state));
      check_all_say(job.over_all(which), "step 2, OPTIMIZER_STEP: the values of stage 0's");  // a step later they part, too
      job.between = settled(at_rank(0, 2, change_state));
      check_all_say(
          job.over_all(which),
          "step 2, OPTIMIZER_STEP: the optimizer's states of stage 0's 0.weight on rank 0 and stage 0's 0.weight on rank 2 "
          "differ");
      training tied{.options = options, .tied = true, .between = settled(at_rank(1, 2, change))};
      check_all_say(
          tied.over_all(which),
          "step 2, OPTIMIZER_STEP: the values of stage 0's 1.weight on rank 0 and stage 1's 1.weight on rank 1 differ, which are "
          "tied as `words`");
    }
  }
}

TEST_CASE("a gradient emptied on one replica, and weights that are not trained, are found too") {
  training const job;
  auto const e = rank_ends::run(over::threads, 2, 2, [&](transport& comm) {
    chevron::trainer train(small_model::setup(job.plan, comm, build_stage,
                                              {.before_optimizer_step =
                                                   [&](chevron::final_gradients const& seen) {
                                                     if (comm.topology().global_rank == 2)
                                                       seen.parameters[weight].value.grad().zero_();
                                                   },
                                               .check_copies = 1}));
    auto const data = make_batch(4, 1);
    for (int step = 0; step < 2; ++step) train.step({data.input}, {data.target});
  });
  check_all_say(e, "step 1, OPTIMIZER_STEP: the values of stage 0's 1.weight on rank 0 and stage 0's 1.weight on rank 2 differ");

  auto const frozen = rank_ends::run(over::threads, 2, 2, [&](transport& comm) {
    chevron::trainer train({.program = chevron::lower(chevron::prove(job.plan)),
                            .transport = comm,
                            .stages =
                                [](int s) {
                                  chevron::stage made = build_stage(s);
                                  if (s == 0) made.parameters()[weight].value.set_requires_grad(false);
                                  return made;
                                },
                            .loss = mean_square,
                            .optimizer = sgd});
    if (comm.topology().global_rank == 2) change(train);
    auto const data = make_batch(4, 1);
    train.step({data.input}, {data.target});
  });
  check_all_say(frozen, "step 0, OPTIMIZER_STEP: the values of stage 0's 1.weight on rank 0");
}

TEST_CASE("no parameter is changed by the step that finds it, and without check_copies nothing is compared") {
  tensors before(4), after(4);
  training job{.replicas = 2, .options = {.check_copies = 1}};
  auto const keep = [](chevron::trainer& train, tensors& to) {
    for (auto& s : train.stages()) {
      if (s) to[static_cast<std::size_t>(train.comm().topology().global_rank)] = s.parameters()[weight].value.detach().clone();
    }
  };
  job.between = [&](chevron::trainer& train, int step) {
    at_rank(2, 1, change)(train, step);
    if (step != 1) return;
    keep(train, before);
    auto const data = make_batch(4, 1);
    try {
      train.step({data.input}, {data.target});
    } catch (chevron::preflight_error const&) {
      keep(train, after);
      throw;
    }
  };
  check_all_say(job.over_all(over::threads), "step 1, OPTIMIZER_STEP: the values of stage 0's 1.weight");
  for (std::size_t r = 0; r < 4; ++r) CHECK(at::equal(before[r], after[r]));

  job.options.check_copies = 0;
  job.between = at_rank(2, 0, change);
  check_all_well(job.over_all(over::threads));
  job.between = [](chevron::trainer& train, int step) {
    at_rank(2, 3, change)(train, step);
    if (step == 3) train.check_copies();
  };
  check_all_say(job.over_all(over::gloo), "step 3, check_copies: the values of stage 0's 1.weight on rank 0");
  job.options.check_copies = -1;
  check_all_say(job.over_all(over::threads), "check_copies is -1: give a number of steps from 0", 2);
}

TEST_CASE("copies that differ are not saved") {
  scratch_folder const folder;
  for (over const which : both) {
    for (bool const weights : {false, true}) {
      auto const save = [&](chevron::trainer& train, int step) {
        at_rank(1, 3, change)(train, step);
        if (step != 3) return;
        if (weights) {
          chevron::save_weights(train, folder.path / "weights",
                                [](std::size_t s, std::string const& name) { return std::to_string(s) + name; });
        } else {
          chevron::save_checkpoint(train, folder.path / "checkpoint");
        }
      };
      std::string const where = std::string("step 3, ") + (weights ? "save_weights" : "save_checkpoint") + ": ";
      training tied{.tied = true, .between = save};
      check_all_say(tied.over_all(which),
                    where + "the values of stage 0's 1.weight on rank 0 and stage 1's 1.weight on rank 1 differ, which are tied");
      training replicated{.replicas = 2, .between = save};
      check_all_say(replicated.over_all(which),
                    where + "the values of stage 1's 1.weight on rank 1 and stage 1's 1.weight on rank 3 differ");
      CHECK(!std::filesystem::exists(folder.path / "weights"));
      CHECK(!std::filesystem::exists(folder.path / "checkpoint"));
    }
  }
}

TEST_CASE("a fingerprint is changed by every bit and every place, and is the same for the same values wherever they lie") {
  auto const draw = [](at::ScalarType type) {
    return at::randint(0, type == at::kBool ? 2 : 256, {3, 5, 16}, at::kByte).view(type);
  };
  for (auto const type : {at::kByte, at::kChar, at::kBool, at::kShort, at::kHalf, at::kBFloat16, at::kInt, at::kFloat, at::kLong,
                          at::kDouble, at::kComplexFloat, at::kComplexDouble}) {
    CAPTURE(type);
    at::Tensor const t = draw(type);
    std::uint64_t const known = chevron::fingerprint(t);
    CHECK(chevron::fingerprint(t.clone()) == known);
    CHECK(chevron::fingerprint(t.transpose(0, 2).contiguous().transpose(0, 2)) == known);
    at::Tensor const bytes = t.view(at::kByte);
    for (std::int64_t i = 0; i < bytes.numel(); i += 7) {
      at::Tensor const other = t.clone();
      other.view(at::kByte).view(-1)[i].bitwise_xor_(1 << i % 8);
      CHECK(chevron::fingerprint(other) != known);
    }
    CHECK(chevron::fingerprint(at::roll(t, 1, 0)) != known);
    // As an accelerator computes it, in pieces of any size.
    for (std::int64_t const elements : {std::int64_t{0}, std::int64_t{1}, std::int64_t{3}, t.numel()}) {
      at::Tensor const row = chevron::detail::in_a_row(t).narrow(0, t.numel() - elements, elements);
      for (std::int64_t const piece : {1, 7, 10000}) {
        at::Tensor const sums = chevron::detail::sums_on_device(row, piece);
        chevron::detail::word_sums const both_sums{static_cast<std::uint64_t>(sums[0].item<std::int64_t>()),
                                                   static_cast<std::uint64_t>(sums[1].item<std::int64_t>())};
        CHECK(both_sums.fingerprint(row.nbytes()) == chevron::fingerprint(row));
      }
    }
  }
}
