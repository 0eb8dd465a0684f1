// Gradients of slices where they meet: in tied parameters of the first and the last stage, whole and split backward, and in the
// shares of a sharded optimizer. Bits are those of a plain loop over slices.
// timeout: 400
#include "support/gloo_ranks.hpp"
#include "support/sliced_model.hpp"

#include <doctest/doctest.h>

using namespace sliced_model;
using chevron::sharding, chevron::transport;
using small_model::adamw, small_model::mean_square, small_model::sgd;

namespace {

constexpr char const* tied_name = "in.weight";

std::size_t place_of(chevron::stage const& owner) {
  auto const& all = owner.parameters();
  auto const found = std::find_if(all.begin(), all.end(), [](auto const& p) { return p.name == tied_name; });
  REQUIRE(found != all.end());
  return static_cast<std::size_t>(found - all.begin());
}

/// The plain loop whose first and last stage have one weight.
struct tied_reference : reference {
  explicit tied_reference(int count, builder const& build) : reference(count, build) {
    value(stages.back()).copy_(value(stages.front()));
  }

  static at::Tensor value(chevron::stage const& owner) { return owner.parameters()[place_of(owner)].value.detach(); }

  void run(chevron::plan const& p, std::vector<std::vector<sequences>> const& replicas, plain_run const& how = {}) {
    reference::run(p, replicas, how);
    std::size_t const first = place_of(stages.front()), last = place_of(stages.back());
    at::Tensor const total = gradients.front()[first] + gradients.back()[last];
    double squares = 0;
    for (std::size_t s = 0; s < gradients.size(); ++s) {
      for (std::size_t q = 0; q < gradients[s].size(); ++q) {
        bool const tied = (s == 0 && q == first) || (s + 1 == gradients.size() && q == last);
        if (tied) gradients[s][q].copy_(total);
        if (!tied || s == 0) squares += chevron::sum_of_squares(gradients[s][q]);
      }
    }
    grad_norm = std::sqrt(squares);
  }
};

builder tied(int stages) {
  return [=](int number) {
    auto made = build_attention(number);
    return number == 0 || number + 1 == stages ? made.tie(tied_name, "table") : made;
  };
}

constexpr int steps = 6;
constexpr double clip = 0.1;

std::vector<std::vector<sequences>> parts_at(int step, int replicas, int micro_batches) {
  std::vector<std::vector<sequences>> parts;
  for (int r = 0; r < replicas; ++r) parts.push_back(parts_of(make_sequences(4 - r, 7 + step % 3, 10 * step + r), micro_batches));
  return parts;
}

/// Some clipped steps of AdamW against the plain loop's: losses, norms, parameters.
void compare_training(chevron::plan const& plan, int replicas, chevron::trainer_options options, bool processes = false) {
  std::string const where = words_of(plan);
  CAPTURE(where);
  CAPTURE(replicas);
  tied_reference whole(plan.stages, build_attention);
  auto const optimizer = adamw(whole.parameters());
  std::vector<double> losses, norms;
  for (int step = 0; step < steps; ++step) {
    whole.run(plan, parts_at(step, replicas, plan.size.micro_batches), {.step = step});
    losses.push_back(whole.loss);
    norms.push_back(whole.grad_norm);
    if (whole.grad_norm > clip) {
      for (auto& p : whole.parameters()) p.mutable_grad().mul_(clip / (whole.grad_norm + 1e-6));
    }
    optimizer->step();
  }
  options.clip_grad_norm = clip;
  complaints wrong;
  auto const rank = [&](transport& comm) {
    std::vector<double> own_losses, own_norms;
    auto own = options;
    own.on_report = [&](chevron::step_report const& report) {
      own_losses.push_back(report.loss);
      own_norms.push_back(report.grad_norm);
    };
    chevron::trainer train(small_model::setup(plan, comm, tied(plan.stages), own, adamw));
    int const r = comm.topology().replica();
    for (int step = 0; step < steps; ++step) {
      auto const data = make_sequences(4 - r, 7 + step % 3, 10 * step + r);
      train.step(data.input, data.target);
    }
    train.synchronize();
    wrong.require(own_losses == losses, where + "losses");
    wrong.require(own_norms == norms, where + "norms");
    int checked = 0;
    for (std::size_t s = 0; s < train.stages().size(); ++s) {
      auto const& mine = train.stages()[s].parameters();
      for (std::size_t q = 0; q < mine.size(); ++q, ++checked)
        wrong.require(at::equal(mine[q].value, whole.stages[s].parameters()[q].value), where + mine[q].name);
    }
    wrong.require(checked > 0, where + "no parameter was compared");
  };
  if (processes) {
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(plan.size.ranks, replicas, gloo_ranks::all_share, rank));
  } else {
    chevron::run_threads({.pipeline_ranks = plan.size.ranks, .replicas = replicas}, rank);
  }
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

}  // namespace

TEST_CASE("sliced: a weight of the first and the last stage, whole and split backward") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1", "GPipe", "SeqInterleaved1F1B"}) {
    for (int const ranks : {2, 3}) {
      for (int const k : {2, 3}) {
        auto const plan = plan_of(name, {.ranks = ranks, .micro_batches = 3, .slices = k});
        tied_reference whole(plan.stages, build_attention);
        whole.run(plan, parts_at(0, 1, 3));
        complaints wrong;
        chevron::run_threads({.pipeline_ranks = ranks}, [&](transport& comm) {
          chevron::trainer train(small_model::setup(plan, comm, tied(plan.stages)));
          auto const data = make_sequences(4, 7, 0);
          auto const report = train.step(data.input, data.target);
          wrong.require(report.loss == whole.loss, words_of(plan) + "loss");
          wrong.require(report.grad_norm == whole.grad_norm, words_of(plan) + "norm");
          compare_gradients(train, whole, words_of(plan), wrong);
        });
        for (auto const& w : wrong.all) FAIL_CHECK(w);
      }
    }
  }
}

TEST_CASE("sliced: stages of one rank that have one weight tensor") {
  at::set_num_threads(1);
  for (char const* name : {"LoopedBFS", "SeqInterleaved1F1B"}) {
    auto const plan = plan_of(name, {.ranks = 1, .micro_batches = 2, .chunks = 2, .slices = 3});
    tied_reference whole(plan.stages, build_attention);
    whole.run(plan, parts_at(0, 1, 2));
    complaints wrong;
    chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
      std::shared_ptr<attention_impl> first;
      auto const build = [&](int number) {
        auto const made = make_attention(number);
        auto parameters = chevron::stage(made).parameters();
        if (number == 0) first = made;
        made->in->weight = first->in->weight;
        parameters[place_of(chevron::stage(made))].value = first->in->weight;
        return chevron::stage([made](at::Tensor x, at::Tensor keys, at::Tensor values) { return made->forward(x, keys, values); },
                              parameters)
            .carries({"keys", "values"})
            .tie(tied_name, "table");
      };
      chevron::trainer train(small_model::setup(plan, comm, build));
      auto const data = make_sequences(4, 7, 0);
      auto const report = train.step(data.input, data.target);
      wrong.require(report.loss == whole.loss, words_of(plan) + "loss");
      compare_gradients(train, whole, words_of(plan), wrong);
    });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("sliced: tied weights with a sharded optimizer, with sharded gradients, and steps that do not wait for each other") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1", "LoopedBFS"}) {
    auto const plan = plan_of(name, {.ranks = 2, .micro_batches = 2, .slices = 3});
    for (sharding const shard : {sharding::nothing, sharding::optimizer, sharding::gradients}) {
      for (bool const ahead : {false, true}) {
        chevron::trainer_options options{};
        options.shard = shard;
        options.post_validation = ahead;
        options.stable_steps = 0;
        options.bucket_bytes = 300;
        compare_training(plan, 2, options);
      }
      compare_training(plan, 2, {.shard = shard}, true);
    }
  }
}
