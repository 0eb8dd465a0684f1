// timeout: 120
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <chevron/jobs/run_main.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>

#include "support/one_message.hpp"
#include "support/subprocess.hpp"

#include <doctest/doctest.h>

using namespace chevron;

namespace {

// ---- The work of the ranks: this test program itself, selected by environment variables

/// The part of replica r in a bucket, the same on every rank.
at::Tensor part(int pipeline_rank, int r, std::int64_t numbers, at::ScalarType type, int round) {
  at::Tensor const at = at::arange(numbers, at::kDouble);
  return (at * (0.37 * (r + 1)) + (pipeline_rank + 10 * round)).sin().to(type);
}

struct bucket {
  std::int64_t numbers;
  at::ScalarType type;
};

/// 1, with a line that says so, where a bucket's result is not the sum in the order of replicas; else 0.
int differs(gloo_transport& comm, at::Tensor const& got, bucket const& of, int round, int number, char const* what) {
  topology const& where = comm.topology();
  at::Tensor wanted = part(where.pipeline_rank(), 0, of.numbers, of.type, round);
  for (int r = 1; r < where.replicas; ++r) wanted.add_(part(where.pipeline_rank(), r, of.numbers, of.type, round));
  if (at::equal(got, wanted)) return 0;
  std::fprintf(stderr, "rank %d, round %d, bucket %d: %s not the sum in the order of replicas\n", where.global_rank, round, number,
               what);
  return 1;
}

/// Sums of uneven shares, then a gather of them, as in a step with an optimizer that is sharded over replicas.
int compare_shares(gloo_transport& comm, std::vector<bucket> const& buckets, int round) {
  int const p = comm.topology().pipeline_rank(), replicas = comm.topology().replicas;
  std::vector<at::Tensor> mine;
  std::vector<std::vector<std::int64_t>> cuts;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    std::vector<std::int64_t> cut{0};
    for (int r = 1; r < replicas; ++r) cut.push_back(buckets[b].numbers * r * r / (replicas * replicas));
    cut.push_back(buckets[b].numbers);
    cuts.push_back(cut);
    mine.push_back(part(p, comm.topology().replica(), buckets[b].numbers, buckets[b].type, round));
    comm.start_reduce_scatter(static_cast<int>(b), mine.back(), cut);
  }
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    comm.wait_bucket(static_cast<int>(b));
    comm.start_share_gather(static_cast<int>(b), mine[b], cuts[b]);
  }
  int wrong = 0;
  for (std::size_t b = 0; b < buckets.size(); ++b) {
    comm.wait_bucket(static_cast<int>(b));
    wrong += differs(comm, mine[b], buckets[b], round, static_cast<int>(b), "gathered shares are");
  }
  return wrong;
}

int compare(gloo_transport& comm) {
  int const p = comm.topology().pipeline_rank();
  std::vector<bucket> const buckets{{1, at::kFloat},      {1000, at::kFloat},      {262144, at::kFloat}, {1500003, at::kFloat},
                                    {70001, at::kDouble}, {300007, at::kBFloat16}, {9, at::kHalf}};
  int wrong = 0;
  for (int round = 0; round < 2; ++round) {
    comm.begin_step(round);
    std::vector<at::Tensor> mine;
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      mine.push_back(part(p, comm.topology().replica(), buckets[b].numbers, buckets[b].type, round));
      comm.start_all_reduce(static_cast<int>(b), mine.back());
    }
    for (std::size_t b = 0; b < buckets.size(); ++b) {
      comm.wait_bucket(static_cast<int>(b));
      wrong += differs(comm, mine[b], buckets[b], round, static_cast<int>(b), "the result is");
    }
    wrong += compare_shares(comm, buckets, round);
  }
  return wrong == 0 ? 0 : 1;
}

/// Sums, until the victim finds itself in the middle of a sum and ends there: the first number is summed, the last is not.
int die(gloo_transport& comm, int victim) {
  at::Tensor const mine = at::empty({4000000});
  auto const number = [&](std::int64_t i) { return static_cast<float const volatile*>(mine.data_ptr<float>())[i]; };
  for (long step = 0;; ++step) {
    comm.begin_step(step);
    mine.fill_(1);
    comm.start_all_reduce(0, mine);
    if (comm.topology().global_rank == victim) {
      while (number(0) == 1) {
      }
      if (number(mine.numel() - 1) == 1) kill(getpid(), SIGKILL);
    }
    comm.wait_bucket(0);
  }
}

/// Gathers shares, until the victim finds itself in the middle of a gather and ends there. The victim's is the last share, so the
/// first element comes from another replica.
int die_gathering(gloo_transport& comm, int victim) {
  at::Tensor const mine = at::empty({4000000});
  auto const numbers = mine.numel();
  int const replicas = comm.topology().replicas;
  std::vector<std::int64_t> cut;
  for (int r = 0; r <= replicas; ++r) cut.push_back(numbers * r / replicas);
  auto const number = [&](std::int64_t i) { return static_cast<float const volatile*>(mine.data_ptr<float>())[i]; };
  for (long step = 0;; ++step) {
    comm.begin_step(step);
    mine.fill_(comm.topology().replica() == 0 ? 1 : 0);
    comm.start_share_gather(0, mine, cut);
    if (comm.topology().global_rank == victim) {
      while (number(0) == 0) {
      }
      if (number(cut[1] - 1) == 0) kill(getpid(), SIGKILL);
    }
    comm.wait_bucket(0);
  }
}

/// Starts this program again, as ranks.
subprocess::program_end ranks_that(std::string const& task, int pipeline_ranks, int replicas) {
  return subprocess::started("a rank that sums",
                             {"CHEVRON_SUMS_TASK=" + task, "CHEVRON_SUMS_RANKS=" + std::to_string(pipeline_ranks),
                              "CHEVRON_SUMS_REPLICAS=" + std::to_string(replicas)})
      .wait();
}

}  // namespace

TEST_CASE("a rank that sums" * doctest::skip()) {
  char const* const task = std::getenv("CHEVRON_SUMS_TASK");
  if (task == nullptr) return;
  int const ranks = std::atoi(std::getenv("CHEVRON_SUMS_RANKS")), replicas = std::atoi(std::getenv("CHEVRON_SUMS_REPLICAS"));
  int const code = run_main(0, nullptr, [&](int, char**) {
    at::set_num_threads(1);
    auto const job = launch({.nproc = ranks * replicas});
    gloo_transport comm(job.topology(ranks, replicas), job);
    comm.deadline(std::chrono::seconds(100));
    comm.open({.activation = 0, .receive = 1, .send = 1});
    std::string const what = task;
    int const good = what == "compare"              ? compare(comm)
                     : what.find("gathering ") == 0 ? die_gathering(comm, std::stoi(what.substr(10)))
                                                    : die(comm, std::stoi(what));
    comm.close();
    return good;
  });
  std::fflush(nullptr);
  _exit(code);  // past doctest's own report
}

TEST_CASE("processes add replicas in their order, to the last bit") {
  for (auto const& [ranks, replicas] : {std::pair{1, 2}, std::pair{2, 2}, std::pair{2, 3}}) {
    auto const end = ranks_that("compare", ranks, replicas);
    INFO(ranks << " ranks × " << replicas << " replicas: " << end.output);
    CHECK(end.code == 0);
  }
}

TEST_CASE("a replica killed in the middle of a sum: all others end with code 3 and name it, long before the deadline") {
  for (auto const& [ranks, replicas, victim] : {std::tuple{1, 2, 1}, std::tuple{1, 3, 0}, std::tuple{2, 2, 2}}) {
    auto const end = ranks_that(std::to_string(victim), ranks, replicas);
    INFO(ranks << " ranks × " << replicas << " replicas, rank " << victim << " killed: " << end.output);
    CHECK(end.code == 3);
    auto const lost = "rank " + std::to_string(victim) + " was lost (killed by signal 9)";
    CHECK(one_message::fault(end.output, one_message::all_but(victim, ranks * replicas), lost + "; this rank was waiting for ",
                             "stopped, as rank " + std::to_string(victim) + " is gone") == "");
    CHECK(end.lines_with(", sum of gradients: ") >= replicas - 1);
    CHECK(end.lines_with(lost) == 2);  // and the launcher
  }
}

TEST_CASE("a replica killed in the middle of a gather of shares: all others end with code 3 and name it") {
  for (auto const& [ranks, replicas, victim] : {std::tuple{1, 2, 1}, std::tuple{1, 3, 2}}) {
    auto const end = ranks_that("gathering " + std::to_string(victim), ranks, replicas);
    INFO(ranks << " ranks × " << replicas << " replicas, rank " << victim << " killed: " << end.output);
    CHECK(end.code == 3);
    auto const lost = "rank " + std::to_string(victim) + " was lost (killed by signal 9)";
    CHECK(one_message::fault(end.output, one_message::all_but(victim, ranks * replicas),
                             lost + "; this rank was waiting for gather of shares",
                             "stopped, as rank " + std::to_string(victim) + " is gone") == "");
    CHECK(end.lines_with(", gather of shares: ") == replicas - 1);
  }
}
