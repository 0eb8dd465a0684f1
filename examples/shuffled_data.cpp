// prints: epoch 5  loss 0[.][01]
// A data set shuffled anew in each epoch, on two pipelines of two ranks. Each rank has a data loader of its own; the sampler
// gives both ranks of a pipeline the same samples, and the other pipeline other ones.
#include <torch/data.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <chevron/data.hpp>
#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include <cstdio>

namespace nn = torch::nn;

// Points of the plane, and the quadrant each of them lies in.
struct points : torch::data::Dataset<points> {
  at::Tensor where = at::empty({2048, 2}).uniform_(-1, 1, at::make_generator<at::CPUGeneratorImpl>(1));
  torch::data::Example<> get(std::size_t i) override {
    at::Tensor const point = where[static_cast<long>(i)], right = point.gt(0).to(at::kLong);
    return {point, right[0] * 2 + right[1]};
  }
  std::optional<std::size_t> size() const override { return 2048; }
};

chevron::stage build_stage(int number) {
  at::manual_seed(static_cast<std::uint64_t>(number));
  if (number == 0) return nn::Sequential(nn::Linear(2, 32), nn::Functional([](at::Tensor x) { return x.relu(); }));
  return nn::Sequential(nn::Linear(32, 4));
}

at::Tensor loss(at::Tensor guess, at::Tensor quadrant) { return nn::functional::cross_entropy(guess, quadrant); }

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int, char**) {
    constexpr auto program = chevron::lowered<chevron::catalogue::one_f_one_b, chevron::shape{.ranks = 2, .micro_batches = 4}>;
    chevron::run_threads(program, {.replicas = 2}, [&](chevron::transport& comm) {
      auto const adamw = chevron::optimizer<torch::optim::AdamW>(1e-2);
      chevron::trainer trainer({.program = program, .transport = comm, .stages = build_stage, .loss = loss, .optimizer = adamw});

      auto const set = points().map(torch::data::transforms::Stack<>());
      chevron::distributed_sampler sampler(set.size().value(), comm.topology(), {.batch_size = 16, .seed = 7});
      sampler.start_at(trainer.next_step());  // after a checkpoint is read: the batch that it has come to
      auto const loader = torch::data::make_data_loader(set, sampler, torch::data::DataLoaderOptions(16).workers(1));
      for (std::size_t epoch = sampler.epoch(); epoch < 5; ++epoch) {
        double last = 0;
        for (auto& batch : *loader) last = trainer.step(batch.data, batch.target).loss;
        if (comm.topology().global_rank == 0) std::printf("epoch %zu  loss %.4f\n", epoch + 1, last);
      }
    });
    return 0;
  });
}
