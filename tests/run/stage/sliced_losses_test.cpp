// Losses of stages in slices of sequences: their gradients, through carries too, and the means that are reported are those of a
// plain loop over slices, to the last bit.
#include "support/sliced_model.hpp"

#include <doctest/doctest.h>

using namespace sliced_model;
using chevron::transport;
using small_model::mean_square, small_model::sgd;

namespace {

constexpr double even_factor = 0.25, ahead_factor = 3;
constexpr int predicting = 1;  // the stage in the middle

/// The tokens of a slice that a prediction within the model is made for.
at::Tensor tokens_ahead(at::Tensor const& target) { return target.select(-1, 0).gt(0.8); }
double count_ahead(chevron::batch const& slice) { return tokens_ahead(slice.targets.at(0)).sum().item<double>(); }

/// Attention that is to use its keys evenly, and in the middle of the model a head that predicts the target.
struct penalized_impl : torch::nn::Module {
  explicit penalized_impl(int number) {
    attention = register_module("attention", make_attention(number));
    at::manual_seed(510 + number);
    gate = register_module("gate", torch::nn::Linear(width, 3));
    if (number == predicting) head = register_module("head", torch::nn::Linear(width, width));
  }
  std::tuple<at::Tensor, at::Tensor, at::Tensor> run(at::Tensor x, at::Tensor const* target, at::Tensor keys, at::Tensor values) {
    auto [y, all_keys, all_values] = attention->forward(x, keys, values);
    chevron::add_loss("even", gate(all_keys).softmax(-1).mean(at::IntArrayRef{0, 1}).square().sum());
    if (target != nullptr) {
      at::Tensor const chosen = tokens_ahead(*target);
      chevron::add_loss("ahead", (head(y) - *target).index({chosen}).square().mean());  // of no tokens: not a number
    }
    return {y, all_keys, all_values};
  }
  std::shared_ptr<attention_impl> attention;
  torch::nn::Linear gate{nullptr}, head{nullptr};
};

chevron::stage build_penalized(int number) {
  auto const module = std::make_shared<penalized_impl>(number);
  if (number != predicting) {
    return chevron::stage(module, [module](at::Tensor x, at::Tensor keys,
                                           at::Tensor values) { return module->run(x, nullptr, keys, values); })
        .losses({{.name = "even", .factor = even_factor}})
        .carries({"keys", "values"});
  }
  return chevron::stage(module, [module](at::Tensor x, at::Tensor target, at::Tensor keys,
                                         at::Tensor values) { return module->run(x, &target, keys, values); })
      .targets()
      .losses({{.name = "even", .factor = even_factor}, {.name = "ahead", .factor = ahead_factor, .weight = count_ahead}})
      .carries({"keys", "values"});
}

/// No token of the middle slices, of three, is predicted within the model, nor any of the first sample's last slice.
sequences data_of(int seed, std::int64_t samples) {
  auto data = make_sequences(samples, 9, seed);
  data.target.narrow(1, 3, 3).select(-1, 0).zero_();
  data.target.narrow(0, 0, 1).narrow(1, 6, 3).select(-1, 0).zero_();
  return data;
}
double counts_of(sequences const& data) { return tokens_ahead(data.target).sum().item<double>(); }

void compare_report(chevron::step_report const& report, reference const& whole, std::string const& where, complaints& wrong) {
  wrong.require(report.loss == whole.loss, where + "loss");
  wrong.require(report.losses.size() == 2 && report.losses[0].name == "even" && report.losses[1].name == "ahead",
                where + "names of losses");
  if (report.losses.size() != 2) return;
  wrong.require(report.losses[0].value == whole.mean_of("even"), where + "mean of `even`");
  wrong.require(report.losses[1].value == whole.mean_of("ahead"), where + "mean of `ahead`");
}

}  // namespace

TEST_CASE("sliced: losses of stages in the middle, with slices that count nothing in them") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1", "GPipe"}) {
    for (bool const recompute : {false, true}) {
      for (int replicas = 1; replicas <= 2; ++replicas) {
        auto const plan = plan_of(name, {.ranks = 3, .micro_batches = 2, .slices = 3});
        std::vector<std::vector<sequences>> parts;
        for (int r = 0; r < replicas; ++r) parts.push_back(parts_of(data_of(r, 3 + r), 2));
        reference whole(plan.stages, build_penalized);
        whole.run(plan, parts);
        REQUIRE(whole.mean_of("ahead") > 0);
        complaints wrong;
        chevron::run_threads({.pipeline_ranks = 3, .replicas = replicas}, [&](transport& comm) {
          chevron::trainer train(small_model::setup(plan, comm, [&](int s) { return build_penalized(s).recompute(recompute); }));
          int const r = comm.topology().replica();
          auto const data = data_of(r, 3 + r);
          auto const report = train.step(data.input, data.target);
          compare_report(report, whole, words_of(plan), wrong);
          compare_gradients(train, whole, words_of(plan), wrong);
        });
        for (auto const& w : wrong.all) FAIL_CHECK(w);
      }
    }
  }
}

TEST_CASE("sliced: losses of stages in batches that are accumulated") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1"}) {
    auto const plan = plan_of(name, {.ranks = 3, .micro_batches = 2, .slices = 3});
    auto const first = data_of(1, 4), second = data_of(2, 3);
    double const ahead = counts_of(first) + counts_of(second);
    chevron::step_total const total{7, {{"ahead", ahead}}};
    reference whole(plan.stages, build_penalized);
    whole.run(plan, {parts_of(first, 2)}, {.total = 7, .loss_totals = total.losses});
    whole.run(plan, {parts_of(second, 2)}, {.total = 7, .loss_totals = total.losses, .first = plan.size.units(), .adds = true});
    complaints wrong;
    chevron::run_threads({.pipeline_ranks = 3}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(plan, comm, build_penalized));
      train.accumulate(first.input, first.target, total);
      auto const report = train.step(second.input, second.target, total);
      compare_gradients(train, whole, words_of(plan), wrong);
      // Means are added up by unit and then over units, not by batch.
      wrong.require(std::abs(report.loss - whole.loss) <= 1e-12, "loss");
      wrong.require(std::abs(report.losses.at(0).value - whole.mean_of("even")) <= 1e-12, "mean of `even`");
      wrong.require(std::abs(report.losses.at(1).value - whole.mean_of("ahead")) <= 1e-12, "mean of `ahead`");
    });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("sliced: tokens that count nothing in the model's loss and in a stage's, in different slices") {
  at::set_num_threads(1);
  auto const counts = [](at::Tensor const& target) { return target.select(-1, 1).gt(0.8).sum().item<double>(); };
  auto const loss = [](at::Tensor y, at::Tensor target) {
    return (y - target).index({target.select(-1, 1).gt(0.8)}).square().mean();
  };
  for (char const* name : {"Seq1F1B", "SeqZB-H1"}) {
    auto const plan = plan_of(name, {.ranks = 3, .micro_batches = 2, .slices = 3});
    auto data = data_of(3, 4);
    data.target.narrow(1, 6, 3).select(-1, 1).zero_();
    reference whole(plan.stages, build_penalized);
    whole.run(plan, {parts_of(data, 2)}, {.counts = counts, .loss = loss});
    complaints wrong;
    chevron::run_threads({.pipeline_ranks = 3}, [&](transport& comm) {
      chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                              .transport = comm,
                              .stages = build_penalized,
                              .loss = loss,
                              .optimizer = sgd,
                              .options = {.loss_weight = [=](chevron::batch const& b) { return counts(b.targets.at(0)); }}});
      // A loss without a weight of its own counts as the model's does: the rank of its stage needs the targets.
      auto const report = train.step(data.input, data.target);
      compare_report(report, whole, words_of(plan), wrong);
      compare_gradients(train, whole, words_of(plan), wrong);
    });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("sliced: a rank in the middle that is given no batch") {
  at::set_num_threads(1);
  auto const plan = plan_of("Seq1F1B", {.ranks = 3, .micro_batches = 2, .slices = 3});
  auto const data = make_sequences(4, 9, 1);
  auto const words = [&](builder const& build) {
    std::string said = "nothing was thrown";
    try {
      chevron::run_threads({.pipeline_ranks = 3}, [&](transport& comm) {
        chevron::trainer train(small_model::setup(plan, comm, build));
        comm.topology().pipeline_rank() == 1 ? train.step() : train.step(data.input, data.target);
      });
    } catch (chevron::usage_error const& e) {
      said = e.what();
    }
    return said;
  };
  CHECK(words(build_attention) == "nothing was thrown");
  auto const with_start = [](int number) {
    auto const module = make_attention(number);
    if (number != 1) return chevron::stage(module).carries({"keys", "values"});
    return chevron::stage(module,
                          [module](at::Tensor x, at::Tensor start, at::Tensor keys, at::Tensor values) {
                            return module->forward(x + 0.01 * start.to(at::kFloat), keys, values);
                          })
        .side_inputs({chevron::slice_start})
        .carries({"keys", "values"});
  };
  std::string const start = words(with_start);
  INFO(start);
  CHECK(
      start.find("asks for `slice_start`, and no tensor of microbatch 0 that this rank was given has tokens (dimension 1), which "
                 "give the beginnings of its 3 slices. Remedy: inputs or targets") != std::string::npos);
  CHECK(words(build_penalized).find("the stage takes the batch's targets, and this rank was given none") != std::string::npos);
}

TEST_CASE("a stage that asks for the first token of its slice is not given a batch by that") {
  at::set_num_threads(1);
  auto const plan = plan_of("1F1B", {.ranks = 3, .micro_batches = 2});
  auto const data = make_sequences(4, 9, 1);
  std::string said;
  try {
    chevron::run_threads({.pipeline_ranks = 3}, [&](transport& comm) {
      auto const build = [](int number) {
        at::manual_seed(number);
        torch::nn::Linear layer(width, width);
        if (number != 1) return chevron::stage(layer);
        return chevron::stage(layer,
                              [layer](at::Tensor x, at::Tensor start) mutable {
                                chevron::add_loss("weighed", layer(x).square().mean());
                                return layer(x) + start;
                              })
            .side_inputs({chevron::slice_start})
            .losses({{.name = "weighed", .weight = [](chevron::batch const& b) { return double(b.inputs.at(0).size(0)); }}});
      };
      chevron::trainer train(small_model::setup(plan, comm, build));
      comm.topology().pipeline_rank() == 1 ? train.step() : train.step(data.input, data.target);
    });
  } catch (chevron::usage_error const& e) {
    said = e.what();
  }
  INFO(said);
  CHECK(said.find("loss `weighed` is weighed by its microbatch's share of the step, and this rank has no tensors to count") !=
        std::string::npos);
}
