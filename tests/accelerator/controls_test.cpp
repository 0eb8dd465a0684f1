// timeout: 60
// Faults that are put in are told, and by their names.
#include "accelerator/training.hpp"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>

namespace {

using accelerator::fault;
using accelerator::job;

/// Flags of `beside`, which computes on a stream of its own: whether this stream waits for the rank's stream before the
/// computation, and the rank's stream for this one after it.
std::atomic<bool> waits_there = true, waits_back = true;

void after(c10::Stream const& later, c10::Stream const& earlier) {
  c10::Event here(c10::DeviceType::PrivateUse1);
  here.record(earlier);
  here.block(later);
}

chevron::stage beside(int number) {
  chevron::stage usual = small_model::build_stage(number);
  return chevron::stage(
      [usual](at::Tensor const& x) mutable {
        std::vector<at::Tensor> values{x}, results;
        if (x.is_cpu()) {
          usual.forward(values, results);
          return results[0];
        }
        c10::impl::VirtualGuardImpl const device(c10::DeviceType::PrivateUse1);
        c10::Stream const here = device.getStream(x.device()), own = device.getNewStream(x.device());
        if (waits_there) after(own, here);
        {
          c10::StreamGuard const on(own);
          // The engine will want them here, too.
          x.record_stream(own);
          usual.forward(values, results);
        }
        results[0].record_stream(here);
        if (waits_back) after(here, own);
        return results[0];
      },
      usual.parameters());
}

/// A transport that waits for transfers, but puts nothing that is computed behind them.
struct careless_streams : accelerator::accelerator_streams {
  using accelerator_streams::accelerator_streams;
  using accelerator_streams::wait;
  template <class Stop>
  bool wait(event const& e, Stop const& stop) {
    return chevron::host_streams::wait(e, stop);
  }
};

bool any(std::vector<fault> const& all, char const* first, char const* second) {
  return std::any_of(all.begin(), all.end(), [&](fault const& f) { return f.first == first && f.second == second; });
}

}  // namespace

TEST_CASE("a stage that computes on a stream of its own is told that it does not wait") {
  job const what{.schedule = "1F1B", .ranks = 2, .micro_batches = 4, .build = beside};
  struct {
    bool there, back;
  } const cases[] = {{true, true}, {false, true}, {true, false}};
  for (auto const& [there, back] : cases) {
    waits_there = there;
    waits_back = back;
    auto const out = accelerator::train_on_devices(what);
    for (auto const& said : out.said) CHECK(said == "");
    CHECK(out.left == 0);
    auto const& found = out.faults;
    INFO(there << " " << back << (found.empty() ? std::string() : found[0].text));
    CHECK(found.empty() == (there && back));
    if (!back) CHECK(any(found, "mul", "send"));  // what the stage ends with, and what becomes of it
  }
}

TEST_CASE("a transport that puts nothing behind its transfers is told what reads too early and what is freed too early") {
  for (char const* const name : small_model::schedules) {
    job const what{.schedule = name, .ranks = 2, .replicas = 2, .micro_batches = 4};
    auto const out = accelerator::train_on_devices<careless_streams>(what);
    auto const& found = out.faults;
    INFO(std::string(name));
    CHECK(std::any_of(found.begin(), found.end(), [](fault const& f) { return f.first == "receive" && !f.reused; }));
    CHECK(std::any_of(found.begin(), found.end(), [](fault const& f) { return f.first == "send" && f.reused; }));
    CHECK(std::any_of(found.begin(), found.end(), [](fault const& f) { return f.first == "sum over replicas"; }));
  }
}
