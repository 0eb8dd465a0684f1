// Where the C++ fragments of README.md and docs/**/*.md stand when tests/fences.py compiles them. A fragment's page names a
// context in a comment before the fence, `<!-- compiled in: rank -->`; the text of the fence then replaces the line `// FENCE` below, as it is.
// Each context declares the names that the page has introduced, and nothing else. The first section stands once, before all others.

// context: head
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include <torch/data.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <chevron/checkpoint.hpp>
#include <chevron/data.hpp>
#include <chevron/multiprocess.hpp>
#include <chevron/replan.hpp>
#include <chevron/schedule.hpp>

#include "chevron-train/gpt.hpp"

namespace nn = torch::nn;

chevron::stage build_stage(int number);
at::Tensor loss(at::Tensor output, at::Tensor target);
chevron::optimizer_factory const optimizer = chevron::optimizer<torch::optim::AdamW>(1e-3);
constexpr auto program = chevron::lowered<chevron::catalogue::one_f_one_b, chevron::shape{.ranks = 2, .micro_batches = 4}>;

// A data set of points and classes.
struct samples : torch::data::Dataset<samples> {
  torch::data::Example<> get(std::size_t) override;
  std::optional<std::size_t> size() const override;
};

// context: program
// Declarations at namespace scope: functions, a main.
// FENCE

// context: main
// The body of the function that `run_main` runs: no ranks yet.
int body(int argc, char** argv, at::Tensor inputs, at::Tensor targets) {
  // FENCE
  return 0;
}

// context: sharded
// Within a rank whose stage is cut over shards.
void body(chevron::shard_group group, at::Tensor x, std::shared_ptr<nn::Module> any) {
  using module_of_example = nn::LinearImpl;
  auto const module = std::make_shared<module_of_example>(1, 1);
  // FENCE
}

// context: cuts
// Within a builder of stages that are cut, of which a shard knows the sizes of its heads and layers.
void body(chevron::stage stage, std::int64_t own_queries, std::int64_t own_keys, std::int64_t hidden) {
  // FENCE
}

// context: made
// The body of a rank that has a program and makes its own trainer.
void body(chevron::transport& comm, nn::Sequential model, at::Tensor example) {
  // FENCE
}

// context: gpu
// The same over NCCL; the page's own lines include <chevron/nccl.hpp>.
void body(chevron::nccl_transport& comm) {
  // FENCE
}

// context: job
// A rank of a job that has no transport yet.
void body(chevron::job const& job, int pipeline_ranks, int replicas) {
  // FENCE
}

// context: rank
// The body of a rank that has a trainer, and the batch of a step.
void body(chevron::transport& comm, chevron::trainer& trainer, nn::Sequential block, at::Tensor inputs, at::Tensor targets,
          at::Tensor mask, at::Tensor positions, std::size_t epochs, int steps) {
  // FENCE
}

// context: auto
// The body of a rank that has a trainer, and plans while it trains.
void body(chevron::trainer& trainer, at::Tensor inputs, at::Tensor targets, int steps) {
  // FENCE
}

// context: lengths
// The body of a rank that has a trainer, and whose microbatches are of unequal length.
std::vector<chevron::batch> next_parts(int step);
void body(chevron::trainer& trainer, int steps) {
  // FENCE
}

// context: accumulation
// The body of a rank that trains on three batches in one step.
void body(chevron::trainer& trainer, chevron::batch first, chevron::batch second, chevron::batch third, double all_samples) {
  // FENCE
}

// context: stage
// The function that builds stage `s` of a model.
chevron::stage body(int s, int last, nn::Sequential block, nn::Embedding embedding, nn::Linear head) {
  // FENCE
  return {};
}

// context: options
// Written after `.options =`.
void log(long step, int stage, std::string name, at::Tensor norm);
constexpr long padding = 0;
chevron::trainer_options const given =
    // FENCE
    ;

// context: rank_options
// The same in the body of a rank.
void body(chevron::transport& comm) {
  chevron::trainer_options const given =
      // FENCE
      ;
}

// context: optimizer
// Written after `.optimizer =`.
chevron::optimizer_factory const factory =
    // FENCE
    ;

// context: chevron-train
// A rank of chevron-train.
using namespace chevron;
using namespace chevron::train;
void body(proved_program program, transport& comm, gpt_size size, int layers, int stages, std::uint64_t seed, long steps,
          std::function<at::Tensor(at::Tensor, at::Tensor)> next_byte_loss, at::Tensor bytes, at::Tensor following) {
  // FENCE
}

// context: search
// With measured costs.
void body(chevron::costs costs) {
  // FENCE
}
