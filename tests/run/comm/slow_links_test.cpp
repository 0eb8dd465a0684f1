// timeout: 120
// Slow links put into threads and Gloo: messages come as late as latency and bandwidth have it, and nothing else changes.
#include "support/slow_links.hpp"
#include "support/gloo_ranks.hpp"
#include "support/transport_contract.hpp"

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>

namespace slow_links_test {

using namespace std::chrono_literals;
using chevron::kind;

/// Runs `body(transport&)` on each rank of one pipeline, over threads or over Gloo, with these links; all must go well.
void run(bool gloo, int ranks, slow_links::links const& slow, std::function<void(chevron::transport&)> const& body) {
  auto const around = [&](chevron::transport& inner) {
    slow_links::transport comm(inner, slow);
    body(comm);
  };
  if (gloo)
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(ranks, 1, gloo_ranks::all_share, around));
  else
    chevron::run_threads({.pipeline_ranks = ranks}, around);
}

TEST_CASE("messages come after transfer and latency, one transfer after the other, in each direction by itself") {
  slow_links::links const slow{{{0, 1}, {.latency = 30ms, .bandwidth = 4e6}}};
  at::Tensor const large = at::arange(20'000, at::kFloat);  // 80 kB, so 20 ms
  for (bool const gloo : {false, true}) {
    CAPTURE(gloo);
    run(gloo, 3, slow, [&](chevron::transport& comm) {
      int const me = comm.topology().pipeline_rank();
      comm.connect(std::vector<chevron::edge>{{0, 1}, {1, 0}, {1, 2}});
      comm.open({.activation = 0, .receive = 8, .send = 8});
      for (long step = 0; step < 2; ++step) {
        comm.begin_step(step);
        double sent = static_cast<double>(chevron::now_ns());
        std::array<double, 3> all{};
        if (me < 2) {
          int const peer = 1 - me;
          for (std::uint16_t m = 0; m < 3; ++m)
            comm.post_receive(peer, me == 0 ? thread_ranks::recv_b(0, m) : thread_ranks::recv_f(1, m), m);
          comm.all_gather({&sent, 1}, all);  // no rank has sent before this
          for (std::uint16_t m = 0; m < 3; ++m)
            comm.post_send(peer, me == 0 ? thread_ranks::send_f(0, m) : thread_ranks::send_b(1, m), m, {{large}});
          double const first = 1e6 * (30 + 20) + *std::max_element(all.begin(), all.end());
          for (std::uint16_t m = 0; m < 3; ++m) {
            auto const came = comm.receive(m);
            CHECK(static_cast<double>(chevron::now_ns()) >= first + 20e6 * m);
            REQUIRE(came.size() == 1);
            CHECK(at::equal(came[0], large));
          }
          for (std::uint16_t m = 0; m < 3; ++m) comm.wait_send(m);
        } else {
          comm.all_gather({&sent, 1}, all);
        }
      }
    });
  }
}

TEST_CASE("collectives take the time of a ring, over replicas one after the other, and add and gather as before") {
  slow_links::rings const ring{.shards = {.latency = 5ms, .bandwidth = 1e6}, .replicas = {.latency = 10ms, .bandwidth = 2e6}};
  // By the members N, the latency and the bytes of a share: N - 1 messages to sum into shares, as many to gather them.
  using chevron::group_collective;
  CHECK(slow_links::ring_time(ring.shards, 2, group_collective::all_reduce, 10e3) == 30ms);
  CHECK(slow_links::ring_time(ring.shards, 4, group_collective::share_gather, 10e3) == 45ms);
  CHECK(slow_links::ring_time(ring.replicas, 3, group_collective::reduce_scatter, 0) == 20ms);
  CHECK(slow_links::ring_time({}, 8, group_collective::all_reduce, 1e9) == 0ms);
  CHECK(slow_links::ring_time(ring.shards, 1, group_collective::all_reduce, 1e9) == 0ms);
  chevron::run_threads({.pipeline_ranks = 1, .replicas = 2, .shards = 2}, [&](chevron::transport& inner) {
    slow_links::transport comm(inner, {}, {}, ring);
    double const nothing = 0;
    std::array<double, 4> all{};
    comm.all_gather({&nothing, 1}, all);
    auto const from = chevron::now_ns();
    at::Tensor const sum = at::ones({5000});  // 10 kB a share: two messages of 10 ms and 5 ms
    comm.over_group(chevron::rank_group::shards, group_collective::all_reduce, sum);
    CHECK(chevron::now_ns() >= from + 30'000'000);
    CHECK(at::equal(sum, at::full({5000}, 2)));

    auto const begun = chevron::now_ns();
    at::Tensor const first = at::ones({10'000}), second = at::full({10'000}, 3);  // 20 kB a share
    std::array<std::int64_t, 3> const cut{0, 5000, 10'000};
    comm.start_all_reduce(0, first);                // two messages of 10 ms and 10 ms
    comm.start_share_gather(1, second, cut);        // one, behind these
    CHECK(chevron::now_ns() < begun + 40'000'000);  // neither is awaited here
    comm.wait_bucket(1);
    CHECK(chevron::now_ns() >= begun + 60'000'000);
    comm.wait_bucket(0);
    CHECK(at::equal(first, at::full({10'000}, 2)));
    CHECK(at::equal(second, at::full({10'000}, 3)));
  });
}

/// The results of training, and the trace of each rank's last step.
struct trained {
  transport_contract::trained result;
  std::vector<std::vector<chevron::trace_event>> traces;  // by rank
};

trained train(bool gloo, std::string const& schedule, slow_links::links const& slow) {
  chevron::shape const size{.ranks = 4, .micro_batches = 6};
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan(schedule, size)));
  trained out;
  out.traces.resize(4);
  out.result.parameters.resize(4);
  std::mutex mutex;
  run(gloo, 4, slow, [&](chevron::transport& comm) {
    chevron::trainer trains = transport_contract::trainer_of(program, comm);
    at::Tensor const x = at::arange(12 * transport_contract::width, at::kFloat).view({12, transport_contract::width}).sin();
    double loss = 0;
    for (int step = 0; step < 3; ++step) loss = trains.step({x}, {x.cos()}).loss;
    auto const me = static_cast<std::size_t>(comm.topology().pipeline_rank());
    std::lock_guard const hold(mutex);
    if (me == 0) out.result.losses.push_back(loss);
    auto const entries = trains.last_trace().entries();
    out.traces[me].assign(entries.begin(), entries.end());
    for (auto& p : trains.stages()[me].parameters()) out.result.parameters[me].push_back(p.value.detach().clone());
  });
  return out;
}

/// When an action of the last step began and ended.
chevron::trace_event event_of(trained const& from, std::size_t rank, kind what, unsigned micro_batch) {
  for (chevron::trace_event const& one : from.traces[rank]) {
    if (one.op.kind == what && one.op.micro_batch == micro_batch) return one;
  }
  FAIL("rank " << rank << " has not run that");
  return {};
}

TEST_CASE("training over a slow link: the same bits, and nothing begins before its message can be there") {
  trained const plain = train(false, "1F1B", {});
  slow_links::links const slow{{{1, 2}, {.latency = 8ms}}};
  for (bool const gloo : {false, true}) {
    for (std::string const schedule : {"1F1B", "1F1B+1@1-2", "ZB-H1+1@1-2"}) {
      CAPTURE(gloo);
      CAPTURE(schedule);
      trained const got = train(gloo, schedule, slow);
      CHECK(got.result.losses == plain.result.losses);
      for (std::size_t s = 0; s < 4; ++s) {
        REQUIRE(got.result.parameters[s].size() == plain.result.parameters[s].size());
        for (std::size_t i = 0; i < plain.result.parameters[s].size(); ++i)
          CHECK(at::equal(got.result.parameters[s][i], plain.result.parameters[s][i]));
      }
      kind const backward = schedule.starts_with("ZB") ? kind::backward_input : kind::backward;
      for (unsigned m = 0; m < 6; ++m) {
        CHECK(event_of(got, 2, kind::forward, m).start >= event_of(got, 1, kind::forward, m).end + 8'000'000);
        CHECK(event_of(got, 1, backward, m).start >= event_of(got, 2, backward, m).end + 8'000'000);
      }
    }
  }
}

}  // namespace slow_links_test
