// timeout: 120
// Every schedule on the simulated device: bit for bit as in main memory, and no operator without its order.
#include "accelerator/training.hpp"

using accelerator::job;

TEST_CASE("every schedule, with remainders and replicas") {
  long operators = 0;
  for (char const* const name : small_model::schedules) {
    operators += accelerator::compare({.schedule = name, .ranks = 2, .replicas = 2, .micro_batches = 3}, "replicas");
    operators += accelerator::compare({.schedule = name, .ranks = 4, .micro_batches = 5}, "four ranks");
  }
  MESSAGE(operators << " operators");
}

TEST_CASE("ranks that are threads hand tensors over from stream to stream, and from device to device") {
  using accelerator::joined;
  for (char const* const name : small_model::schedules) {
    accelerator::compare({.schedule = name, .ranks = 4, .micro_batches = 5, .by = joined::threads}, "threads");
    accelerator::compare({.schedule = name, .ranks = 2, .replicas = 2, .micro_batches = 3, .by = joined::threads_on_one_device},
                         "threads on one device");
  }
  accelerator::compare({.schedule = "1F1B", .ranks = 2, .replicas = 3, .micro_batches = 3, .by = joined::threads},
                       "three replicas");
}

TEST_CASE("stages that are cut over shards, whose collectives go out in the middle of forwards and backwards") {
  using accelerator::joined;
  for (char const* const name : {"1F1B", "ZB-H1", "ZBVZeroBubble", "Interleaved1F1B"}) {
    accelerator::compare({.schedule = name, .ranks = 2, .micro_batches = 3, .shards = 2}, "shards");
    accelerator::compare({.schedule = name, .ranks = 2, .micro_batches = 3, .by = joined::threads, .shards = 2},
                         "shards, threads");
  }
  chevron::trainer_options options{.clip_grad_norm = 0.5, .check_copies = 1};
  accelerator::compare({.schedule = "ZB-H1", .ranks = 2, .replicas = 2, .micro_batches = 3, .options = options, .shards = 2},
                       "shards beside replicas");
  options = {.shard = chevron::sharding::gradients};
  accelerator::compare({.schedule = "1F1B", .ranks = 1, .replicas = 2, .micro_batches = 3, .options = options, .shards = 3},
                       "shards beside a sharded optimizer");
}
