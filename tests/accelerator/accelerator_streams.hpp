#pragma once

// Streams, events and channels of the simulated device, for stream_transport: host streams carry the bytes, and clocks store the
// order.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

#include "support/host_streams.hpp"

#include "accelerator/clocks.hpp"
#include "accelerator/device.hpp"
#include "accelerator/late.hpp"

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
    late_point place;
  };
  struct channel : base::channel {
    std::string name;
    int place = 0, count = 1;
  };

  explicit accelerator_streams(at::Device on) : device_(on) {}

  at::Device device() const { return device_; }

  stream make_stream() { return {base::make_stream(), detector::instance().add_stream(device_.index(), "transfer stream")}; }
  event make_event() { return {}; }

  void record(event& e) {
    e.known = detector::instance().now(computing());
    e.place = late().now(computing());
    base::record(e);
  }
  void record(event& e, stream& on) {
    e.known = detector::instance().now(on.number);
    e.place = late().now(on.number);
    base::record(e, on.worker);
  }
  void wait(stream& on, event const& e) {
    detector::instance().wait(on.number, e.known);
    late().wait(on.number, e.place);
    base::wait(on.worker, e);
  }
  template <class Stop>
  bool wait(event const& e, Stop const& stop) {
    detector::instance().wait(computing(), e.known);
    late().wait(computing(), e.place);
    return late().on() || base::wait(e, stop);
  }
  template <class Stop>
  bool wait_on_host(event const& e, Stop const& stop) {
    detector::instance().host_waited(device_.index(), e.known);
    late().run_to(e.place);
    return late().on() || base::wait(e, stop);
  }
  /// Whether an event has passed. A query of the watch changes nothing; a query of the rank first does all work that can be done
  /// without a wait.
  bool passed(event const& e) {
    if (!late().on()) return base::passed(e);
    return only_looks_ ? late().is_done(e.place) : late().run_towards(e.place);
  }
  void enter_thread() { only_looks_ = true; }

  template <class Stop>
  channel connect(std::string const& name, std::string const& id, chevron::channel_use use, int rank, int size, int peer,
                  Stop const& stop) {
    return {base::connect(name, id, use, rank, size, peer, stop), id, rank, size};
  }
  void send(channel& c, stream& on, std::span<at::Tensor const> values) {
    touch(on, "send", values, false);
    if (late().on()) return meet(c, on, values, {});
    base::send(c, on.worker, aliases(values, alias_on_cpu));
  }
  void receive(channel& c, stream& on, std::span<at::Tensor const> into) {
    touch(on, "receive", into, true);
    if (!late().on()) return base::receive(c, on.worker, aliases(into, alias_on_cpu));
    meet(c, on, into, [me = c.place](auto& brought) {
      auto const &to = brought[static_cast<std::size_t>(me)], &from = brought[static_cast<std::size_t>(1 - me)];
      for (std::size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
    });
  }

  /// A channel that all messages of some ranks share, as a communicator of NCCL: it has a stream of its own on each of them, on
  /// which its messages run in the order in which the rank enqueues them. Late execution only.
  struct shared_channel {
    std::string name;
    int rank;  ///< of the whole job: peers are named so, too
    stream on;
  };
  shared_channel share(std::string const& name, int rank) { return {name, rank, make_stream()}; }
  /// \param what the message, for `late_streams::cycle_of_messages`
  /// \param buffered whether the send ends without its receive, as soon as it is in front of its channel
  void send(shared_channel& c, int peer, std::span<at::Tensor const> values, std::string const& what, bool buffered) {
    touch(c.on, "message", values, false);
    late().meet(c.on.number, way(c, c.rank, peer), 0, 2, aliases(values, late_alias), {}, what, buffered);
  }
  void receive(shared_channel& c, int peer, std::span<at::Tensor const> into, std::string const& what) {
    touch(c.on, "message", into, true);
    late().meet(
        c.on.number, way(c, peer, c.rank), 1, 2, aliases(into, late_alias),
        [](auto& brought) {
          at::NoGradGuard const off;
          for (std::size_t i = 0; i < brought[1].size(); ++i) brought[1][i].copy_(brought[0][i]);
        },
        what);
  }
  /// The messages in between run side by side, as in ncclGroupStart and ncclGroupEnd.
  void begin_batch(shared_channel& c) { late().begin_batch(c.on.number); }
  void end_batch(shared_channel& c) { late().end_batch(c.on.number); }

  void sum(channel& c, stream& on, at::Tensor const& values) {
    std::span const one(&values, 1);
    touch(on, "sum over replicas", one, true);
    if (!late().on()) return base::sum(c, on.worker, aliases(one, alias_on_cpu)[0]);
    meet(c, on, one, [me = c.place](auto& brought) {
      if (me != 0) return;
      for (std::size_t r = 1; r < brought.size(); ++r) brought[0][0].add_(brought[r][0]);
      for (std::size_t r = 1; r < brought.size(); ++r) brought[r][0].copy_(brought[0][0]);
    });
  }
  void reduce_scatter(channel& c, stream& on, at::Tensor const& values, std::span<std::int64_t const> cut) {
    std::span const one(&values, 1);
    touch(on, "reduce-scatter over replicas", one, true);
    if (!late().on()) return base::reduce_scatter(c, on.worker, aliases(one, alias_on_cpu)[0], cut);
    meet(c, on, one,
         [me = c.place, at = std::vector(cut.begin(), cut.end())](auto& brought) { add_own_share(values_in(brought), me, at); });
  }
  void share_gather(channel& c, stream& on, at::Tensor const& values, std::span<std::int64_t const> cut) {
    std::span const one(&values, 1);
    touch(on, "gather of shares over replicas", one, true);
    if (!late().on()) return base::share_gather(c, on.worker, aliases(one, alias_on_cpu)[0], cut);
    meet(c, on, one,
         [me = c.place, at = std::vector(cut.begin(), cut.end())](auto& brought) { take_shares(values_in(brought), me, at); });
  }
  void all_gather(channel& c, stream& on, at::Tensor const& mine, at::Tensor const& all) {
    touch(on, "gather", {}, false);
    if (!late().on()) return base::all_gather(c, on.worker, mine, all);
    at::Tensor const both[] = {mine, all};
    meet(c, on, both, [me = c.place](auto& brought) {
      at::Tensor const& into = brought[static_cast<std::size_t>(me)][1];
      auto const width = brought[0][0].numel();
      for (std::size_t r = 0; r < brought.size(); ++r)
        into.narrow(0, static_cast<std::int64_t>(r) * width, width).copy_(brought[r][0]);
    });
  }

 private:
  int computing() const { return current_stream(device_.index()); }

  static std::string way(shared_channel const& c, int from, int to) {
    return c.name + ", from " + std::to_string(from) + " to " + std::to_string(to);
  }

  static late_streams& late() { return late_streams::instance(); }

  void touch(stream& on, char const* name, std::span<at::Tensor const> values, bool writes) {
    std::vector<touched> parts;
    for (at::Tensor const& value : values) parts.push_back(part_of(value, writes));
    std::erase_if(parts, [](touched const& p) { return p.block == nullptr; });
    detector::instance().name_stream(on.number, std::string("the stream of each ") + name);
    detector::instance().run(on.number, name, parts);
  }
  template <class Brought>
  static std::vector<at::Tensor> values_in(Brought const& brought) {
    std::vector<at::Tensor> out;
    for (auto const& each : brought) out.push_back(each[0]);
    return out;
  }
  static std::vector<at::Tensor> aliases(std::span<at::Tensor const> values, at::Tensor (*alias)(at::Tensor const&)) {
    std::vector<at::Tensor> out;
    for (at::Tensor const& value : values) out.push_back(alias(value));
    return out;
  }
  void meet(channel& c, stream& on, std::span<at::Tensor const> values, late_streams::meeting_work does) {
    late().meet(on.number, c.name, c.place, c.count, aliases(values, late_alias), [does = std::move(does)](auto& brought) {
      at::NoGradGuard const off;
      if (does) does(brought);
    });
  }

  static inline thread_local bool only_looks_ = false;
  at::Device device_;
};

}  // namespace accelerator
