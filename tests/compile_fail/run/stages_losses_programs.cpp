// A type that can be neither a stage nor a loss gives one sentence each, not LibTorch's or the standard library's errors. A program
// that ends at the end of the line is refused by the functions that run ranks, with the remedy. One file, as LibTorch's headers take
// most of the time.
// expect: static assertion failed.*this module's forward takes something other than tensors, or is not known .torch::nn::Module itself has none
// expect: static assertion failed.*a stage or a loss is a torch::nn module, or a callable that takes up to eight at::Tensor
// expect: static assertion failed.*a stage is one module, and one callable that runs in place of its forward: register several modules in one
// expect: static assertion failed.*a stage or a loss gives a tensor, or tuples, optionals or vectors of tensors: a plain number has no graph
// expect: static assertion failed.*this program ends at the end of the line: store it in a variable first
// errors: 11
// timeout: 600
#include <functional>
#include <memory>
#include <string>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/loss.h>

#include <chevron/multiprocess.hpp>
#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

using namespace chevron;

auto const proved = prove(catalogue::make_plan("GPipe", {.ranks = 1, .micro_batches = 1}));
auto const body = [](transport&) {};

#ifdef LEGAL
loss_function const by_holder = torch::nn::MSELoss();
loss_function const by_pointer = std::make_shared<torch::nn::MSELossImpl>();
loss_function const by_any = torch::nn::AnyModule(torch::nn::MSELoss());
loss_function const by_call = [](auto out, auto target) { return (out - target).abs().mean(); };
stage const any = torch::nn::AnyModule(torch::nn::MSELoss());
stage const call = [](at::Tensor x) { return x; };
stage const several = [](std::span<at::Tensor const> x) { return std::make_pair(x[0], std::optional<at::Tensor>()); };
stage const in_its_place(torch::nn::AnyModule(torch::nn::MSELoss()), [](at::Tensor x) { return x; });
stage const number(torch::nn::AnyModule(torch::nn::MSELoss()), [](at::Tensor x) { return x; });
stage const two(torch::nn::AnyModule(torch::nn::MSELoss()), [](at::Tensor x) { return x; });

void run() {
  auto const program = lower(proved);
  run_processes(program, {}, body);
  run_threads(program, {}, body);
  run_threads(lowered<catalogue::gpipe, shape{.ranks = 1, .micro_batches = 1}>, {}, body);
}
#else
loss_function const by_holder = std::shared_ptr<torch::nn::Module>();
loss_function const by_pointer = 5;
loss_function const by_any = [](std::string, at::Tensor target) { return target; };
loss_function const by_call = std::function<double(at::Tensor, at::Tensor)>();
stage const any = std::shared_ptr<torch::nn::Module>();
stage const call = [](at::Tensor x) { return x.item<double>(); };
stage const several = [](int x) { return x; };
stage const in_its_place(torch::nn::AnyModule(torch::nn::MSELoss()), [](std::string x) { return x; });
stage const number(torch::nn::AnyModule(torch::nn::MSELoss()), [](at::Tensor x) { return x.item<double>(); });
stage const two{torch::nn::AnyModule(torch::nn::MSELoss()), torch::nn::AnyModule(torch::nn::MSELoss())};

void run() {
  run_processes(lower(proved), {}, body);
  run_threads(lower(proved), {}, body);
}
#endif
