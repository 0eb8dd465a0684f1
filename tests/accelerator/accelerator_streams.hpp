#pragma once

// Streams, events and channels of the simulated device, for stream_transport: those of the host carry the bytes, and clocks keep
// what is ordered.

#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/comm/streams/host_streams.hpp>

#include "accelerator/clocks.hpp"
#include "accelerator/device.hpp"

namespace accelerator {

/// A rank computes on the current stream of its thread. As that computes at once, waiting there blocks the thread, too. A
/// transfer does not keep the tensors that it was given, only their place: memory that is freed too early is not there when it
/// runs.
class accelerator_streams : public chevron::host_streams {
  using base = chevron::host_streams;

 public:
  struct stream {
    base::stream worker;
    int number = 0;
  };
  struct event : base::event {
    clock known;
  };
  struct channel : base::channel {};

  explicit accelerator_streams(at::Device on) : device_(on) {}

  at::Device device() const { return device_; }

  stream make_stream() { return {base::make_stream(), detector::instance().add_stream(device_.index(), "transfer stream")}; }
  event make_event() { return {}; }

  void record(event& e) {
    e.known = detector::instance().now(computing());
    base::record(e);
  }
  void record(event& e, stream& on) {
    e.known = detector::instance().now(on.number);
    base::record(e, on.worker);
  }
  void wait(stream& on, event const& e) {
    detector::instance().wait(on.number, e.known);
    base::wait(on.worker, e);
  }
  template <class Stop>
  bool wait(event const& e, Stop const& stop) {
    detector::instance().wait(computing(), e.known);
    return base::wait(e, stop);
  }
  template <class Stop>
  bool wait_on_host(event const& e, Stop const& stop) {
    detector::instance().host_waited(device_.index(), e.known);
    return base::wait(e, stop);
  }

  template <class Stop>
  channel connect(std::string const& id, int rank, int size, Stop const& stop) {
    return {base::connect(id, rank, size, stop)};
  }
  void send(channel& c, stream& on, std::span<at::Tensor const> values) {
    base::send(c, on.worker, touch(on, "send", values, false));
  }
  void receive(channel& c, stream& on, std::span<at::Tensor const> into) {
    base::receive(c, on.worker, touch(on, "receive", into, true));
  }
  void sum(channel& c, stream& on, at::Tensor const& values) {
    base::sum(c, on.worker, touch(on, "sum over replicas", std::span(&values, 1), true)[0]);
  }
  void all_gather(channel& c, stream& on, at::Tensor const& mine, at::Tensor const& all) {
    touch(on, "gather", {}, false);
    base::all_gather(c, on.worker, mine, all);
  }

 private:
  int computing() const { return current_stream(device_.index()); }

  std::vector<at::Tensor> touch(stream& on, char const* name, std::span<at::Tensor const> values, bool writes) {
    std::vector<touched> parts;
    std::vector<at::Tensor> places;
    for (at::Tensor const& value : values) {
      parts.push_back(part_of(value, writes));
      places.push_back(alias_on_cpu(value));
    }
    std::erase_if(parts, [](touched const& p) { return p.block == nullptr; });
    detector::instance().name_stream(on.number, std::string("the stream of each ") + name);
    detector::instance().run(on.number, name, parts);
    return places;
  }

  at::Device device_;
};

}  // namespace accelerator
