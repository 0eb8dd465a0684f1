#pragma once

// A small model cut into stages, and the same model un-pipelined, by plain autograd, for tests of the trainer.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/run.hpp>

#include <cmath>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace small_model {

using chevron::tensors;
using chevron::transport;

/// Every schedule of the catalogue, by name.
inline std::vector<char const*> const schedules = [] {
  std::vector<char const*> names;
  chevron::catalogue::for_each([&](auto const& one) { names.push_back(one.name); });
  return names;
}();
inline constexpr int width = 6;

inline chevron::stage build_stage(int number) {
  at::manual_seed(100 + number);
  return torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})), torch::nn::Linear(width, width),
                               torch::nn::Functional([](at::Tensor const& x) { return x.tanh().mul(2); }));
}

/// A stage in two parts that drop units at random. `recomputed`: 1 for the first part, 2 for the second, 3 for both.
inline chevron::stage build_dropping_stage(int number, int recomputed = 0) {
  at::manual_seed(200 + number);
  chevron::stage first = torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})),
                                               torch::nn::Linear(width, 2 * width), torch::nn::Dropout(0.3));
  chevron::stage second = torch::nn::Sequential(torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }),
                                                torch::nn::Linear(2 * width, width), torch::nn::Dropout(0.2));
  first.recompute((recomputed & 1) != 0);
  second.recompute((recomputed & 2) != 0);
  return chevron::in_sequence({first, second});
}

using builder = std::function<chevron::stage(int)>;

inline at::Tensor mean_square(at::Tensor output, at::Tensor target) { return at::mse_loss(output, target); }

struct batch {
  at::Tensor input, target;
};

inline batch make_batch(std::int64_t samples, int seed) {
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed));
  return {at::randn({samples, width}, generator), at::randn({samples, width}, generator)};
}

inline chevron::plan plan_of(char const* name, int ranks, int micro_batches) {
  auto plan = chevron::catalogue::make_plan(name, {.ranks = ranks, .micro_batches = micro_batches});
  auto const found = chevron::check(plan);
  if (found) throw std::runtime_error(chevron::describe(found).str());
  return plan;
}

/// The order in which a stage's gradients are added up: that of its B's or W's.
inline std::vector<int> order_of(chevron::plan const& p, int stage) {
  std::vector<int> order;
  for (int i = 0; i < p.view().total(); ++i) {
    auto const a = p.actions.data[i];
    bool const adds = a.kind == chevron::kind::backward || a.kind == chevron::kind::backward_weight;
    if (adds && static_cast<int>(a.stage) == stage) order.push_back(static_cast<int>(a.micro_batch));
  }
  return order;
}

inline tensors parameters_of(std::vector<chevron::stage>& stages) {
  tensors all;
  for (chevron::stage& s : stages) {
    for (chevron::parameter const& q : s.parameters()) all.push_back(q.value);
  }
  return all;
}

/// The un-pipelined model: all stages in a row, plain autograd, one microbatch after the other. It draws random numbers where the
/// pipelined one does: by step, replica, stage and microbatch.
struct reference {
  std::vector<chevron::stage> stages;
  std::vector<tensors> gradients;  // by stage, by parameter
  double loss = 0, grad_norm = 0;

  explicit reference(int count, builder const& build = build_stage) {
    for (int s = 0; s < count; ++s) stages.push_back(build(s));
  }

  tensors forward(at::Tensor const& input, chevron::rng_key draws = {}, chevron::node_places* places = nullptr) {
    tensors values{input}, next;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      draws.stage = static_cast<int>(s);
      stages[s].forward(values, next, {.draws = draws, .places = places});
      values = next;
    }
    return values;
  }

  void run(chevron::plan const& p, std::vector<batch> const& replicas, long step = 0) {
    int const m_count = p.size.micro_batches;
    double all = 0;
    for (auto const& b : replicas) all += static_cast<double>(b.input.size(0));
    loss = 0;
    std::vector<std::vector<tensors>> sums;  // by replica, stage, parameter
    for (int replica = 0; replica < static_cast<int>(replicas.size()); ++replica) {
      auto const& b = replicas[static_cast<std::size_t>(replica)];
      std::vector<std::vector<tensors>> each;  // by microbatch, stage, parameter
      for (int m = 0; m < m_count; ++m) {
        auto const part = chevron::samples_of(b.input.size(0), m_count, m);
        chevron::node_places places;
        auto const output =
            forward(b.input.narrow(0, part.first, part.count), {.step = step, .replica = replica, .micro_batch = m}, &places)[0];
        auto const value = mean_square(output, b.target.narrow(0, part.first, part.count));
        double const weight = static_cast<double>(part.count) / all;
        loss += value.item<double>() * weight;
        for (auto& s : stages) {
          for (auto& q : s.parameters()) q.value.mutable_grad().reset();
        }
        {
          chevron::backward_scope const scope(places);
          torch::autograd::backward({value}, {at::full({}, weight)});
        }
        each.emplace_back();
        for (auto& s : stages) {
          each.back().emplace_back();
          for (auto& q : s.parameters())
            each.back().back().push_back(q.value.grad().defined() ? q.value.grad().clone() : at::zeros_like(q.value));
        }
      }
      sums.emplace_back();
      for (std::size_t s = 0; s < stages.size(); ++s) {
        sums.back().emplace_back();
        for (std::size_t q = 0; q < stages[s].parameters().size(); ++q) {
          at::Tensor sum = at::zeros_like(each[0][s][q]);
          for (int const m : order_of(p, static_cast<int>(s))) sum += each[static_cast<std::size_t>(m)][s][q];
          sums.back()[s].push_back(sum);
        }
      }
    }
    gradients = sums[0];
    double squares = 0;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      for (std::size_t q = 0; q < gradients[s].size(); ++q) {
        for (std::size_t r = 1; r < sums.size(); ++r) gradients[s][q] += sums[r][s][q];
        stages[s].parameters()[q].value.mutable_grad() = gradients[s][q];
        squares += chevron::sum_of_squares(gradients[s][q]);
      }
    }
    grad_norm = std::sqrt(squares);
  }

  tensors parameters() { return parameters_of(stages); }
};

inline auto const sgd = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
inline auto const adamw = chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));

/// A trainer's arguments, with the mean square as its loss.
inline chevron::trainer_setup setup(chevron::proved_program const& program, transport& comm, builder stages = build_stage,
                                    chevron::trainer_options options = {}, chevron::optimizer_factory optimizer = sgd) {
  return {.program = program,
          .transport = comm,
          .stages = std::move(stages),
          .loss = mean_square,
          .optimizer = std::move(optimizer),
          .options = std::move(options)};
}
inline chevron::trainer_setup setup(chevron::plan const& plan, transport& comm, builder stages = build_stage,
                                    chevron::trainer_options options = {}, chevron::optimizer_factory optimizer = sgd) {
  return setup(chevron::lower(chevron::prove(plan)), comm, std::move(stages), std::move(options), std::move(optimizer));
}

/// doctest's assertions are made on the main thread only.
struct complaints {
  std::mutex mutex;
  std::vector<std::string> all;
  void require(bool holds, std::string const& what) {
    std::lock_guard const hold(mutex);
    if (!holds) all.push_back(what);
  }
};

/// One step of a new trainer, against the un-pipelined model: loss, norm, every gradient of this rank, chunks in flight.
inline void compare_one_step(transport& comm, chevron::plan const& plan, batch const& data, reference const& whole,
                             complaints& wrong, builder const& build = build_stage) {
  chevron::trainer train(small_model::setup(plan, comm, build));
  auto const report = train.step({data.input}, {data.target});
  int const rank = comm.topology().pipeline_rank();
  std::string const where = std::string(plan.name) + ", P=" + std::to_string(plan.size.ranks) +
                            ", M=" + std::to_string(plan.size.micro_batches) + ", rank " +
                            std::to_string(comm.topology().global_rank) + ": ";
  wrong.require(report.loss == whole.loss,
                where + "loss " + std::to_string(report.loss) + " instead of " + std::to_string(whole.loss));
  wrong.require(report.grad_norm == whole.grad_norm,
                where + "norm " + std::to_string(report.grad_norm) + " instead of " + std::to_string(whole.grad_norm));
  wrong.require(report.peak_in_flight == chevron::peak_in_flight(plan, rank),
                where + std::to_string(report.peak_in_flight) + " chunks were in flight");
  int checked = 0;
  for (std::size_t s = 0; s < train.stages().size(); ++s) {
    auto const& mine = train.stages()[s].parameters();
    for (std::size_t q = 0; q < mine.size(); ++q, ++checked) {
      wrong.require(at::equal(mine[q].value.grad(), whole.gradients[s][q]),
                    where + "gradient of stage " + std::to_string(s) + " " + mine[q].name);
    }
  }
  int here = 0;
  for (int stage = 0; stage < plan.stages; ++stage) here += plan.rank_of.data[stage] == rank ? 1 : 0;
  wrong.require(checked == static_cast<int>(whole.gradients[0].size()) * here,
                where + "only " + std::to_string(checked) + " gradients were compared");
}

/// Losses and norms of an un-pipelined training run with AdamW, clipping and a learning rate that falls.
struct curve {
  static constexpr double clip = 0.05;
  static double rate(long step) { return 1e-2 / static_cast<double>(step + 1); }

  std::vector<double> losses, norms;

  curve(chevron::plan const& plan, std::vector<batch> const& data, int steps, builder const& build = build_stage) {
    reference whole(plan.stages, build);
    auto const optimizer = adamw(whole.parameters());
    for (long step = 0; step < steps; ++step) {
      whole.run(plan, data, step);
      losses.push_back(whole.loss);
      norms.push_back(whole.grad_norm);
      if (whole.grad_norm > clip) {
        for (auto& p : whole.parameters()) p.mutable_grad().mul_(clip / (whole.grad_norm + 1e-6));
      }
      optimizer->param_groups()[0].options().set_lr(rate(step));
      optimizer->step();
    }
  }

  /// The same by a trainer. Small buckets: several, and parameters cut in two.
  void compare(transport& comm, chevron::plan const& plan, std::vector<batch> const& data, complaints& wrong,
               builder const& build = build_stage) const {
    chevron::trainer train(
        small_model::setup(plan, comm, build, {.clip_grad_norm = clip, .learning_rate = rate, .bucket_bytes = 100}, adamw));
    auto const& mine = data[static_cast<std::size_t>(comm.topology().replica())];
    for (std::size_t step = 0; step < losses.size(); ++step) {
      auto const report = train.step({mine.input}, {mine.target});
      std::string const where = std::string(plan.name) + ", rank " + std::to_string(comm.topology().global_rank) + ", step " +
                                std::to_string(step) + ": ";
      wrong.require(report.loss == losses[step], where + "loss");
      wrong.require(report.grad_norm == norms[step], where + "norm");
      wrong.require(report.learning_rate == rate(static_cast<long>(step)), where + "rate");
    }
  }
};

}  // namespace small_model
