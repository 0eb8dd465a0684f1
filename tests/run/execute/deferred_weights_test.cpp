// Weight gradients that ranks hold back until they would wait: the same bits, orders that the prover accepts, limits kept.
#include "support/host_graphs.hpp"
#include "support/retry.hpp"
#include "support/small_model.hpp"
#include "support/thread_ranks.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <chevron/csv/csv_read.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>
#include <chevron/transports/gloo/run_processes.hpp>
#include <chevron/transports/streams/stream_transport.hpp>
#include "support/host_streams.hpp"

#include <doctest/doctest.h>

using namespace small_model;
using namespace std::chrono_literals;

namespace {

struct outcome {
  std::vector<double> losses;
  std::vector<std::vector<at::Tensor>> parameters;  // by stage
  std::vector<std::vector<std::string>> orders;     // by step, then rank: as CSV
};

/// What of a step's trace is in a plan, as a row of CSV.
std::string row_of(chevron::rank_trace const& trace) {
  std::string out;
  for (auto const& event : trace.entries()) {
    if (!is_compute(event.op.kind)) continue;
    chevron::action plain = event.op;
    plain.fused = 0;
    out += (out.empty() ? "" : ",") + chevron::to_text(plain).str();
  }
  return out;
}

/// What joins the ranks.
enum class over { threads, threads_with_delays, streams };

outcome train(chevron::plan const& plan, int deferred, over way, bool post_validation = false, int replicas = 1,
              std::function<chevron::stage(int)> const& build = build_stage) {
  constexpr int steps = 4;
  auto const program = chevron::lower(chevron::prove(plan));
  int const ranks = plan.size.ranks;
  outcome out;
  out.parameters.resize(static_cast<std::size_t>(plan.stages));
  out.orders.assign(steps, std::vector<std::string>(static_cast<std::size_t>(ranks)));
  std::mutex guard;
  auto const on_rank = [&](transport& comm) {
    chevron::trainer trainer(
        {.program = program,
         .transport = comm,
         .stages = build,
         .loss = mean_square,
         .optimizer = chevron::optimizer<torch::optim::AdamW>(1e-2),
         .options = {
             .clip_grad_norm = 0.5, .post_validation = post_validation, .deferred_weights = deferred, .stable_steps = 0}});
    int const me = comm.topology().pipeline_rank();
    for (long step = 0; step < steps; ++step) {
      auto const data = make_batch(2 * plan.size.micro_batches, static_cast<int>(step) + 10 * comm.topology().replica());
      trainer.step(data.input, data.target);
      if (comm.topology().replica() != 0) continue;
      std::lock_guard const hold(guard);
      out.orders[static_cast<std::size_t>(step)][static_cast<std::size_t>(me)] = row_of(trainer.last_trace());
    }
    auto const report = trainer.synchronize();
    if (comm.topology().replica() != 0) return;
    std::lock_guard const hold(guard);
    if (me == 0) out.losses.push_back(report.loss);
    for (std::size_t s = 0; s < trainer.stages().size(); ++s) {
      if (!trainer.stages()[s]) continue;
      for (auto const& p : trainer.stages()[s].parameters()) out.parameters[s].push_back(p.value.detach().clone());
    }
  };
  if (way == over::streams) {
    auto const thrown =
        thread_ranks::run(ranks, replicas, [&](chevron::topology const& where, auto const& store, auto const& watch) {
          chevron::stream_transport<chevron::host_streams> comm(where, store, watch, 60s);
          on_rank(comm);
          comm.close();
        });
    for (auto const& said : thread_ranks::said(thrown)) CHECK(said == "");
    return out;
  }
  chevron::thread_options how{.pipeline_ranks = ranks, .replicas = replicas};
  how.rendezvous = way == over::threads_with_delays;
  if (how.rendezvous) how.longest_delay = 400us;
  chevron::run_threads(how, on_rank);
  return out;
}

void check_same(outcome const& a, outcome const& b) {
  CHECK(a.losses == b.losses);
  REQUIRE(a.parameters.size() == b.parameters.size());
  for (std::size_t s = 0; s < a.parameters.size(); ++s) {
    REQUIRE(a.parameters[s].size() == b.parameters[s].size());
    REQUIRE(!a.parameters[s].empty());
    for (std::size_t i = 0; i < a.parameters[s].size(); ++i) CHECK(at::equal(a.parameters[s][i], b.parameters[s][i]));
  }
}

/// The plan that ranks made of it in one step, to be proved.
chevron::plan plan_that_ran(chevron::plan const& planned, std::vector<std::string> const& rows) {
  std::string text;
  for (std::string const& row : rows) text += row + "\n";
  chevron::plan out = chevron::read_csv(text).plan;
  out.in_flight_limit = planned.in_flight_limit;
  return out;
}

}  // namespace

TEST_CASE("held back or not, gradients and parameters are the same to the last bit, and every order that ran is a lawful plan") {
  for (char const* const name : {"ZB-H1", "ZB-H2", "ZBVZeroBubble", "V-Half", "V-Min", "1F1B", "DualPipeV"}) {
    auto const plan = plan_of(name, 3, 5);
    auto const wanted = train(plan, 0, over::threads);
    for (int const most : {1, 2, 100}) {
      CAPTURE(name);
      CAPTURE(most);
      auto const got = train(plan, most, over::threads_with_delays);
      check_same(wanted, got);
      for (auto const& rows : got.orders) {
        auto const ran = plan_that_ran(plan, rows);
        auto const found = chevron::check(ran);
        CHECK_MESSAGE(!found, chevron::describe(found).str());
      }
    }
  }
}

TEST_CASE("a rank with all it needs holds back as many as it may, and no more") {
  auto const plan = plan_of("ZB-H1", 1, 6);  // one rank waits for nobody
  for (int const most : {1, 2, 4}) {
    auto const got = train(plan, most, over::threads);
    // The first W runs when `most` others' turns have come: so many gradients stand between it and its own.
    std::string const& row = got.orders[1][0];
    int inputs = 0;
    for (std::size_t at = 0, to; at < row.size(); at = to + 1) {
      to = std::min(row.find(',', at), row.size());
      std::string const cell = row.substr(at, to - at);
      if (cell.find('W') != std::string::npos) break;
      inputs += cell.find('I') != std::string::npos ? 1 : 0;
    }
    CHECK(inputs == most + 1);
  }
}

TEST_CASE("over streams a rank that is late holds W's back past messages that are there, with the same bits") {
  auto const plan = plan_of("ZB-H1", 2, 6);
  auto const slow_at_the_end = [](int number) {
    chevron::stage made = build_stage(number);
    if (number == 0) return made;
    torch::nn::Functional const slow([](at::Tensor const& x) {
      std::this_thread::sleep_for(10ms);
      return x;
    });
    return chevron::in_sequence({torch::nn::Sequential(slow), made});
  };
  auto const wanted = train(plan, 0, over::streams, false, 1, slow_at_the_end);
  retry::until_well([&](retry::complaints& wrong, int) {
    auto const got = train(plan, 2, over::streams, false, 1, slow_at_the_end);
    check_same(wanted, got);
    int moved = 0;
    for (std::size_t step = 0; step < got.orders.size(); ++step) {
      auto const found = chevron::check(plan_that_ran(plan, got.orders[step]));
      CHECK_MESSAGE(!found, chevron::describe(found).str());
      moved += got.orders[step][1] != wanted.orders[step][1] ? 1 : 0;
    }
    wrong.unless(moved > 0, "a W runs behind its turn");
  });
}

TEST_CASE("a limit that was proved is kept: where the plan stands at it, nothing can be held back past the next forward") {
  auto plan = plan_of("V-Half", 2, 6);
  plan.in_flight_limit = chevron::peak_in_flight(plan);
  auto const wanted = train(plan, 0, over::threads);
  auto const got = train(plan, 100, over::threads_with_delays);
  check_same(wanted, got);
  for (auto const& rows : got.orders) CHECK(!chevron::check(plan_that_ran(plan, rows)));
}

TEST_CASE("with post-validation and replicas: sums start when all of a stage has been added") {
  for (char const* const name : {"ZB-H2", "ZBVZeroBubble"}) {
    auto const plan = plan_of(name, 2, 4);
    check_same(train(plan, 0, over::threads, true, 2), train(plan, 3, over::threads_with_delays, true, 2));
    check_same(train(plan, 0, over::threads, false, 2), train(plan, 3, over::threads_with_delays, false, 2));
  }
}

TEST_CASE("where it can mean nothing it is refused") {
  auto const plan = plan_of("ZB-H1", 1, 2);
  auto const refused = [&](chevron::trainer_options const& options) {
    std::string why;
    chevron::run_threads({}, [&](transport& comm) {
      try {
        chevron::trainer const trainer({.program = chevron::lower(chevron::prove(plan)),
                                        .transport = comm,
                                        .stages = build_stage,
                                        .loss = mean_square,
                                        .optimizer = sgd,
                                        .options = options});
      } catch (chevron::usage_error const& e) {
        why = e.what();
      }
    });
    return why;
  };
  CHECK(refused({.deferred_weights = -1}).find("deferred_weights is -1: give a number of W's from 0") != std::string::npos);
  CHECK(refused({.graphs = std::make_shared<host_graphs::maker>(), .deferred_weights = 2}) ==
        "deferred_weights is 2 with graphs, which are launched in the order of their capture. Remedy: 0, or no graphs");
}
