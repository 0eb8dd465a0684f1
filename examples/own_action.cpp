// prints: the same losses as with the encoder in front of each step: yes
// An action of one's own in the schedule: the frozen encoder of the next step's batch runs on rank 0 while rank 0 waits for its
// first gradient. The schedule places it (X), the proof holds it to its place, and the trainer calls the handler.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include <cstdio>
#include <vector>

namespace nn = torch::nn;
using namespace chevron::letters;

constexpr int count = 8, steps = 20;  // microbatches of a step

// 1F1B, with an X for each microbatch on rank 0 between its first forwards and its first backward.
inline constexpr auto X = chevron::own_action<'X'>({});
inline constexpr auto encoding =
    chevron::schedule(chevron::placement::linear, chevron::warmup(F* min_of(ranks - rank, micro_batches)) |
                                                      chevron::warmup(X * (micro_batches * (rank == 0))) | chevron::steady(B, F) |
                                                      chevron::cooldown(B));
constexpr chevron::shape size{.ranks = 4, .micro_batches = count};
constexpr auto plan = chevron::checked<encoding, size>;
// Each X takes half a forward, and none of the eight makes the step longer.
static_assert(makespan(plan, chevron::costs{.own = {0.5}}) ==
              makespan(chevron::checked<chevron::catalogue::one_f_one_b, size>, chevron::costs{}));

chevron::stage build_stage(int number) {
  at::manual_seed(static_cast<std::uint64_t>(number));
  auto const tanh = [](at::Tensor x) { return x.tanh(); };
  if (number == 3) return nn::Sequential(nn::Linear(16, 1));
  return nn::Sequential(nn::Linear(16, 16), nn::Functional(tanh));
}

at::Tensor loss(at::Tensor guess, at::Tensor truth) { return nn::functional::mse_loss(guess, truth); }

// What the encoder takes in a step.
at::Tensor raw(long step) {
  return at::randn({16, 4}, at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(step)));
}

// The losses of some steps. `ahead`: the encoder has run in the step before, as the schedule says.
template <class Program>
std::vector<double> train(Program const& program, bool ahead) {
  std::vector<double> losses;
  at::manual_seed(7);
  nn::Sequential encoder(nn::Linear(4, 16), nn::Functional([](at::Tensor x) { return x.relu(); }));
  chevron::run_threads(program, {}, [&](chevron::transport& comm) {
    std::vector<at::Tensor> encoded(count);  // by microbatch, on rank 0
    auto const encode = [&](long step, int m) {
      at::NoGradGuard const frozen;
      encoded[static_cast<std::size_t>(m)] = encoder->forward(raw(step).chunk(count)[static_cast<std::size_t>(m)]);
    };
    auto const adamw = chevron::optimizer<torch::optim::AdamW>(1e-2);
    chevron::trainer trainer(
        {.program = program,
         .transport = comm,
         .stages = build_stage,
         .loss = loss,
         .optimizer = adamw,
         .options = {.own_actions = [&](chevron::own_work const& x) { encode(x.step + 1, x.micro_batch); }}});
    for (long step = 0; step < steps; ++step) {
      chevron::batch all{.targets = {raw(step).sum(1, true)}};
      if (comm.topology().pipeline_rank() == 0) {
        for (int m = 0; m < count && (step == 0 || !ahead); ++m) encode(step, m);
        all.inputs = {at::cat(encoded)};
      }
      chevron::step_report const report = trainer.step(all);
      if (comm.topology().global_rank == 0) losses.push_back(report.loss);
    }
  });
  return losses;
}

int main() {
  at::set_num_threads(1);
  constexpr auto with_x = chevron::lowered<encoding, size>;
  constexpr auto without = chevron::lowered<chevron::catalogue::one_f_one_b, size>;
  bool const same = train(with_x, true) == train(without, false);
  std::printf("the same losses as with the encoder in front of each step: %s\n", same ? "yes" : "no");
  return same ? 0 : 1;
}
