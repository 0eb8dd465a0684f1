// timeout: 120
// waits: signs of life stop, deadlines run out
// Ranks that no launcher watches: a lost rank breaks no connection, neither over NCCL within a machine nor over copies.
#include "gpu_double/jobs.hpp"
#include "support/free_port.hpp"

#include <signal.h>

#include <cstdlib>
#include <string>
#include <vector>

using namespace jobs;

namespace {

/// A job of two processes, of which rank 1 breaks.
struct two_ranks {
  order job;
  subprocess::started other, zero;
};

two_ranks start(order const& o) {
  std::string const port = free_port();
  auto const rank = [&](std::string const& number) {
    return subprocess::started("a job over " + o.over,
                               {"GPU_DOUBLE_JOB=" + o.text(), "OMP_NUM_THREADS=1", "RANK=" + number, "LOCAL_RANK=" + number,
                                "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port});
  };
  return {o, rank("1"), rank("0")};
}

}  // namespace

TEST_CASE("a killed rank is found in seconds, long before the deadline, and a stopped rank at the deadline") {
  std::vector<two_ranks> all;
  for (char const* const over : {"NCCL", "copies"})
    all.push_back(start({.fault = "kill", .point = "later", .culprit = 1, .over = over, .deadline = 60'000}));
  for (char const* const over : {"NCCL", "copies"})
    all.push_back(start({.fault = "stop", .point = "later", .culprit = 1, .over = over, .deadline = 15'000}));
  for (auto& [job, other, zero] : all) {
    bool const killed = job.fault == "kill";
    auto const end = zero.wait(90s);
    auto const ended = now_ms();
    if (!killed) ::kill(other.id(), SIGKILL);
    std::string const said = other.wait(10s).output;
    INFO(job.text() << ": " << end.output << "\nrank 1: " << said);
    CHECK(end.code == (killed ? 3 : 4));
    CHECK(says(end.output, {killed ? "rank 1 was lost (no sign of life for 10 s)" : "rank 1 did not answer within 15000 ms"}));
    auto const at = said.find("struck at ");
    REQUIRE(at != std::string::npos);
    if (!killed) continue;
    auto const took = ended - std::atoll(said.c_str() + at + 10);
    MESSAGE(job.over << ": " << took << " ms");
    CHECK(took > 9'000);
    CHECK(took < 15'000);
  }
  clean_up();
}
