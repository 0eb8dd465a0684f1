// chevron-train-nccl: what chevron-train becomes with --backend nccl. The same program, and ranks on GPUs.

#include <chevron/jobs/run_main.hpp>
#include <chevron/transports/gpu/nccl_transport.hpp>

#include "../start.hpp"
#include "common/gpu_ranks.hpp"

int main(int argc, char** argv) {
  return chevron::run_main(
      argc, argv, [](int count, char** words) { return chevron::train::start(count, words, &chevron::train::over_nccl); });
}
