// timeout: 120
// The stream operations of the executor and the transport equal those of accelerator/stream_order.hpp, whose order
// check_streams.hpp proves: operation by operation, for every schedule.
#include "support/transport_contract.hpp"

#include <map>
#include <memory>
#include <tuple>

#include <chevron/transports/streams/stream_transport.hpp>
#include "accelerator/check_streams.hpp"
#include "accelerator/stream_order.hpp"
#include "support/host_streams.hpp"

namespace {

/// An operation without names: streams are numbered as they are first used, events are the operations that recorded them.
enum class did { record, wait, send, receive, sum };
using operation = std::tuple<did, int, int>;  // kind, stream, for a wait: the operation that recorded

struct log_of_rank {
  std::vector<operation> entries;
  std::map<void const*, int> streams;  // null: the rank's compute stream
  std::map<void const*, int> recorded_by;

  int number(void const* stream) { return streams.try_emplace(stream, static_cast<int>(streams.size())).first->second; }
  void add(did what, void const* stream) { entries.emplace_back(what, number(stream), -1); }
  void record(void const* event, void const* stream) {
    add(did::record, stream);
    recorded_by[event] = static_cast<int>(entries.size()) - 1;
  }
  void wait(void const* event, void const* stream) { entries.emplace_back(did::wait, number(stream), recorded_by.at(event)); }
};
thread_local log_of_rank* now_logged = nullptr;

/// Worker threads as streams that also log their operations.
class logged_streams : public chevron::host_streams {
  using base = chevron::host_streams;

 public:
  struct event : base::event {
    std::shared_ptr<int> identity = std::make_shared<int>();
  };
  event make_event() { return {}; }

  void record(event& e) {
    if (now_logged) now_logged->record(e.identity.get(), nullptr);
    base::record(e);
  }
  void record(event& e, stream& on) {
    if (now_logged && !of_numbers(on)) now_logged->record(e.identity.get(), on.get());
    base::record(e, on);
  }
  void wait(stream& on, event const& e) {
    if (now_logged) now_logged->wait(e.identity.get(), on.get());
    base::wait(on, e);
  }
  template <class Stop>
  bool wait(event const& e, Stop const& stop) {
    if (now_logged) now_logged->wait(e.identity.get(), nullptr);
    return base::wait(e, stop);
  }
  void send(channel& c, stream& on, std::span<at::Tensor const> values) {
    if (now_logged) now_logged->add(did::send, on.get());
    base::send(c, on, values);
  }
  void receive(channel& c, stream& on, std::span<at::Tensor const> into) {
    if (now_logged) now_logged->add(did::receive, on.get());
    base::receive(c, on, into);
  }
  void sum(channel& c, stream& on, at::Tensor const& values) {
    if (now_logged) now_logged->add(did::sum, on.get());
    base::sum(c, on, values);
  }
  void all_gather(channel& c, stream& on, at::Tensor const& mine, at::Tensor const& all) {
    numbers_ = on.get();  // the end of a step: no operation of the program
    base::all_gather(c, on, mine, all);
  }

 private:
  bool of_numbers(stream const& on) const { return on.get() == numbers_; }
  void const* numbers_ = nullptr;
};

/// The operations of the proved list, without computations, which here run on no stream; pairs run one half after the other.
std::vector<operation> expected(chevron::program_view program, int rank) {
  using chevron::stream_kind;
  using chevron::stream_task;
  auto const list = chevron::stream_order(program, rank);
  log_of_rank out;
  std::map<std::tuple<int, int>, int> streams, events;  // numbers for names
  auto const stream_of = [&](chevron::stream_name s) -> void const* {
    if (s.kind == stream_kind::compute) return nullptr;
    return &streams.try_emplace({static_cast<int>(s.kind), s.peer}, 0).first->second;
  };
  auto const event_of = [&](chevron::event_name e) -> void const* {
    return &events.try_emplace({static_cast<int>(e.kind), e.number}, 0).first->second;
  };
  for (int i = 0; i < list.count; ++i) {
    chevron::stream_operation const& o = list.data[i];
    bool const of_side = o.on.kind == stream_kind::side || o.event.kind == chevron::event_kind::side_computed;
    bool const forks = o.does == stream_task::record && i + 1 < list.count && list.data[i + 1].on.kind == stream_kind::side;
    if (o.does == stream_task::let_go || of_side || forks) continue;
    if (o.does == stream_task::record) out.record(event_of(o.event), stream_of(o.on));
    if (o.does == stream_task::wait) out.wait(event_of(o.event), stream_of(o.on));
    if (o.does != stream_task::work || o.on.kind == stream_kind::compute) continue;
    out.add(o.on.kind == stream_kind::send      ? did::send
            : o.on.kind == stream_kind::receive ? did::receive
                                                : did::sum,
            stream_of(o.on));
  }
  return out.entries;
}

}  // namespace

TEST_CASE("what is asked of the streams in a step is the list that is proved, for every schedule") {
  using transport = chevron::stream_transport<logged_streams>;
  std::vector<char const*> schedules;
  chevron::catalogue::for_each([&](auto const& one) { schedules.push_back(one.name); });
  for (char const* const name : schedules) {
    int const ranks = 3, micro_batches = 7, replicas = 2;
    INFO(std::string(name));
    auto const program =
        chevron::lower(chevron::prove(chevron::catalogue::make_plan(name, {.ranks = ranks, .micro_batches = micro_batches})));
    auto const finding = chevron::check_streams(program);
    CHECK(!finding);
    std::vector<log_of_rank> logs(ranks * replicas);
    auto const said =
        transport_contract::on_ranks(ranks, replicas, [&](chevron::topology const& where, auto const& store, auto const& watch) {
          transport comm(where, store, watch, std::chrono::milliseconds(60000));
          chevron::trainer train = transport_contract::trainer_of(program, comm);
          at::Tensor const x = at::ones({micro_batches, transport_contract::width});
          for (int step = 0; step < 3; ++step) {
            // The first step agrees on shapes, the second waits for its sends.
            if (step == 2) now_logged = &logs[static_cast<std::size_t>(where.global_rank)];
            train.step({x}, {x}, micro_batches * replicas);  // a total that is given: no sum of counts beside the program's
          }
          now_logged = nullptr;
        });
    for (auto const& each : said) CHECK(each == "");
    for (int r = 0; r < ranks * replicas; ++r) {
      auto const wanted = expected(program, r % ranks);
      auto const& got = logs[static_cast<std::size_t>(r)].entries;
      INFO("rank " << r);
      CHECK(got.size() > 10);
      CHECK(got.size() == wanted.size());
      CHECK(std::equal(got.begin(), got.end(), wanted.begin(), wanted.end()));
    }
  }
}
