// The memory of tensors sent over streams is freed only once the rank's next computation comes after the transfer.
#include "support/transport_contract.hpp"

#include <algorithm>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/core/Storage.h>

#include <chevron/plan/forward_part.hpp>
#include <chevron/transports/streams/stream_transport.hpp>
#include "support/host_streams.hpp"

namespace {

std::atomic<int> sent{0}, let_go_early{0};

/// Worker threads as streams, which send copies and record, at each call, the sends whose memory is freed already: on an
/// accelerator the host runs ahead, and the next allocation would overwrite a tensor that is still to be sent.
class watched_streams : public chevron::host_streams {
  using base = chevron::host_streams;

 public:
  struct event : base::event {
    std::shared_ptr<int> identity = std::make_shared<int>();
  };
  event make_event() { return {}; }

  using base::record;
  void record(event& e, stream& on) {
    look();
    for (transfer& t : under_way_) {
      if (t.on == on.get() && t.done == nullptr) t.done = e.identity.get();
    }
    base::record(e, on);
  }
  using base::wait;
  template <class Stop>
  bool wait(event const& e, Stop const& stop) {
    comes_after(e);
    return base::wait(e, stop);
  }
  template <class Stop>
  bool wait_on_host(event const& e, Stop const& stop) {
    comes_after(e);
    return base::wait_on_host(e, stop);
  }
  void send(channel& c, stream& on, std::span<at::Tensor const> values) {
    look();
    std::vector<at::Tensor> copies;
    for (at::Tensor const& value : values) {
      under_way_.push_back({value.storage().getWeakStorageImpl(), on.get(), nullptr});
      copies.push_back(value.clone());
      ++sent;
    }
    base::send(c, on, copies);
  }

 private:
  struct transfer {
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    void const* on;
    void const* done;
  };
  void comes_after(event const& e) {
    look();
    std::erase_if(under_way_, [&](transfer const& t) { return t.done == e.identity.get(); });
  }
  void look() {
    let_go_early += static_cast<int>(std::erase_if(under_way_, [](transfer const& t) { return t.memory.expired(); }));
  }
  std::vector<transfer> under_way_;
};

}  // namespace

TEST_CASE("also of the first messages, whatever comes next: a step, an evaluation, a batch of another size") {
  auto const plan = chevron::catalogue::make_plan("1F1B", {.ranks = 3, .micro_batches = 4});
  auto const program = chevron::lower(chevron::prove(plan)),
             forward = chevron::lower(chevron::prove(chevron::forward_part(plan)));
  auto const said = transport_contract::on_ranks(3, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
    chevron::stream_transport<watched_streams> comm(where, store, watch, std::chrono::seconds(60));
    comm.deadline(std::chrono::seconds(60));
    chevron::trainer train = transport_contract::trainer_of(program, comm);
    chevron::evaluator evaluate(forward, train);
    auto const samples = [](int count) { return at::ones({count, transport_contract::width}); };
    for (int round = 0; round < 3; ++round) {
      evaluate.outputs({samples(8)});
      train.step({samples(8)}, {samples(8)});
      evaluate.outputs({samples(4)});
      train.accumulate({samples(4)}, {samples(4)}, 9);
      train.step({samples(5)}, {samples(5)}, 9);
    }
    comm.close();
  });
  for (auto const& each : said) CHECK(each == "");
  CHECK(sent.load() > 100);
  CHECK(let_go_early.load() == 0);
}
