#include "support/small_model.hpp"

#include <map>

#include <torch/nn/modules/embedding.h>

#include <chevron/transports/gloo/gloo_transport.hpp>

#include "support/thread_ranks.hpp"

#include <doctest/doctest.h>

using namespace small_model;

namespace {

constexpr std::size_t weight = 2;  // of build_stage's parameters: the linear map's
constexpr char const* weight_name = "1.weight";

/// The un-pipelined model whose `shared` stages have one weight: its gradient is the sum over the stages, in their order.
struct tied_reference : reference {
  std::vector<int> shared;

  tied_reference(int count, std::vector<int> stages_that_share) : reference(count), shared(std::move(stages_that_share)) {
    for (std::size_t k = 1; k < shared.size(); ++k) weight_of(k).detach().copy_(weight_of(0));
  }

  at::Tensor weight_of(std::size_t k) { return stages[static_cast<std::size_t>(shared[k])].parameters()[weight].value; }
  at::Tensor& gradient_of(std::size_t k) { return gradients[static_cast<std::size_t>(shared[k])][weight]; }

  void run(chevron::plan const& p, std::vector<batch> const& replicas, long step = 0) {
    reference::run(p, replicas, step);
    at::Tensor const total = gradient_of(0).clone();
    for (std::size_t k = 1; k < shared.size(); ++k) total.add_(gradient_of(k));
    double squares = 0;
    for (std::size_t s = 0; s < gradients.size(); ++s) {
      for (std::size_t q = 0; q < gradients[s].size(); ++q) {
        bool const tied = q == weight && std::find(shared.begin(), shared.end(), static_cast<int>(s)) != shared.end();
        if (tied) gradients[s][q].copy_(total);
        if (!tied || static_cast<int>(s) == shared[0]) squares += chevron::sum_of_squares(gradients[s][q]);
      }
    }
    grad_norm = std::sqrt(squares);
  }
};

/// Builds the stages of one rank. `one_tensor`: those that share a weight on this rank have one tensor.
builder tied_builder(std::vector<int> const& shared, bool one_tensor) {
  auto const here = std::make_shared<at::Tensor>();
  return [=](int s) -> chevron::stage {
    chevron::stage made = build_stage(s);
    if (std::find(shared.begin(), shared.end(), s) == shared.end()) return made;
    if (!one_tensor) return made.tie(weight_name, "table");
    auto parameters = made.parameters();
    if (here->defined()) {
      parameters[weight].value = *here;
    } else {
      *here = parameters[weight].value;
    }
    auto const with = [=](at::Tensor x) {
      x = at::layer_norm(x, {width}, parameters[0].value, parameters[1].value);
      return at::linear(x, parameters[weight].value, parameters[3].value).tanh().mul(2);
    };
    return chevron::stage(with, parameters).tie(weight_name, "table");
  };
}

}  // namespace

TEST_CASE("a weight shared by stages on any ranks: gradients and norm equal the un-pipelined model's to the last bit") {
  at::set_num_threads(1);
  for (char const* name : schedules) {
    for (int const ranks : {1, 2, 4}) {
      for (int const m : {1, 3, 8}) {
        auto const plan = plan_of(name, ranks, m);
        if (plan.stages < 2) continue;
        auto const data = make_batch(2 * m, m);
        std::vector<std::vector<int>> sets{{0, plan.stages - 1}};
        if (plan.stages >= 4) sets.push_back({0, 1, plan.stages - 1});
        for (auto const& shared : sets) {
          tied_reference whole(plan.stages, shared);
          whole.run(plan, {data});
          for (bool const one_tensor : {false, true}) {
            complaints wrong;
            chevron::run_threads({.pipeline_ranks = ranks, .rendezvous = true}, [&](transport& comm) {
              compare_one_step(comm, plan, data, whole, wrong, tied_builder(shared, one_tensor));
            });
            for (auto const& w : wrong.all) FAIL_CHECK("shared by " << shared.size() << ", " << w);
          }
        }
      }
    }
  }
}

TEST_CASE("three ranks that share a weight, over Gloo, in shared memory and without") {
  auto const plan = plan_of("ZB-H1", 3, 2);
  auto const data = make_batch(4, 9);
  tied_reference whole(3, {0, 1, 2});
  whole.run(plan, {data});
  for (bool const near : {true, false}) {
    complaints wrong;
    auto const said = thread_ranks::said(thread_ranks::run(3, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
      chevron::gloo_transport comm(where, store, watch, {.shared_memory = near});
      comm.deadline(std::chrono::seconds(60));
      compare_one_step(comm, plan, data, whole, wrong, tied_builder({0, 1, 2}, false));
      comm.close();
    }));
    for (auto const& each : said) CHECK(each == "");
    for (auto const& w : wrong.all) FAIL_CHECK(w);
  }
}

TEST_CASE("a parameter registered twice is tied by either name") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const data = make_batch(4, 3);
  tensors ends(2), begins(2);
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    auto const build = [](int s) {
      at::manual_seed(s);
      torch::nn::Linear l(width, width);
      chevron::stage made([l](at::Tensor x) mutable { return l(x).tanh(); },
                          {{"first", l->weight}, {"second", l->weight}, {"bias", l->bias}});
      return made.tie(s == 0 ? "second" : "first", "table");
    };
    chevron::trainer train(small_model::setup(plan, comm, build, {}, adamw));
    auto const r = static_cast<std::size_t>(comm.topology().pipeline_rank());
    auto const weight_here = [&] { return train.stages()[r].parameters()[0].value.detach().clone(); };
    begins[r] = weight_here();
    for (int step = 0; step < 3; ++step) train.step({data.input}, {data.target});
    ends[r] = weight_here();
  });
  CHECK(at::equal(begins[0], begins[1]));
  CHECK(at::equal(ends[0], ends[1]));
  CHECK(!at::equal(ends[0], begins[0]));
}

TEST_CASE("twenty steps of AdamW with clipping: the copies stay equal, replicas and evaluation included") {
  for (char const* name : {"1F1B", "ZBVZeroBubble", "Interleaved1F1B", "ZB-H1"}) {
    for (bool const later : {false, true}) {  // post-validation
      auto const plan = plan_of(name, 2, 3);
      std::vector<int> const shared{0, plan.stages - 1};
      std::vector<batch> const data{make_batch(7, 70), make_batch(7, 71)};
      tied_reference whole(plan.stages, shared);
      tensors all;
      for (auto& s : whole.stages) {
        for (auto& q : s.parameters()) {
          if (!(all.size() > weight && &s == &whole.stages.back() && q.name == weight_name)) all.push_back(q.value);
        }
      }
      auto const optimizer = adamw(all);
      std::vector<double> losses, norms;
      for (int step = 0; step < 20; ++step) {
        whole.run(plan, data, step);
        losses.push_back(whole.loss);
        norms.push_back(whole.grad_norm);
        if (whole.grad_norm > curve::clip) {
          for (auto& p : all) p.mutable_grad().mul_(curve::clip / (whole.grad_norm + 1e-6));
        }
        optimizer->param_groups()[0].options().set_lr(curve::rate(step));
        optimizer->step();
        whole.weight_of(1).detach().copy_(whole.weight_of(0));
      }
      CHECK(losses.back() < losses.front());
      complaints wrong;
      std::mutex mutex;
      std::map<int, at::Tensor> ends;
      auto const program = chevron::lower(chevron::prove(plan));
      auto const forward = chevron::lower(chevron::prove(chevron::forward_part(plan_of(name, 2, 4))));
      chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
        chevron::trainer train(
            {.program = program,
             .transport = comm,
             .stages = tied_builder(shared, true),
             .loss = mean_square,
             .optimizer = adamw,
             .options = {
                 .clip_grad_norm = curve::clip, .learning_rate = curve::rate, .post_validation = later, .stable_steps = 1}});
        chevron::evaluator evaluate(forward, train);
        auto const& mine = data[static_cast<std::size_t>(comm.topology().replica())];
        for (std::size_t step = 0; step < losses.size(); ++step) {
          train.step({mine.input}, {mine.target});
          auto const report = train.synchronize();
          wrong.require(report.loss == losses[step], "loss of step " + std::to_string(step));
          wrong.require(report.grad_norm == norms[step], "norm of step " + std::to_string(step));
          if (step % 7 == 0) evaluate.loss({mine.input}, {mine.target});
        }
        std::lock_guard const hold(mutex);
        for (std::size_t s : {std::size_t{0}, static_cast<std::size_t>(plan.stages - 1)}) {
          if (train.stages()[s])
            ends[100 * comm.topology().replica() + static_cast<int>(s)] =
                train.stages()[s].parameters()[weight].value.detach().clone();
        }
      });
      for (auto const& w : wrong.all) FAIL_CHECK(name << ": " << w);
      CHECK(ends.size() == 4);
      for (auto& [where, value] : ends) CHECK_MESSAGE(at::equal(value, whole.weight_of(0)), name << " " << where);
    }
  }
}

TEST_CASE("an embedding and a head are one table, and begin with the embedding's values") {
  // Six words; the head's weight has the embedding's shape.
  auto const plan = plan_of("1F1B", 2, 2);
  std::vector<at::Tensor> seen(2);
  at::Tensor const ids = at::arange(6).view({6}), next = at::roll(ids, 1);
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    auto const build = [&](int s) -> chevron::stage {
      at::manual_seed(s);
      if (s == 0) return chevron::stage(torch::nn::Embedding(6, width)).tie("weight", "words");
      return chevron::stage(torch::nn::Linear(torch::nn::LinearOptions(width, 6).bias(false))).tie("weight", "words");
    };
    auto const loss = [](at::Tensor logits, at::Tensor word) { return at::cross_entropy_loss(logits, word); };
    chevron::trainer train(
        {.program = chevron::lower(chevron::prove(plan)), .transport = comm, .stages = build, .loss = loss, .optimizer = adamw});
    for (int step = 0; step < 3; ++step) train.step({ids}, {next});
    auto const r = static_cast<std::size_t>(comm.topology().pipeline_rank());
    seen[r] = train.stages()[r].parameters()[0].value.detach().clone();
  });
  CHECK(at::equal(seen[0], seen[1]));
}

TEST_CASE("ties that make no sense are refused on all ranks alike") {
  auto const run = [](char const* name, builder const& build, int replicas = 1) {
    auto const plan = plan_of(name, 2, 2);
    std::mutex mutex;
    std::vector<std::string> said;
    chevron::run_threads({.pipeline_ranks = 2, .replicas = replicas}, [&](transport& comm) {
      try {
        chevron::trainer(small_model::setup(plan, comm, build));
      } catch (chevron::usage_error const& e) {
        std::lock_guard const hold(mutex);
        said.push_back(e.what());
      }
    });
    CHECK(said.size() == static_cast<std::size_t>(2 * replicas));
    for (auto const& each : said) CHECK(each == said.front());
    return said.empty() ? std::string() : said.front();
  };
  CHECK(run("1F1B", [](int s) {
          return s == 0 ? build_stage(s).tie(weight_name, "table") : build_stage(s);
        }).find("of all parameters only stage 0's 1.weight is tied as `table`") != std::string::npos);
  CHECK(run("1F1B", [](int s) { return chevron::stage(torch::nn::Linear(width, width + s)).tie("weight", "table"); })
            .find("stage 0's weight (Float 6 6) and stage 1's weight (Float 7 6) are tied as `table`, but differ") !=
        std::string::npos);
  CHECK(run("1F1B", [](int s) {
          return chevron::in_sequence({torch::nn::Linear(width, width), torch::nn::Linear(width, width)})
              .tie("0.weight", "t")
              .tie("1.weight", s == 0 ? "t" : "u");
        }).find("stage 0's 1.weight and 0.weight are both tied as `t`") != std::string::npos);
  CHECK(run("1F1B", [](int s) {
          torch::nn::Linear l(width, width);
          l->weight.requires_grad_(s == 1);
          return chevron::stage(l).tie("weight", "t");
        }).find("stage 0's weight is tied as `t`, but needs no gradient") != std::string::npos);
  // One tensor on two ranks that are threads: tied or not, both would write to it.
  torch::nn::Linear shared(width, width);
  CHECK(run("1F1B", [&](int) {
          return shared;
        }).find("stage 1's weight on rank 1 and stage 0's weight on rank 0 are one tensor") != std::string::npos);
  CHECK(run("1F1B", [&](int) {
          return chevron::stage(shared).tie("weight", "t").tie("bias", "u");
        }).find("Remedy: build it anew on each rank, and tie the two") != std::string::npos);
  CHECK(run(
            "1F1B", [&](int s) { return s == 0 ? chevron::stage(shared) : build_stage(s); }, 2)
            .find("stage 0's weight on rank 2 and stage 0's weight on rank 0 are one tensor: ranks that are threads would both "
                  "write to it. "
                  "Remedy: build it anew on each rank") != std::string::npos);
  CHECK_THROWS_WITH_AS(build_stage(0).tie("wait", "t"),
                       "a stage has no parameter `wait` to be tied as `t`; it has 0.weight, 0.bias, 1.weight, 1.bias",
                       chevron::usage_error);
  CHECK_THROWS_WITH_AS(build_stage(0).tie(weight_name, "t").tie(weight_name, "u"),
                       "`1.weight` is tied as `t` and cannot be tied as `u`, too", chevron::usage_error);
}
