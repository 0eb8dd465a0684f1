// prints: the same in every bit as a plain loop
// A teacher that is only evaluated and a student that is trained, each over all ranks, in turn on one transport. What the teacher
// says comes out on the last rank, where the student's loss takes it as its target. docs/guides/two-models.md explains it.
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/functional.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include <cstdio>
#include <vector>

namespace nn = torch::nn;

constexpr int width = 8, micro_batches = 4;

nn::Sequential half(int number, int wide, int seed) {
  at::manual_seed(seed + number);
  auto const tanh = [](at::Tensor x) { return x.tanh(); };
  if (number == 0) return nn::Sequential(nn::Linear(width, wide), nn::Functional(tanh));
  return nn::Sequential(nn::Linear(wide, width));
}
nn::Sequential teacher_half(int number) { return half(number, 32, 50); }
nn::Sequential student_half(int number) { return half(number, 4, 60); }

at::Tensor loss(at::Tensor student, at::Tensor teacher) { return nn::functional::mse_loss(student, teacher); }

int train(int, char**) {
  constexpr chevron::shape size{.ranks = 2, .micro_batches = micro_batches};
  constexpr auto one_f_one_b = chevron::lowered<chevron::catalogue::one_f_one_b, size>;
  constexpr auto zb_h1 = chevron::lowered<chevron::catalogue::zb_h1, size>;
  at::set_num_threads(1);
  at::manual_seed(7);
  auto const x = at::randn({16, width});
  std::vector<double> losses, plain;

  chevron::run_threads(zb_h1, {}, [&](chevron::transport& comm) {
    auto const teacher_stage = [](int number) { return chevron::stage(teacher_half(number)); };
    auto const student_stage = [](int number) { return chevron::stage(student_half(number)); };
    chevron::evaluator teacher({.program = one_f_one_b, .transport = comm, .stages = teacher_stage});
    chevron::trainer student({.program = zb_h1,
                              .transport = comm,
                              .stages = student_stage,
                              .loss = loss,
                              .optimizer = chevron::optimizer<torch::optim::SGD>(0.3)});
    for (int step = 0; step < 20; ++step) {
      chevron::tensors const said = teacher.outputs({x});  // on the last rank, which is where targets are used
      auto const report = student.step({x}, said);
      if (comm.topology().global_rank == 0) losses.push_back(report.loss);
    }
  });

  auto first = student_half(0), second = student_half(1), of_teacher = teacher_half(0), last_of_teacher = teacher_half(1);
  std::vector<at::Tensor> all = first->parameters();
  for (auto const& p : second->parameters()) all.push_back(p);
  torch::optim::SGD sgd(all, 0.3);
  for (int step = 0; step < 20; ++step) {
    double sum = 0;
    sgd.zero_grad(false);
    for (int k = 0; k < micro_batches; ++k) {
      at::Tensor const part = x.narrow(0, 4 * k, 4), said = last_of_teacher->forward(of_teacher->forward(part)).detach();
      at::Tensor const distance = loss(second->forward(first->forward(part)), said);
      (distance / micro_batches).backward();
      sum += distance.item<double>() / micro_batches;
    }
    sgd.step();
    plain.push_back(sum);
  }
  std::printf("loss %.6f, then %.6f, %s a plain loop\n", losses.front(), losses.back(),
              losses == plain ? "the same in every bit as" : "DIFFERENT from");
  return losses == plain && losses.back() < losses.front() ? 0 : 1;
}

int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
