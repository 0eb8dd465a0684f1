// timeout: 120
// Operators that run as late as they may, on freed memory that is spoilt: numbers are right only where the order is.
#include "accelerator/training.hpp"

#include "accelerator/allocator.hpp"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace {

/// Takes memory that no earlier step has left, in each forward.
chevron::stage taking_more(int number) {
  torch::nn::Functional const takes([](at::Tensor const& x) {
    if (x.is_cpu()) return x;
    c10::StreamGuard const once(c10::impl::VirtualGuardImpl(x.device().type()).getStreamFromGlobalPool(x.device()));
    at::empty({1 << 16}, x.options());
    return x;
  });
  return chevron::in_sequence({torch::nn::Sequential(takes), small_model::build_stage(number)});
}

chevron::stage dropping(int number) { return small_model::build_dropping_stage(number, 1); }

/// A transport that puts nothing behind its transfers.
struct hasty_streams : accelerator::accelerator_streams {
  using accelerator_streams::accelerator_streams;
  using accelerator_streams::wait;
  template <class Stop>
  bool wait(event const&, Stop const&) {
    return true;
  }
};

}  // namespace

TEST_CASE("an operator runs when somebody waits for it, and sees what is in memory then") {
  REQUIRE(accelerator::start_over(true) == 0);
  {
    c10::impl::VirtualGuardImpl const device(c10::DeviceType::PrivateUse1);
    c10::Stream const a = device.getNewStream(accelerator::device(0)), b = device.getNewStream(accelerator::device(0));
    at::Tensor x, y, z;
    {
      c10::StreamGuard const on(a);
      x = at::ones({4}).to(accelerator::device(0));
    }
    {
      c10::StreamGuard const on(b);
      y = x * 2;  // the stream does not wait, and no stream waits for it yet
    }
    {
      c10::StreamGuard const on(a);
      x.add_(4);
      CHECK(x.sum().item<float>() == 20);
      z = x.cpu();
    }
    CHECK(at::equal(z, at::full({4}, 5.)));
    {
      c10::StreamGuard const on(b);
      CHECK(at::equal(y.cpu(), at::full({4}, 10.)));
    }
    {
      // Memory that is freed while the other stream has yet to read it.
      c10::StreamGuard const on(b);
      y = x * 2;
    }
    x = at::Tensor();
    {
      c10::StreamGuard const on(a);
      x = at::empty({4}, at::TensorOptions().device(accelerator::device(0)));
    }
    device.synchronizeStream(a);
    {
      c10::StreamGuard const on(b);
      CHECK(y.isnan().all().item<bool>());
    }
  }
  CHECK(!accelerator::detector::instance().faults().empty());
  CHECK(accelerator::start_over() == 0);
}

TEST_CASE("every schedule trains late as in main memory, with replicas, dropout and recomputing") {
  for (char const* const name : small_model::schedules) {
    accelerator::compare({.schedule = name,
                          .ranks = 2,
                          .replicas = 2,
                          .micro_batches = 4,
                          .late = true,
                          .build = dropping,
                          .options = {.seed = 3}},
                         "late");
    accelerator::compare({.schedule = name, .ranks = 4, .micro_batches = 5, .late = true}, "late");
  }
}

TEST_CASE("steps that are taken back, and accumulation, late") {
  for (char const* const name : {"1F1B", "ZB-H2", "DualPipeV"}) {
    accelerator::compare({.schedule = name,
                          .ranks = 2,
                          .micro_batches = 4,
                          .late = true,
                          .build = dropping,
                          .options = {.clip_grad_norm = 20, .post_validation = true, .stable_steps = 1},
                          .steps = 8,
                          .large_batches = true},
                         "late, post-validation");
    accelerator::compare({.schedule = name,
                          .ranks = 2,
                          .replicas = 2,
                          .micro_batches = 4,
                          .late = true,
                          .options = {.bucket_bytes = 100},
                          .passes = 2},
                         "late, accumulation");
  }
}

TEST_CASE("memory that is given back in the middle of a step waits for the device, and no receive keeps it waiting") {
  auto& memory = accelerator::device_allocator::instance();
  for (char const* const name : {"1F1B", "GPipe", "ZB-H1", "ZB-V", "DualPipeV"}) {
    CAPTURE(name);
    // With one microbatch a backward's message, whose receive stands before the forward, waits for that forward.
    accelerator::job what{.schedule = name, .ranks = 2, .micro_batches = 1, .late = true, .build = taking_more, .steps = 8};
    std::vector<std::int64_t> taken;  // of device 0, by step
    long retries = 0;
    what.between = [&](chevron::trainer& train, long step) {
      if (train.comm().topology().global_rank != 0) return;
      if (step == 0) taken.clear();
      auto const stats = memory.getDeviceStats(0);
      taken.push_back(stats.reserved_bytes[0].current);
      retries = stats.num_alloc_retries;
    };
    accelerator::compare(what, "enough memory");
    REQUIRE(taken.size() == 8);
    // With less memory than a step frees in between, each step asks for more than the device has.
    memory.limit(taken[4]);
    accelerator::compare(what, "too little memory");
    memory.limit(accelerator::device_allocator::usual_limit);
    CHECK(retries > 0);
  }
}

TEST_CASE("threads hand tensors over late, from device to device and on one") {
  using accelerator::joined;
  for (char const* const name : {"1F1B", "ZB-H2", "DualPipeV"}) {
    for (joined const by : {joined::threads, joined::threads_on_one_device})
      accelerator::compare({.schedule = name, .ranks = 2, .replicas = 3, .micro_batches = 4, .by = by, .late = true},
                           "late, threads");
  }
}

TEST_CASE("a transport that puts nothing behind its transfers gives other numbers, under every schedule") {
  for (char const* const name : small_model::schedules) {
    accelerator::job const what{.schedule = name,
                                .ranks = 2,
                                .micro_batches = 4,
                                .late = true,
                                .options = {.when_not_finite = chevron::not_finite::skip}};
    auto const got = accelerator::train_on_devices<hasty_streams>(what);
    INFO(std::string(name));
    CHECK(!got.faults.empty());
    CHECK(got.losses != accelerator::train_in_main_memory(what).losses);
  }
}
