// timeout: 300
// waits: deadlines run out
#include "support/retry.hpp"
#include "support/transport_contract.hpp"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <chevron/transports/streams/stream_transport.hpp>
#include "support/host_streams.hpp"

using host_transport = chevron::stream_transport<chevron::host_streams>;
using std::chrono::milliseconds;

namespace {

/// Streams whose next call may fail, as a call of NCCL does: neither this nor a later operation runs. Or the next operation
/// hangs.
class breaking_streams : public chevron::host_streams {
 public:
  enum class next { runs, fails, hangs };

  explicit breaking_streams(std::shared_ptr<next> operation) : next_(std::move(operation)) {}
  ~breaking_streams() { *ended_ = true; }

  void receive(channel& c, stream& on, std::span<at::Tensor const> into) {
    if (runs(on)) host_streams::receive(c, on, into);
  }
  void sum(channel& c, stream& on, at::Tensor const& values) {
    if (runs(on)) host_streams::sum(c, on, values);
  }
  void all_gather(channel& c, stream& on, at::Tensor const& mine, at::Tensor const& all) {
    if (runs(on)) host_streams::all_gather(c, on, mine, all);
  }
  chevron::detail::stream_fault fault() {
    if (has_failed_) return {.what = "call", .text = "out of memory"};
    return host_streams::fault();
  }
  void abort() {
    *ended_ = true;
    host_streams::abort();
  }

 private:
  bool runs(stream& on) {
    if (*next_ == next::fails) has_failed_ = true;
    if (*next_ == next::hangs) {
      on->post([ended = ended_] {
        while (!*ended) std::this_thread::sleep_for(milliseconds(1));
      });
    }
    return !has_failed_;
  }

  std::shared_ptr<next> next_;
  std::atomic<bool> has_failed_{false};
  std::shared_ptr<std::atomic<bool>> ended_ = std::make_shared<std::atomic<bool>>(false);
};

using breaking_transport = chevron::stream_transport<breaking_streams>;
using next = breaking_streams::next;

}  // namespace

TEST_CASE("an operation whose call failed gives no result, neither its memory's earlier bytes nor a comparison of them") {
  struct operation {
    char const* name;
    int replicas;
    std::function<double(chevron::transport&)> result;
  };
  operation const all[] = {{"all_gather", 1,
                            [](chevron::transport& comm) {
                              double const mine = comm.topology().global_rank;
                              std::vector<double> of_all(2);
                              comm.all_gather(std::span(&mine, 1), of_all);
                              return of_all[1];
                            }},
                           {"sum of gradients", 2,
                            [](chevron::transport& comm) {
                              at::Tensor const values = at::ones({4});
                              comm.start_all_reduce(0, values);
                              comm.wait_bucket(0);
                              return values.sum().item<double>();
                            }},
                           {"1RECV_F0", 1, [](chevron::transport& comm) {
                              bool const sends = comm.topology().global_rank == 0;
                              chevron::action const what = sends ? thread_ranks::send_f(0, 0) : thread_ranks::recv_f(1, 0);
                              at::Tensor const value = at::ones({3});
                              if (sends) comm.post_send(1, what, 0, std::span(&value, 1));
                              if (!sends) comm.post_receive(0, what, 0);
                              if (!sends) return comm.receive(0)[0].sum().item<double>();
                              comm.wait_send(0);
                              return 0.0;
                            }}};
  for (auto const& [name, replicas, result] : all) {
    INFO(std::string(name));
    std::atomic<int> results{0};
    auto const said = transport_contract::on_ranks(
        2 / replicas, replicas, [&](chevron::topology const& where, auto const& store, auto const& watch) {
          auto const operation = std::make_shared<next>(next::runs);
          breaking_transport comm(where, store, watch, milliseconds(60000), operation);
          if (replicas == 1) comm.connect(std::vector<chevron::edge>{{0, 1}});
          comm.open({.activation = 0, .receive = 1, .send = 1});
          for (int turn = 0; turn < 3; ++turn) {  // the first messages go out from copies
            comm.begin_step(turn);
            result(comm);
          }
          comm.begin_step(3);
          if (where.global_rank == 1) *operation = next::fails;
          result(comm);
          if (where.global_rank == 1) ++results;
          while (!watch->failed()) std::this_thread::sleep_for(milliseconds(5));
        });
    INFO(said[1]);
    CHECK(results == 0);
    CHECK(said[1].find(std::string(name) + ": ") != std::string::npos);
    CHECK(said[1].find("rank 1's call failed (out of memory); this rank was waiting for " + std::string(name)) !=
          std::string::npos);
  }
}

TEST_CASE("a deadline that is set before ranks make their trainers ends the waits of the trainers' constructors") {
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 2, .micro_batches = 4})));
  auto const begun = std::chrono::steady_clock::now();
  auto const said = transport_contract::on_ranks(2, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
    auto const operation = std::make_shared<next>(next::runs);
    breaking_transport comm(where, store, watch, milliseconds(60000), operation);
    comm.deadline(milliseconds(600));
    if (where.global_rank == 1) *operation = next::hangs;
    chevron::trainer const train = transport_contract::trainer_of(program, comm);
  });
  for (std::string const& of_rank : said) {
    INFO(of_rank);
    CHECK(of_rank.find(", making the trainer: ") != std::string::npos);
    CHECK(of_rank.find(" within 600 ms") != std::string::npos);
  }
  CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(30));
}

TEST_CASE("steps that are taken back, evaluation in between and tied weights, bit for bit as on threads") {
  using transport_contract::width;
  auto const tied = [](int number) {
    chevron::stage made = transport_contract::build_stage(number);
    if (number == 0 || number == 3) made.tie(made.parameters()[0].name, "in and out");
    return made;
  };
  for (char const* const name : {"1F1B", "ZB-H2"}) {
    auto const plan = chevron::catalogue::make_plan(name, {.ranks = 4, .micro_batches = 6});
    auto const program = chevron::lower(chevron::prove(plan));
    auto const forward = chevron::lower(chevron::prove(chevron::forward_part(plan)));
    std::vector<double> said_by[2];
    int taken_back[2] = {0, 0};
    auto const train_on = [&](chevron::transport& comm, int which) {
      bool const speaks = comm.topology().global_rank == 0;
      // Whether a step stands is asked within the next.
      auto const told = [&](chevron::step_report const& report) {
        if (!speaks) return;
        said_by[which].insert(said_by[which].end(), {report.loss, report.grad_norm});
        taken_back[which] += report.clipped ? 1 : 0;
      };
      // Every third batch is large: its gradients are above the limit, and its step is done over.
      chevron::trainer train({.program = program,
                              .transport = comm,
                              .stages = tied,
                              .loss = transport_contract::mean_square,
                              .optimizer = transport_contract::adamw,
                              .options = {.clip_grad_norm = 2, .post_validation = true, .on_report = told, .stable_steps = 1}});
      chevron::evaluator evaluate(forward, train);
      at::Tensor const all = at::arange(40 * width, at::kFloat).view({40, width}).sin();
      for (int step = 0; step < 9; ++step) {
        double const scale = step % 3 == 2 ? 40 : 0.5;
        train.step({all.narrow(0, step, 13) * scale}, {all.narrow(0, 20 - step, 13).cos() * scale});
        double const loss = step == 4 ? evaluate.loss({all.narrow(0, 0, 13)}, {all.narrow(0, 7, 13)}) : 0;
        if (speaks && step == 4) said_by[which].push_back(loss);
      }
      train.synchronize();
    };
    chevron::run_threads({.pipeline_ranks = 4}, [&](chevron::transport& comm) { train_on(comm, 0); });
    auto const said =
        transport_contract::on_ranks(4, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
          host_transport comm(where, store, watch, milliseconds(60000));
          train_on(comm, 1);
          comm.close();
        });
    for (auto const& each : said) CHECK(each == "");
    INFO(std::string(name));
    CHECK(taken_back[0] >= 2);
    CHECK(taken_back[1] == taken_back[0]);
    CHECK(said_by[0].size() == 2 * 9 + 1);
    CHECK(said_by[1] == said_by[0]);
  }
}

TEST_CASE("a rank that does not come ends the others by the deadline, with the same cause on all of them") {
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 3, .micro_batches = 4})));
  retry::until_well([&](retry::complaints& wrong, int) {
    std::mutex mutex;
    std::vector<chevron::error_context> places(3);
    std::vector<int> codes(3);
    auto const said =
        transport_contract::on_ranks(3, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
          auto const r = static_cast<std::size_t>(where.global_rank);
          host_transport comm(where, store, watch, milliseconds(60000));
          comm.deadline(milliseconds(60000));
          chevron::trainer train = transport_contract::trainer_of(program, comm);
          at::Tensor const x = at::ones({8, transport_contract::width});
          train.step({x}, {x});
          comm.deadline(milliseconds(600));
          if (where.global_rank == 2) {
            while (!watch->failed()) std::this_thread::sleep_for(milliseconds(5));
            return;
          }
          try {
            train.step({x}, {x});
          } catch (chevron::timeout_error const& e) {
            std::lock_guard const hold(mutex);
            codes[r] = e.code();
            places[r] = e.context();
            throw;
          }
        });
    for (std::size_t r : {0, 1}) {
      INFO(said[r]);
      CHECK(codes[r] == static_cast<int>(chevron::exit_code::timeout));
      CHECK(places[r].step == 1);
      CHECK(said[r].find("did not answer within 600 ms") != std::string::npos);
      wrong.unless(places[r].peer == 2, "rank 2 is named: " + said[r]);
      wrong.unless(said[r].find("rank 2 did not answer within 600 ms") != std::string::npos, "rank 2 is named: " + said[r]);
    }
  });
}

TEST_CASE("a failure that one rank publishes ends the others' streams at once") {
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("GPipe", {.ranks = 2, .micro_batches = 2})));
  auto const begun = std::chrono::steady_clock::now();
  auto const said = transport_contract::on_ranks(2, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
    host_transport comm(where, store, watch, milliseconds(60000));
    comm.deadline(milliseconds(300000));
    chevron::trainer train = transport_contract::trainer_of(program, comm);
    at::Tensor const x = at::ones({8, transport_contract::width});
    train.step({x}, {x});
    if (where.global_rank == 1) {
      watch->report({.rank = 1, .step = 1, .action = "test", .reason = "rank 1 was lost (killed by signal 9)"});
      return;
    }
    train.step({x}, {x});
  });
  CHECK(said[0].find("rank 1 was lost (killed by signal 9); this rank was waiting for") != std::string::npos);
  CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(60));  // by far not the deadline
}

TEST_CASE("a layout that ranks do not agree on, a rank that joins too late, and one that ends instead") {
  auto const said = transport_contract::on_ranks(2, 1, [&](chevron::topology where, auto const& store, auto const& watch) {
    if (where.global_rank == 1) where = {.pipeline_ranks = 1, .replicas = 2, .global_rank = 1};
    host_transport comm(where, store, watch, milliseconds(60000));
  });
  CHECK(said[0].find("this rank has 2 pipeline ranks × 1 replicas, rank 1 has 1 pipeline ranks × 2 replicas") !=
        std::string::npos);
  auto const alone_for = [](milliseconds join, milliseconds stays) {
    return transport_contract::on_ranks(2, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
      if (where.global_rank == 0) host_transport comm(where, store, watch, join);
      if (where.global_rank == 1) std::this_thread::sleep_for(stays);
    })[0];
  };
  CHECK(alone_for(milliseconds(300), milliseconds(1500))
            .find("rank 1 did not join within 300 ms; this rank was waiting for the other ranks to join") != std::string::npos);
  CHECK(alone_for(milliseconds(60000), milliseconds(0)).find("rank 1 has ended") != std::string::npos);
}
