// Carries between slices: in frozen stages, in fused pairs, of slices that count nothing; and errors, with their messages.
#include "support/sliced_model.hpp"

#include <torch/nn/modules/batchnorm.h>

#include <chevron/tools/replan/auto_schedule.hpp>
#include <chevron/tools/replan/length_schedule.hpp>

#include <doctest/doctest.h>

using namespace sliced_model;
using chevron::transport;
using small_model::mean_square, small_model::sgd;

namespace {

/// A trainer's step against the plain loop's.
void compare(chevron::plan const& plan, builder const& build, plain_run const& how = {},
             chevron::trainer_options const& options = {}, chevron::loss_function const& loss = mean_square,
             std::optional<sequences> given = {}) {
  auto const data = given.value_or(make_sequences(plan.size.micro_batches + 1, 9, 3));
  reference whole(plan.stages, build);
  whole.run(plan, {parts_of(data, plan.size.micro_batches)}, how);
  complaints wrong;
  chevron::run_threads({.pipeline_ranks = plan.size.ranks}, [&](transport& comm) {
    chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                            .transport = comm,
                            .stages = build,
                            .loss = loss,
                            .optimizer = sgd,
                            .options = options});
    auto const report = train.step(data.input, data.target);
    wrong.require(report.loss == whole.loss, words_of(plan) + "loss");
    for (std::size_t s = 0; s < train.stages().size(); ++s) {
      auto const& mine = train.stages()[s].parameters();
      for (std::size_t q = 0; q < mine.size(); ++q)
        wrong.require(!mine[q].value.requires_grad() || at::equal(mine[q].value.grad(), whole.gradients[s][q]),
                      words_of(plan) + "gradient of stage " + std::to_string(s) + " " + mine[q].name);
    }
  });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

chevron::stage frozen(chevron::stage of) {
  for (auto const& p : of.parameters()) p.value.set_requires_grad(false);
  return of;
}

/// The message of a rank's error in its first step.
std::string refused(builder const& build, int slices = 2, chevron::batch const& given = {},
                    chevron::trainer_options const& options = {}) {
  auto const plan = plan_of("Seq1F1B", {.ranks = 2, .micro_batches = 2, .slices = slices});
  auto const data = make_sequences(2, 6, 1);
  try {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(plan, comm, build, options));
      train.step(given.inputs.empty() ? chevron::batch{{data.input}, {data.target}} : given);
    });
  } catch (chevron::usage_error const& e) {
    return e.what();
  }
  return "nothing was thrown";
}
bool has(std::string const& words, char const* part) {
  INFO(words);
  CHECK(words.find(part) != std::string::npos);
  return words.find(part) != std::string::npos;
}

/// Stages with one carry, which `next` makes of a stage's output and of the carry that came.
template <class Next>
builder carrying(Next next) {
  return [next](int number) {
    at::manual_seed(number);
    torch::nn::Linear layer(width, width);
    return chevron::stage(layer,
                          [layer, next](at::Tensor x, at::Tensor state) mutable {
                            at::Tensor const y = layer(state.defined() ? x + state.to(x.dtype()).mean() : x);
                            return std::make_tuple(y, next(y, state));
                          })
        .carries({"state"})
        .independent_slices();  // the mean of a slice is not that of the sequence
  };
}

}  // namespace

TEST_CASE("carries of frozen stages and parts") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1"}) {
    auto const plan = plan_of(name, {.ranks = 3, .micro_batches = 2, .slices = 3});
    for (int lowest = 0; lowest < 3; ++lowest)
      compare(plan, [=](int number) { return number < lowest ? frozen(build_attention(number)) : build_attention(number); });
    for (bool const recomputed : {false, true}) {
      compare(plan, [=](int number) {
        auto lower = build_attention(2 * number), upper = build_attention(2 * number + 1);
        lower.recompute(recomputed);
        upper.recompute(recomputed);
        return chevron::in_sequence({number == 0 ? frozen(lower) : lower, upper});
      });
    }
    // A frozen stage in the middle: gradients pass through its carries.
    compare(plan, [](int number) { return number == 1 ? frozen(build_attention(number)) : build_attention(number); });
  }
}

TEST_CASE("carries of microbatches that alternate, and of fused pairs, whose halves run beside each other") {
  at::set_num_threads(1);
  for (bool const split : {false, true}) {
    auto const plan = alternating(split);
    for (int run = 0; run < 10; ++run) {
      compare(plan, build_attention, {}, {.overlap_pairs = true});
      compare(plan, build_recurrent, {}, {.overlap_pairs = true});
    }
  }
}

TEST_CASE("in half precision the gradient of a carry that slices hand on is summed in single precision and rounded once") {
  // The loss of the last slice weighs 256 times as much as each of the seven before it: 256 + 7 is 264 in bfloat16, and 256 if
  // each addition rounds.
  auto const build = [](bool recomputed, at::ScalarType dtype) {
    return [=](int) {
      at::Tensor weight = at::ones({width}, dtype).set_requires_grad(true);
      auto const forward = [weight](at::Tensor const& x, at::Tensor key) {
        if (!key.defined()) key = weight * 1;
        return std::make_tuple(x * key, key);
      };
      chevron::stage out = chevron::stage(forward, {{"weight", weight}}).carries({"key"});
      if (recomputed) out.recompute();
      return out;
    };
  };
  for (at::ScalarType const dtype : {at::kBFloat16, at::kFloat}) {
    for (auto const& [name, recomputed] :
         {std::pair("Seq1F1B", false), std::pair("Seq1F1B", true), std::pair("SeqZB-H1", false)}) {
      CAPTURE(name);
      CAPTURE(recomputed);
      auto const plan = plan_of(name, {.ranks = 2, .micro_batches = 2, .slices = 8});
      at::Tensor input = at::ones({2, 8, width}, dtype);
      input.select(1, 7).fill_(256);
      complaints wrong;
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                                .transport = comm,
                                .stages = build(recomputed, dtype),
                                .loss = [](at::Tensor const& y, at::Tensor const&) { return y.sum(); },
                                .optimizer = sgd});
        train.step({input}, {input});
        at::Tensor const gradient =
            train.stages()[static_cast<std::size_t>(comm.topology().pipeline_rank())].parameters()[0].value.grad();
        // Each slice weighs an eighth of a microbatch, each microbatch half of the batch.
        double const wanted = (dtype == at::kBFloat16 ? 264 : 263) / 8.0;
        wrong.require(
            at::equal(gradient.to(at::kDouble), at::full({width}, wanted, at::kDouble)),
            "rank " + std::to_string(comm.topology().pipeline_rank()) + ": " + std::to_string(gradient[0].item<double>()));
      });
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    }
  }
}

TEST_CASE("slices that count nothing") {
  at::set_num_threads(1);
  auto const plan = plan_of("SeqZB-H1", {.ranks = 2, .micro_batches = 3, .slices = 3});
  auto data = make_sequences(4, 9, 5);
  data.target.narrow(1, 3, 3).zero_();                  // the middle slice of each
  data.target.narrow(0, 0, 2).narrow(1, 6, 3).zero_();  // and the last one of the first microbatch
  data.target.narrow(0, 3, 1).zero_();                  // and all of the last microbatch
  auto const counts = [](at::Tensor const& target) { return target.select(-1, 0).ne(0).sum().item<double>(); };
  auto const loss = [](at::Tensor y, at::Tensor target) {
    at::Tensor const mask = target.select(-1, 0).ne(0).to(at::kFloat);
    return ((y - target).square().mean(-1) * mask).sum() / mask.sum();
  };
  for (builder const& build : {builder(build_attention), builder(build_recurrent)}) {
    compare(plan, build, {.counts = counts, .loss = loss},
            {.loss_weight = [=](chevron::batch const& b) { return counts(b.targets[0]); }}, loss, data);
  }
}

TEST_CASE("nothing is carried from one step to the next") {
  at::set_num_threads(1);
  auto const plan = plan_of("SeqZB-H1", {.ranks = 2, .micro_batches = 2, .slices = 2});
  auto const data = make_sequences(3, 8, 3);
  reference whole(plan.stages, build_attention);
  auto const optimizer = sgd(whole.parameters());
  std::vector<double> losses;
  for (long step = 0; step < 3; ++step) {
    whole.run(plan, {parts_of(data, 2)}, {.step = step});
    losses.push_back(whole.loss);
    optimizer->step();
  }
  complaints wrong;
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm, build_attention));
    for (double const loss : losses) wrong.require(train.step(data.input, data.target).loss == loss, "loss of a later step");
  });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

TEST_CASE("a plan with one slice, and stages without a carry") {
  at::set_num_threads(1);
  compare(plan_of("ZB-H1", {.ranks = 2, .micro_batches = 3}), build_attention);
  compare(plan_of("ZB-H1", {.ranks = 2, .micro_batches = 3}), build_recurrent);
  compare(plan_of("SeqZB-H1", {.ranks = 2, .micro_batches = 3, .slices = 3}), [](int number) {
    at::manual_seed(number);
    return chevron::stage(torch::nn::Linear(width, width));
  });
}

TEST_CASE("what a stage cannot carry is refused") {
  std::string const fewer = refused([](int) {
    torch::nn::Linear layer(width, width);
    return chevron::stage(layer, [layer](at::Tensor x, at::Tensor, at::Tensor) mutable { return layer(x); })
        .carries({"keys", "values"});
  });
  has(fewer, "1 result");
  has(fewer, "the stage declares the carries `keys`, `values`");
  has(fewer, "Remedy");
  std::string const gone = refused(carrying([](at::Tensor y, at::Tensor state) { return state.defined() ? at::Tensor() : y; }));
  has(gone, "carry `state` is Float before this slice and undefined after it");
  std::string const other =
      refused(carrying([](at::Tensor y, at::Tensor state) { return state.defined() ? y.to(at::kDouble) : y; }));
  has(other, "carry `state` is Float before this slice and Double after it");
  has(refused(carrying([](at::Tensor y, at::Tensor) { return y; })), "nothing was thrown");
  CHECK_THROWS_WITH_AS(small_model::build_stage(0).carries({"a", "a"}), doctest::Contains("two carries `a`"),
                       chevron::usage_error);
  CHECK_THROWS_WITH_AS(small_model::build_stage(0).carries({""}), doctest::Contains("a carry without a name"),
                       chevron::usage_error);
}

TEST_CASE("a carry that changes in place after it was handed on is refused") {
  auto const cache = at::zeros({2});
  auto const data = make_sequences(3, 6, 1);
  try {
    chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
      auto const build = [&](int number) {
        torch::nn::Linear layer(width, width);
        return chevron::stage(
                   layer,
                   [=](at::Tensor x, at::Tensor) mutable { return std::make_tuple(layer(x), number == 0 ? cache.add_(1) : x); })
            .carries({"cache"});
      };
      chevron::trainer train(small_model::setup(alternating(false), comm, build));
      train.step(data.input, data.target);
    });
    FAIL_CHECK("nothing was thrown");
  } catch (chevron::usage_error const& e) {
    has(e.what(), "carry `cache` was changed in place");
  }
}

TEST_CASE("statistics of a batch are refused where it is a slice") {
  auto const build = [](int number) -> chevron::stage {
    at::manual_seed(number);
    return torch::nn::Sequential(
        torch::nn::Linear(width, width), torch::nn::Functional([](at::Tensor const& x) { return x.transpose(1, 2); }),
        torch::nn::BatchNorm1d(width), torch::nn::Functional([](at::Tensor const& x) { return x.transpose(1, 2); }));
  };
  std::string const words = refused(build);
  has(words, "BatchNorm in training");
  has(words, "stage 0");
  has(refused(build, 1), "nothing was thrown");
  has(refused([&](int number) {
        chevron::stage made = build(number);
        made.training(false);
        return made;
      }),
      "nothing was thrown");
}

TEST_CASE("batches that cannot be cut into slices are refused") {
  auto const data = make_sequences(2, 6, 1);
  has(refused(build_attention, 7), "have 6 tokens (dimension 1), too few for 7 slices");
  std::string const shorter = refused(build_attention, 2, {{data.input}, {data.target.narrow(1, 0, 5)}});
  has(shorter, "target 0 of microbatch 0 has 5 tokens (dimension 1) but input 0 has 6");
  has(refused(build_attention, 2, {{data.input.select(2, 0).select(1, 0)}, {data.target.select(2, 0).select(1, 0)}}),
      "has a dimension of tokens");
  auto const cuts = [](std::vector<std::int64_t> where) {
    return chevron::trainer_options{.slice_cuts = [where](chevron::batch const&, std::int64_t, int) { return where; }};
  };
  for (std::vector<std::int64_t> const& where :
       {std::vector<std::int64_t>{}, std::vector<std::int64_t>{0}, std::vector<std::int64_t>{6}, std::vector<std::int64_t>{2, 3}})
    has(refused(build_attention, 2, {}, cuts(where)), "slice_cuts gives [");
  has(refused(build_attention, 2, {}, cuts({2})), "nothing was thrown");
  CHECK_THROWS_AS(chevron::slices_by_cost(1.5), chevron::usage_error);
  CHECK_THROWS_AS(chevron::slices_by_cost(0, 0), chevron::usage_error);
}

TEST_CASE("schedules that are made at run time are refused where there are slices") {
  auto const plan = plan_of("Seq1F1B", {.ranks = 2, .micro_batches = 2, .slices = 2});
  for (bool const by_length : {false, true}) {
    try {
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        chevron::trainer train(small_model::setup(plan, comm, build_attention));
        if (by_length) {
          chevron::length_schedule const planner(train);
        } else {
          chevron::auto_schedule const planner(train);
        }
      });
      FAIL_CHECK("nothing was thrown");
    } catch (chevron::usage_error const& e) {
      has(e.what(), by_length ? "length_schedule plans for whole microbatches" : "auto_schedule plans for whole microbatches");
    }
  }
}
