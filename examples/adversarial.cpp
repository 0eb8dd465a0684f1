// prints: the same in every bit as a plain loop
// A GAN: a trainer for the generator and one for the discriminator, in turn on one transport and over the same two networks. Each
// trainer holds the network of the other's as a frozen alias, with the same memory and no gradients.
// docs/guides/two-models.md explains it.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include <cstdio>
#include <vector>

namespace nn = torch::nn;

constexpr int noise = 4, parts = 4, samples = 32, steps = 100;

nn::Sequential network(int from) { return nn::Sequential(nn::Linear(from, 16), nn::Tanh(), nn::Linear(16, 1)); }

/// A network that shares the memory of another's parameters and does not train them.
nn::Sequential frozen(nn::Sequential const& of, int from) {
  nn::Sequential out = network(from);
  std::vector<at::Tensor> const trained = of->parameters();
  for (std::size_t i = 0; at::Tensor & p : out->parameters()) p.set_requires_grad(false).set_data(trained[i++].detach());
  return out;
}
at::Tensor judged(nn::Sequential discriminator, at::Tensor fake, at::Tensor real) {
  return at::cat({discriminator->forward(fake), discriminator->forward(real)}, 1);  // [samples, 2]: dimension 0 stays samples
}
at::Tensor loss(at::Tensor logits, at::Tensor labels) { return at::binary_cross_entropy_with_logits(logits, labels); }

struct networks {
  nn::Sequential generator = (at::manual_seed(3), network(noise)), discriminator = network(1);
};
struct data {  // of one step; what is real lies around 2
  at::Tensor first = at::randn({samples, noise}), second = at::randn({samples, noise}), real = at::randn({samples, 1}) + 2;
  at::Tensor which = at::tensor({0.F, 1.F}).expand({samples, 2}), passes = at::ones({samples, 1});
};

int train(int, char**) {
  constexpr auto program = chevron::lowered<chevron::catalogue::zb_h1, chevron::shape{.ranks = 2, .micro_batches = parts}>;
  at::set_num_threads(1);
  networks piped, plain;
  std::vector<data> const all(steps);
  std::vector<double> losses, expected;

  chevron::run_threads(program, {}, [&](chevron::transport& comm) {
    auto const sgd = chevron::optimizer<torch::optim::SGD>(0.1);
    auto const d_stages = [&](int number) -> chevron::stage {
      if (number == 0) return frozen(piped.generator, noise);
      auto const forward = [d = piped.discriminator](at::Tensor fake, at::Tensor real) { return judged(d, fake, real); };
      return chevron::stage(piped.discriminator, forward).side_inputs({"real"});
    };
    auto const g_stages = [&](int n) { return chevron::stage(n == 0 ? piped.generator : frozen(piped.discriminator, 1)); };
    chevron::trainer discriminator({.program = program, .transport = comm, .stages = d_stages, .loss = loss, .optimizer = sgd});
    chevron::trainer generator({.program = program, .transport = comm, .stages = g_stages, .loss = loss, .optimizer = sgd});
    for (data const& d : all) {
      double const one = discriminator.step({{d.first}, {d.which}, {{"real", d.real}}}).loss;
      double const other = generator.step(d.second, d.passes).loss;
      if (comm.topology().global_rank == 0) losses.insert(losses.end(), {one, other});
    }
  });

  torch::optim::SGD of_generator(plain.generator->parameters(), 0.1), of_discriminator(plain.discriminator->parameters(), 0.1);
  for (int i = 0; i < 2 * steps; ++i) {
    data const& d = all[static_cast<std::size_t>(i / 2)];
    torch::optim::SGD& sgd = i % 2 == 0 ? of_discriminator : of_generator;
    double sum = 0;
    sgd.zero_grad(false);
    for (int k = 0; k < parts; ++k) {
      auto const part = [&](at::Tensor const& of) { return of.chunk(parts)[static_cast<std::size_t>(k)]; };
      at::Tensor const fake = plain.generator->forward(part(i % 2 == 0 ? d.first : d.second));
      at::Tensor const one = i % 2 == 0 ? loss(judged(plain.discriminator, fake.detach(), part(d.real)), part(d.which))
                                        : loss(plain.discriminator->forward(fake), part(d.passes));
      (one / parts).backward();
      sum += one.item<double>() / parts;
    }
    sgd.step();
    expected.push_back(sum);
  }
  double const mean = piped.generator->forward(all[0].first).mean().item<double>();
  std::printf("what is generated lies around %.3f, %s a plain loop\n", mean,
              losses == expected ? "the same in every bit as" : "DIFFERENT from");
  return losses == expected && mean > 1.5 ? 0 : 1;
}

int main(int argc, char** argv) { return chevron::run_main(argc, argv, train); }
