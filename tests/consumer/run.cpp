// The run side: LibTorch is found, compiles, links and is found again when the program starts.
#include <ATen/ATen.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/version.hpp>

#include <cstdio>

int main() {
  chevron::topology const where{.pipeline_ranks = 2, .replicas = 2, .global_rank = 3};
  std::printf("chevron %s: rank %d, sum %.0f\n", chevron::version, where.pipeline_rank(), at::ones({3}).sum().item<double>());
}
