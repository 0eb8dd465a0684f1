// timeout: 600
// NCCL's channels by themselves: after an abort and after a fault no call of NCCL is made.
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>

#include <chevron/transports/gpu/cuda_streams.hpp>

#include <doctest/doctest.h>

#include "gpu_double/double.hpp"
#include "gpu_double/within.hpp"

namespace {

using namespace std::chrono_literals;
using chevron::channel_use, chevron::cuda_streams;

/// One rank's end of a channel, on a GPU of its own, with a stream and values.
struct end_of_channel {
  cuda_streams streams;
  cuda_streams::stream on = streams.make_stream();
  cuda_streams::channel way;
  at::Tensor values;
  explicit end_of_channel(int rank) : streams(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(rank))) {
    values = at::full({6}, 1.0 + rank, at::TensorOptions(streams.device()).dtype(at::kFloat));
  }
};
using both_ends = std::array<std::unique_ptr<end_of_channel>, 2>;

/// Runs `work(rank)` of both ranks, each on a thread.
void on_both(std::function<void(int)> const& work) {
  std::thread other([&] { work(1); });
  work(0);
  other.join();
}

both_ends joined(channel_use use) {
  both_ends out{std::make_unique<end_of_channel>(0), std::make_unique<end_of_channel>(1)};
  std::string const id = out[0]->streams.make_id();
  on_both([&](int r) {
    end_of_channel& mine = *out[static_cast<std::size_t>(r)];
    mine.way = mine.streams.connect("a channel", id, use, r, 2, 1 - r, [] { return false; });
  });
  return out;
}

/// An edge over which one message has passed.
both_ends connected_edge() {
  both_ends out = joined(channel_use::edge);
  on_both([&](int r) {
    end_of_channel& mine = *out[static_cast<std::size_t>(r)];
    std::array const message{mine.values};
    r == 0 ? mine.streams.send(mine.way, mine.on, message) : mine.streams.receive(mine.way, mine.on, message);
  });
  for (auto const& each : out) gpu_double::drain(each->on.get());
  REQUIRE(at::equal(out[1]->values.cpu(), at::ones({6})));
  return out;
}

/// Every operation of an end.
void call_all(end_of_channel& mine) {
  std::array const message{mine.values};
  std::vector<std::int64_t> const cut{0, 2, 6};
  at::Tensor const own = mine.streams.bytes(8), all = mine.streams.bytes(16);
  mine.streams.send(mine.way, mine.on, message);
  mine.streams.receive(mine.way, mine.on, message);
  mine.streams.sum(mine.way, mine.on, mine.values);
  mine.streams.reduce_scatter(mine.way, mine.on, mine.values, cut);
  mine.streams.share_gather(mine.way, mine.on, mine.values, cut);
  mine.streams.all_gather(mine.way, mine.on, own, all);
  gpu_double::drain(mine.on.get());
}

}  // namespace

// NCCL frees a communicator that is aborted, and the double ends a program that names it afterwards. The transport looks for
// failures before each call; the monitor's thread may abort between the look and the call.
TEST_CASE("streams that were aborted make no call of NCCL") {
  within(300s, "calls after an abort", [] {
    for (bool const by_both : {false, true}) {
      both_ends ends = connected_edge();
      ends[0]->streams.abort();
      if (by_both) ends[1]->streams.abort();
      CHECK(gpu_double::communicators() == (by_both ? 0 : 1));
      for (int r = 0; r <= (by_both ? 1 : 0); ++r) {
        call_all(*ends[static_cast<std::size_t>(r)]);
        CHECK_FALSE(ends[static_cast<std::size_t>(r)]->streams.fault());
      }
      CHECK(gpu_double::kernels() == 0);
    }
    CHECK(gpu_double::communicators() == 0);
  });
}

// A call after a failed one would enqueue a kernel that no other rank meets.
TEST_CASE("after a call of NCCL has failed, no further call is made, and the first fault stays") {
  within(300s, "calls after a fault", [] {
    {
      both_ends ends = connected_edge();
      end_of_channel& mine = *ends[0];
      std::array const message{mine.values};
      gpu_double::arm(gpu_double::fault::system_error);
      mine.streams.send(mine.way, mine.on, message);
      std::string const fault = mine.streams.fault().text;
      CHECK(fault.find("NCCL: unhandled system error") != std::string::npos);
      CHECK(gpu_double::kernels() == 0);
      mine.streams.send(mine.way, mine.on, message);
      CHECK(gpu_double::kernels() == 0);
      mine.streams.sum(mine.way, mine.on, mine.values);
      CHECK(gpu_double::kernels() == 0);
      CHECK(mine.streams.fault().text == fault);
    }
    CHECK(gpu_double::communicators() == 0);
  });
}

// The abort also reaches a call that waits for its peer, and an end that is joined only by one rank.
TEST_CASE("an abort on another thread ends calls that wait for the other rank, and they leave no fault") {
  within(300s, "calls that wait for a rank", [] {
    {
      both_ends ends = joined(channel_use::sum);
      end_of_channel& mine = *ends[0];
      std::thread summing([&] { mine.streams.sum(mine.way, mine.on, mine.values); });
      end_of_channel alone(0);
      std::thread joining([&] {
        alone.way = alone.streams.connect("alone", alone.streams.make_id(), channel_use::edge, 0, 2, 1, [] { return false; });
      });
      while (gpu_double::communicators() < 3) std::this_thread::sleep_for(1ms);
      for (end_of_channel* const each : {&mine, &alone}) each->streams.abort();
      summing.join();
      joining.join();
      CHECK_FALSE(mine.streams.fault());
      CHECK_FALSE(alone.streams.fault());
    }
    CHECK(gpu_double::communicators() == 0);
    CHECK(gpu_double::kernels() == 0);
  });
}
