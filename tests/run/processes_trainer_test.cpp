// timeout: 240
// serial: up to four processes at once
#include "run/trained.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include <chevron/run/gloo.hpp>
#include <chevron/run/main.hpp>

#include <doctest/doctest.h>

using namespace trained;

namespace {

int train_as_rank(int ranks, int replicas) {
  at::set_num_threads(1);
  auto const job = chevron::launch({.nproc = ranks * replicas});
  chevron::gloo_transport line(job.place(ranks, replicas), job);
  line.deadline(std::chrono::seconds(60));
  complaints wrong;
  int compared = 0;
  for (char const* name : schedules) {
    if (replicas == 1) {
      for (int const m : {1, 2, 3, 5, 8}) {
        auto const plan = plan_of(name, ranks, m);
        auto const data = make_batch(2 * m + (m > 1 ? 1 : 0), m);
        reference whole(plan.stages);
        whole.run(plan, {data});
        compare_one_step(line, plan, data, whole, wrong);
        ++compared;
      }
    }
    auto const plan = plan_of(name, ranks, 3);
    std::vector<batch> data;
    for (int r = 0; r < replicas; ++r) data.push_back(make_batch(7, 70 + r));
    curve(plan, data, 20).compare(line, plan, data, wrong);
    ++compared;
  }
  line.close();
  for (auto const& w : wrong.all) std::fprintf(stderr, "%s\n", w.c_str());
  if (job.rank == 0) std::fprintf(stderr, "compared %d runs\n", compared);
  return wrong.all.empty() ? 0 : 1;
}

/// Starts this program again, as ranks, and gives its exit code; what it says goes to our stderr.
int start_ranks(int ranks, int replicas) {
  char self[4096] = {};
  if (readlink("/proc/self/exe", self, sizeof self - 1) <= 0) return -1;
  pid_t const id = fork();
  if (id == 0) {
    setenv("CHEVRON_TRAINED_RANKS", std::to_string(ranks).c_str(), 1);
    setenv("CHEVRON_TRAINED_REPLICAS", std::to_string(replicas).c_str(), 1);
    execl(self, self, "--no-skip", "--test-case=a rank of a training job", static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = 0;
  if (id < 0 || waitpid(id, &status, 0) != id) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

}  // namespace

TEST_CASE("a rank of a training job" * doctest::skip()) {
  char const* const ranks = std::getenv("CHEVRON_TRAINED_RANKS");
  char const* const replicas = std::getenv("CHEVRON_TRAINED_REPLICAS");
  if (ranks == nullptr || replicas == nullptr) return;
  int const code = chevron::run_main(0, nullptr, [&](int, char**) { return train_as_rank(std::atoi(ranks), std::atoi(replicas)); });
  std::fflush(nullptr);
  _exit(code);  // past doctest's own report
}

TEST_CASE("Gloo processes: gradients and loss curves equal those of the un-pipelined model, bit for bit") {
  CHECK(start_ranks(1, 1) == 0);
  CHECK(start_ranks(2, 1) == 0);
  CHECK(start_ranks(4, 1) == 0);
  CHECK(start_ranks(2, 2) == 0);
}
