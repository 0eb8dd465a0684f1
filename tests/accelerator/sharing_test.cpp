// timeout: 60
// Resources of a device that ranks use (events, memory), and those that ranks of one process must not share.
#include "accelerator/training.hpp"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chevron/run/core/stream_handoff.hpp>
#include <chevron/run/execute/memory_meter.hpp>

#include "accelerator/allocator.hpp"

using accelerator::device;
using accelerator::device_allocator;

namespace {

chevron::stage dropping(int number) { return small_model::build_dropping_stage(number); }

constexpr std::int64_t chunk = 1 << 18;  // bytes that a call of a fragmenting stage leaves in the allocator's cache

/// Has a buffer on a stream that is used once: the allocator keeps its memory, and no later call gets it.
chevron::stage fragmenting(int number) {
  torch::nn::Functional const fragments([](at::Tensor const& x) {
    if (x.is_cpu()) return x;
    c10::StreamGuard const once(c10::impl::VirtualGuardImpl(x.device().type()).getStreamFromGlobalPool(x.device()));
    at::empty({chunk / 4}, x.options());
    return x;
  });
  return chevron::in_sequence({torch::nn::Sequential(fragments), small_model::build_stage(number)});
}

/// Bytes that the allocator has taken of device 0, by step, and how often it ran full.
struct consumption {
  std::vector<std::int64_t> reserved;
  std::int64_t retries = 0;
};

/// Trains so that each step takes as much more of the device as the one before it. Losses must be those of main memory.
consumption train_with(int ranks, std::int64_t limit) {
  consumption out;
  accelerator::job what{.schedule = "1F1B", .ranks = ranks, .micro_batches = 4, .build = fragmenting, .steps = 8};
  auto const wanted = accelerator::train_in_main_memory(what);
  what.between = [&](chevron::trainer& train, long) {
    if (train.comm().topology().global_rank != 0) return;
    auto const stats = device_allocator::instance().getDeviceStats(0);
    out.reserved.push_back(stats.reserved_bytes[0].current);
    out.retries = stats.num_alloc_retries;
  };
  device_allocator::instance().limit(limit);
  auto const got = accelerator::train_on_devices(what);
  device_allocator::instance().limit(device_allocator::usual_limit);
  CHECK(got.losses == wanted.losses);
  CHECK(got.faults.empty());
  return out;
}

}  // namespace

TEST_CASE("orders between streams and messages of threads need no event each") {
  {
    chevron::detail::compute_streams streams(device(0), true);
    chevron::detail::stream_handoff message;
    at::Tensor values[] = {at::ones({4}, at::TensorOptions().device(device(0)))};
    auto const once = [&] {
      chevron::detail::compute_streams::scope const here(streams);
      streams.both(
          0, [] {}, [] {});
      message.record(values);
      message.acquire(values);
    };
    once();
    long const before = accelerator::events_made();
    for (int i = 0; i < 50; ++i) once();
    CHECK(accelerator::events_made() == before);
    // Those that are still waited for are left alone: where all are, a new one is made.
    std::vector<chevron::detail::stream_handoff> held;
    while (accelerator::events_made() == before && held.size() < 10000) held.emplace_back().record(values);
    CHECK(accelerator::events_made() == before + 1);
  }
  CHECK(accelerator::start_over() == 0);
}

TEST_CASE("ranks that are threads and draw on one device are refused, with the remedy") {
  accelerator::job what{
      .schedule = "1F1B", .ranks = 2, .micro_batches = 4, .by = accelerator::joined::threads_on_one_device, .build = dropping};
  CHECK_THROWS_WITH_AS(accelerator::train_on_devices(what),
                       doctest::Contains("random numbers were drawn on accel:0, whose generator several ranks of this process "
                                         "share, so that none draws its own. Remedy: a device or a process for each rank"),
                       chevron::usage_error);
  CHECK(accelerator::start_over() == 0);
  what.by = accelerator::joined::threads;
  accelerator::compare(what, "a device each");
  what.ranks = 1;
  what.by = accelerator::joined::threads_on_one_device;
  accelerator::compare(what, "alone");
}

TEST_CASE("memory that fragments goes back between steps, before the allocator runs full in the middle of one") {
  auto const growing = train_with(1, device_allocator::usual_limit);
  REQUIRE(growing.reserved.size() == 8);
  std::int64_t const growth = growing.reserved[3] - growing.reserved[2];
  CHECK(growth == 4 * chunk);
  CHECK(growing.retries == 0);
  CHECK(growing.reserved[7] == growing.reserved[2] + 5 * growth);
  std::int64_t const limit = growing.reserved[2] + growth / 2;
  auto const limited = train_with(1, limit);
  CHECK(limited.retries == 0);
  CHECK(std::count_if(limited.reserved.begin() + 1, limited.reserved.end(), [&](auto const& r) {
          return r < *(&r - 1);  // after a step it has less than before
        }) >= 2);
  // The allocator is the process's: other ranks may be in the middle of a step.
  CHECK(train_with(2, limit).retries > 0);
}

TEST_CASE("a rank that waits too long says how short of memory it is") {
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("GPipe", {.ranks = 1, .micro_batches = 1})));
  auto const says = [] {
    try {
      chevron::throw_failure(
          {.code = static_cast<int>(chevron::exit_code::timeout), .rank = 1, .reason = "rank 1 did not answer"},
          {.peer = 1, .words = "a message", .step = 7}, 0);
    } catch (chevron::timeout_error const& e) {
      return std::string(e.what());
    }
  };
  std::string const plain = says();
  CHECK(plain.ends_with("rank 1 did not answer; this rank was waiting for a message from rank 1"));
  {
    chevron::detail::memory_meter meter(program.view(), 0, device(0));
    auto const on_device = at::TensorOptions().device(device(0)).dtype(at::kByte);
    meter.begin_step();
    at::empty({4096}, on_device);
    meter.peak(0);
    meter.end_step(0);
    CHECK(says() == plain);
    device_allocator::instance().limit(3 << 20);
    for (std::int64_t const bytes : {1 << 20, 1 << 22}) {
      meter.begin_step();
      try {
        at::empty({bytes}, on_device);
      } catch (c10::Error const& e) {
        CHECK(std::string(e.what()).find("out of memory") != std::string::npos);
      }
      meter.peak(0);
      meter.end_step(6);
    }
    device_allocator::instance().limit(device_allocator::usual_limit);
    std::string const said = says();
    INFO(said);
    CHECK(said.starts_with(plain + "; after step 6 this rank's allocator had "));
    CHECK(said.find(" of the device's 3 MiB, with 2 MiB free when it last grew, and num_alloc_retries was 1: so many times") !=
          std::string::npos);
    CHECK(said.find("Remedy: smaller microbatches, recompute(), or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True") !=
          std::string::npos);
  }
  CHECK(says() == plain);
  CHECK(accelerator::start_over() == 0);
}
