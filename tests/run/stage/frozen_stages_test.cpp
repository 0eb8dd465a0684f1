// Below the lowest trained parameter nothing is differentiated and nothing is kept: frozen encoders, adapters in upper layers.

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>

#include <chevron/run/comm/threads/run_threads.hpp>
#include <chevron/run/stage/skip.hpp>
#include <chevron/run/train/trainer.hpp>

#include "support/gloo_ranks.hpp"
#include "support/small_model.hpp"

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// Hands its input on, and counts its backwards.
struct counted : torch::autograd::Function<counted> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, std::int64_t place) {
    context->saved_data["place"] = place;
    return x.view_as(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list g) {
    ++*reinterpret_cast<std::atomic<int>*>(context->saved_data["place"].toInt());
    return {g[0], at::Tensor()};
  }
};

struct counts {
  std::array<std::atomic<int>, 4> backwards{}, followed{};  // by stage
};

/// A stage of two parts, each a frozen or trained layer; `seen` counts the inputs that need gradients, and the backwards.
chevron::stage layers(int number, bool first_trained, bool second_trained, counts* seen, int recomputed) {
  at::manual_seed(800 + number);
  std::vector<chevron::stage> parts;
  for (bool const trained : {first_trained, second_trained}) {
    torch::nn::Linear layer(width, width);
    for (at::Tensor& p : layer->parameters()) p.requires_grad_(trained);
    auto const run = [=](at::Tensor x) mutable {
      x = layer(x.tanh());
      if (seen == nullptr) return x;
      auto const at = static_cast<std::size_t>(number);
      if (x.requires_grad()) ++seen->followed[at];
      return counted::apply(x, reinterpret_cast<std::int64_t>(&seen->backwards[at]));
    };
    parts.emplace_back(layer, run);
    parts.back().recompute((recomputed & 1) != 0);
    recomputed /= 2;
  }
  return chevron::in_sequence(std::move(parts));
}

}  // namespace

TEST_CASE("stages below the lowest trained parameter are not differentiated, and all others as in one piece") {
  at::set_num_threads(1);
  constexpr int microbatches = 4;
  for (char const* name : {"GPipe", "1F1B", "ZB-H1", "ZBVZeroBubble"}) {
    auto const plan = plan_of(name, std::string(name) == "ZBVZeroBubble" ? 2 : 4, microbatches);
    auto const data = make_batch(9, 4);
    for (int const recomputed : {0, 1, 2, 3}) {
      // Of stage 2 the second part is trained, and stage 3 is frozen again.
      auto const build = [&](counts* seen, int again) { return [=](int s) { return layers(s, false, s == 2, seen, again); }; };
      reference whole(plan.stages, build(nullptr, 0));
      complaints wrong;
      counts seen;
      auto const rank = [&](transport& comm) {
        chevron::trainer train(small_model::setup(plan, comm, build(&seen, recomputed)));
        for (long step = 0; step < 2; ++step) train.step({data.input}, {data.target});
        if (!train.stages()[2]) return;
        for (auto const& p : train.stages()[2].parameters()) {
          for (auto const& q : whole.stages[2].parameters()) {
            if (p.name == q.name) wrong.require(at::equal(p.value, q.value), std::string(name) + ": " + p.name);
          }
        }
      };
      std::vector<at::Tensor> trained;
      for (at::Tensor const& p : whole.parameters()) {
        if (p.requires_grad()) trained.push_back(p);
      }
      auto const optimizer = sgd(trained);
      for (long step = 0; step < 2; ++step) {
        for (at::Tensor& p : trained) p.mutable_grad() = at::zeros_like(p);
        for (int const m : order_of(plan, 2)) {
          auto const part = chevron::samples_of(data.input.size(0), microbatches, m);
          at::Tensor const y = whole.forward(data.input.narrow(0, part.first, part.count))[0];
          at::Tensor const loss = mean_square(y, data.target.narrow(0, part.first, part.count));
          loss.backward(at::full({}, static_cast<double>(part.count) / static_cast<double>(data.input.size(0))));
        }
        optimizer->step();
      }
      chevron::run_threads({.pipeline_ranks = plan.size.ranks}, rank);
      for (std::size_t s = 0; s < 2; ++s) {
        CHECK(seen.backwards[s] == 0);
        CHECK(seen.followed[s] == 0);
      }
      CHECK(seen.backwards[2] == 2 * microbatches);
      CHECK(seen.followed[2] == 2 * microbatches);  // neither twice nor in its frozen part
      CHECK(seen.backwards[3] == 2 * 2 * microbatches);
      if (recomputed == 0) gloo_ranks::check_all_well(gloo_ranks::on_ranks(plan.size.ranks, 1, gloo_ranks::all_share, rank));
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    }
  }
}

TEST_CASE("a skip connection past frozen stages ends where training begins") {
  at::set_num_threads(1);
  auto const layer_of = [](int s, int lowest) {
    at::manual_seed(900 + s);
    torch::nn::Linear layer(width, width);
    for (at::Tensor& p : layer->parameters()) p.requires_grad_(s >= lowest);
    return layer;
  };
  for (char const* name : {"1F1B", "ZB-H1"}) {
    auto const plan = plan_of(name, 4, 4);
    auto const data = make_batch(8, 6);
    for (int const lowest : {1, 2, 3}) {
      std::vector<torch::nn::Linear> plain;
      for (int s = 0; s < 4; ++s) plain.push_back(layer_of(s, lowest));
      for (int m = 0; m < 4; ++m) {
        at::Tensor const x = data.input.narrow(0, 2 * m, 2);
        at::Tensor y = x;
        for (auto& layer : plain) y = layer(y).tanh();
        mean_square(y + x.sin(), data.target.narrow(0, 2 * m, 2)).backward(at::full({}, 0.25));
      }
      auto const build = chevron::with_skips(
          [&](int s) -> chevron::stage {
            auto layer = layer_of(s, lowest);
            if (s == 0) return {layer, [=](at::Tensor x) mutable { return std::make_tuple(layer(x).tanh(), x.sin()); }};
            if (s == 3) return {layer, [=](at::Tensor x, at::Tensor skip) mutable { return layer(x).tanh() + skip; }};
            return {layer, [=](at::Tensor x) mutable { return layer(x).tanh(); }};
          },
          {{0, 3}});
      complaints wrong;
      chevron::run_threads({.pipeline_ranks = 4}, [&](transport& comm) {
        chevron::trainer train(small_model::setup(plan, comm, build));
        train.step({data.input}, {data.target});
        int const s = comm.topology().global_rank;
        if (s < lowest) return;
        at::Tensor const& mine = train.stages()[static_cast<std::size_t>(s)].parameters()[0].value;
        wrong.require(at::equal(mine.grad(), plain[static_cast<std::size_t>(s)]->weight.grad()),
                      "stage " + std::to_string(s) + " above " + std::to_string(lowest));
      });
      for (auto const& w : wrong.all) FAIL_CHECK(w);
    }
  }
}
