// timeout: 60
// Tests of the simulated device: the orders that it knows, and its reports of missing orders.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "accelerator/allocator.hpp"
#include "accelerator/device.hpp"

#include <doctest/doctest.h>

namespace {

using accelerator::fault;

c10::impl::VirtualGuardImpl const guard() { return c10::impl::VirtualGuardImpl(c10::DeviceType::PrivateUse1); }
c10::Stream new_stream() { return guard().getNewStream(accelerator::device(0)); }
std::vector<fault> faults() { return accelerator::detector::instance().faults(); }

void after(c10::Stream const& later, c10::Stream const& earlier) {
  c10::Event here(c10::DeviceType::PrivateUse1);
  here.record(earlier);
  here.block(later);
}

at::Tensor ones(std::int64_t n) { return at::ones({n}).to(accelerator::device(0)); }

/// Checks before and after a test that no memory is allocated; drops the streams.
struct fresh {
  fresh() { CHECK(accelerator::start_over() == 0); }
  ~fresh() { CHECK(accelerator::start_over() == 0); }
};

}  // namespace

TEST_CASE("what one stream reads and the other one writes needs a wait, either way round") {
  for (bool const waits : {true, false}) {
    fresh const device;
    c10::Stream const a = new_stream(), b = new_stream();
    at::Tensor x, y;
    {
      c10::StreamGuard const on(a);
      x = ones(4);
      x.add_(1);
    }
    accelerator::start_over();  // refused: a tensor is left
    if (waits) after(b, a);
    {
      c10::StreamGuard const on(b);
      y = x * 2;
    }
    auto const found = faults();
    REQUIRE(found.size() == (waits ? 0 : 1));
    if (waits) {
      // Written while the other stream may still read it.
      c10::StreamGuard const on(a);
      x.mul_(3);
      REQUIRE(faults().size() == 1);
      CHECK(faults()[0].first == "mul");
      CHECK(faults()[0].second == "mul");
    } else {
      CHECK(found[0].first == "add_");
      CHECK(found[0].second == "mul");
      CHECK(!found[0].reused);
      CHECK(found[0].first_stream != found[0].second_stream);
    }
  }
}

TEST_CASE("a host that waits orders what it asks for afterwards; one that only asks orders nothing") {
  fresh const device;
  c10::Stream const a = new_stream(), b = new_stream();
  at::Tensor x;
  {
    c10::StreamGuard const on(a);
    x = ones(4) + 1;
    CHECK(x.sum().item<float>() == 8);
  }
  {
    c10::StreamGuard const on(b);
    x.mul_(2);
  }
  CHECK(faults().empty());
  c10::Event const later(c10::DeviceType::PrivateUse1);
  {
    c10::StreamGuard const on(a);
    x.mul_(2);
  }
  CHECK(faults().size() == 1);
}

TEST_CASE("a wait covers what was asked for before its event was recorded, and no more") {
  fresh const device;
  c10::Stream const a = new_stream(), b = new_stream();
  at::Tensor x, y;
  c10::Event early(c10::DeviceType::PrivateUse1);
  {
    c10::StreamGuard const on(a);
    x = ones(4) + 1;
    early.record(a);
    y = x + 1;
  }
  early.block(b);
  c10::StreamGuard const on(b);
  at::Tensor const fine = x * 2;
  CHECK(faults().empty());
  at::Tensor const not_fine = y * 2;
  CHECK(faults().size() == 1);
}

TEST_CASE("two streams may write to different parts of one tensor") {
  fresh const device;
  c10::Stream const a = new_stream(), b = new_stream();
  at::Tensor const whole = ones(10);
  guard().synchronizeStream(guard().getDefaultStream(accelerator::device(0)));
  {
    c10::StreamGuard const on(a);
    whole.narrow(0, 0, 5).add_(1);
  }
  {
    c10::StreamGuard const on(b);
    whole.narrow(0, 5, 5).add_(1);
    CHECK(faults().empty());
    whole.narrow(0, 4, 2).add_(1);
  }
  CHECK(faults().size() == 1);
}

TEST_CASE("memory that another stream still reads is given out again, unless it was recorded for that stream") {
  for (bool const recorded : {true, false}) {
    for (bool const joined : {true, false}) {
      fresh const device;
      c10::Stream const a = new_stream(), b = new_stream();
      at::Tensor x, y, z;
      {
        c10::StreamGuard const on(a);
        x = ones(4) + 1;
      }
      after(b, a);
      {
        c10::StreamGuard const on(b);
        y = x * 2;
      }
      if (recorded) x.record_stream(b);
      void const* const place = x.data_ptr();
      x = at::Tensor();
      if (joined) after(a, b);
      c10::StreamGuard const on(a);
      z = ones(4) + 1;
      CHECK(faults().size() == (recorded || joined ? 0 : 1));
      if (!recorded && !joined) {
        CHECK(faults()[0].reused);
        CHECK(faults()[0].first == "mul");
        CHECK(z.data_ptr() != nullptr);
      }
      if (recorded && !joined) CHECK(z.data_ptr() != place);
    }
  }
}

TEST_CASE("autograd's engine keeps the streams of the forward, and orders what crosses; what the caller left out is told") {
  for (bool const waits : {true, false}) {
    fresh const device;
    c10::Stream const a = new_stream(), b = new_stream();
    at::Tensor w = at::randn({4, 4}).to(accelerator::device(0)).requires_grad_(),
               x = at::randn({2, 4}).to(accelerator::device(0));
    guard().synchronizeStream(guard().getDefaultStream(accelerator::device(0)));
    at::Tensor y, z;
    {
      c10::StreamGuard const on(a);
      y = x.mm(w).tanh();
    }
    if (waits) after(b, a);
    {
      c10::StreamGuard const on(b);
      z = (y * y).sum();
    }
    z.backward();
    at::Tensor const in_main_memory = w.detach().cpu().requires_grad_();
    at::Tensor const v = x.cpu().mm(in_main_memory).tanh();
    (v * v).sum().backward();
    CHECK(at::equal(w.grad().cpu(), in_main_memory.grad()));
    for (auto const& f : faults()) MESSAGE(f.text);
    REQUIRE(faults().size() == (waits ? 0 : 1));
    if (!waits) {
      CHECK(faults()[0].first == "tanh");
      CHECK(faults()[0].second == "mul");
    }
  }
}

TEST_CASE("between devices a copy is ordered on both sides, and its source is to be kept until it is over") {
  for (bool const kept : {true, false}) {
    fresh const both;
    c10::Stream const a = new_stream();
    at::Tensor x, there;
    {
      c10::StreamGuard const on(a);
      x = ones(4) + 1;
    }
    // The copy is on the source's default stream, for that is the current one.
    after(guard().getDefaultStream(accelerator::device(0)), a);
    there = x.to(accelerator::device(1), true);
    if (kept) x.record_stream(guard().getDefaultStream(accelerator::device(0)));
    x = at::Tensor();
    at::Tensor z;
    {
      c10::StreamGuard const on(a);
      z = ones(4) * 7;
    }
    CHECK(faults().size() == (kept ? 0 : 1));
    CHECK(at::equal(there.cpu(), at::full({4}, 2.)));
  }
}

TEST_CASE("draws are the CPU's, and depend on the device's generator") {
  fresh const device;
  at::Generator drawing = accelerator::generator_of(0);
  drawing.set_current_seed(5);
  at::Tensor const x = at::randn({8}, at::TensorOptions().device(accelerator::device(0)));
  CHECK(drawing.get_offset() == 1);
  auto const own = at::make_generator<at::CPUGeneratorImpl>(5);
  CHECK(at::equal(x.cpu(), at::randn({8}, own)));
  CHECK(at::equal(at::dropout(x, 0.5, false).cpu(), x.cpu()));
}
