#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <map>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include <chevron/jobs/environment.hpp>
#include <chevron/jobs/job_store.hpp>
#include <chevron/jobs/launch.hpp>
#include <chevron/jobs/rank_processes.hpp>

#include <doctest/doctest.h>

#include "support/subprocess.hpp"

using namespace chevron;

namespace {

using variables = std::map<std::string, std::string>;

launch_environment placed(variables const& set) {
  return read_environment([&](std::string const& name) -> std::optional<std::string> {
    auto const it = set.find(name);
    return it == set.end() ? std::nullopt : std::optional<std::string>(it->second);
  });
}

std::string refusal(variables const& set) {
  try {
    placed(set);
  } catch (usage_error const& e) {
    return e.what();
  }
  return "accepted";
}

}  // namespace

TEST_CASE("what the keys of a job begin with is its own, and does not tell the secret") {
  using chevron::detail::drawn_keys;
  using chevron::detail::keys_of;
  launch_environment one, other;
  CHECK(keys_of(one) == keys_of(other));
  one.secret = "a word";
  CHECK(keys_of(one) != keys_of(other));
  CHECK(keys_of(one).find("a word") == std::string::npos);
  other.secret = "another";
  CHECK(keys_of(one) != keys_of(other));
  other = one;
  other.job = "slurm.1.0";
  CHECK(keys_of(one) != keys_of(other));
  CHECK(drawn_keys() != drawn_keys());
}

TEST_CASE("each launcher's variables give rank, world, local rank and the place of the store") {
  CHECK(placed({}).world == 1);
  CHECK(placed({}).launcher == "none");

  auto const torchrun = placed({{"RANK", "3"},
                                {"WORLD_SIZE", "4"},
                                {"LOCAL_RANK", "1"},
                                {"MASTER_ADDR", "10.0.0.1"},
                                {"MASTER_PORT", "4711"},
                                {"TORCHELASTIC_RUN_ID", "run7"},
                                {"TORCHELASTIC_RESTART_COUNT", "2"},
                                {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  CHECK(torchrun.launcher == "torchrun");
  CHECK(torchrun.rank == 3);
  CHECK(torchrun.world == 4);
  CHECK(torchrun.local_rank == 1);
  CHECK(torchrun.address == "10.0.0.1");
  CHECK(torchrun.port == 4711);
  CHECK(torchrun.store_is_there);
  CHECK(torchrun.job == "run7.2");

  auto const plain = placed({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}});
  CHECK(plain.launcher == "environment");
  CHECK_FALSE(plain.store_is_there);

  auto const mpi = placed({{"OMPI_COMM_WORLD_RANK", "1"},
                           {"OMPI_COMM_WORLD_SIZE", "2"},
                           {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                           {"PMIX_NAMESPACE", "123.1"},
                           {"CHEVRON_JOB_SECRET", "a word"},
                           {"MASTER_ADDR", "h"},
                           {"MASTER_PORT", "2"}});
  CHECK(mpi.launcher == "Open MPI");
  CHECK(mpi.job == "pmix.123.1");
  CHECK(mpi.secret == "a word");
  CHECK(mpi.rank == 1);
  CHECK(mpi.local_rank == 1);

  auto const pmi =
      placed({{"PMI_RANK", "1"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "0"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "2"}});
  CHECK(pmi.launcher == "PMI");
  CHECK(pmi.world == 3);

  auto const slurm = placed({{"SLURM_PROCID", "5"},
                             {"SLURM_STEP_NUM_TASKS", "8"},
                             {"SLURM_LOCALID", "1"},
                             {"SLURM_JOB_ID", "123456"},
                             {"SLURM_STEP_ID", "0"},
                             {"SLURM_STEP_NODELIST", "gnode[10,20-25]"}});
  CHECK(slurm.launcher == "Slurm");
  CHECK(slurm.rank == 5);
  CHECK(slurm.address == "gnode10");
  CHECK(slurm.port == 20000 + 123456 % 20000);
  CHECK(slurm.job == "slurm.123456.0");

  // The shell of a batch script is no task of a step.
  CHECK(placed({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "1"}}).world == 1);
  // torchrun within Slurm: the inner one is meant.
  CHECK(placed({{"RANK", "0"},
                {"WORLD_SIZE", "2"},
                {"MASTER_ADDR", "h"},
                {"MASTER_PORT", "1"},
                {"TORCHELASTIC_RUN_ID", "x"},
                {"SLURM_PROCID", "0"},
                {"SLURM_STEP_NUM_TASKS", "1"}})
            .launcher == "torchrun");
}

TEST_CASE("PMI's variables that srun has set give Slurm's job; those of an mpirun within a step give PMI's") {
  variables both{{"PMI_RANK", "1"},
                 {"PMI_SIZE", "2"},
                 {"SLURM_JOB_ID", "77"},
                 {"SLURM_PROCID", "1"},
                 {"SLURM_STEP_NUM_TASKS", "2"},
                 {"SLURM_STEP_NODELIST", "n1"},
                 {"SLURM_STEP_ID", "0"}};
  CHECK(placed(both).launcher == "Slurm");
  CHECK(placed(both).rank == 1);
  CHECK(placed(both).address == "n1");
  both["PMI_SIZE"] = "8";
  both["PMI_RANK"] = "5";
  both["MASTER_ADDR"] = "h";
  both["MASTER_PORT"] = "1";
  CHECK(placed(both).launcher == "PMI");
  CHECK(placed(both).rank == 5);
  CHECK(placed(both).world == 8);
}

TEST_CASE("launchers of other sites are known, or their ranks are refused; no process is a job of its own") {
  for (std::string const& prefix : {"FLUX_TASK_RANK FLUX_JOB_SIZE Flux", "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE jsrun",
                                    "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MVAPICH"}) {
    auto const one = prefix.find(' '), two = prefix.rfind(' ');
    variables set{{prefix.substr(0, one), "1"}, {prefix.substr(one + 1, two - one - 1), "2"}};
    std::string const launcher = prefix.substr(two + 1);
    CHECK(refusal(set).find("MASTER_ADDR is missing, while " + launcher + " says 2 ranks") != std::string::npos);
    set["MASTER_ADDR"] = "h";
    set["MASTER_PORT"] = "1";
    // Flux may run within a step of Slurm, whose variables its tasks then have too.
    set["SLURM_PROCID"] = "0";
    set["SLURM_STEP_NUM_TASKS"] = "1";
    CHECK(placed(set).launcher == launcher);
    CHECK(placed(set).rank == 1);
    CHECK(placed(set).world == 2);
  }
  for (std::string const& name : {"PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE"}) {
    CHECK(placed({{name, "0"}}).world == 1);
    CHECK(
        refusal({{name, "3"}}).find("started this process as rank 3 (" + name + "), and no variable tells the number of ranks") !=
        std::string::npos);
  }
}

TEST_CASE("an address of IPv6 may stand in brackets, and quotes show the blanks of an address that is unknown") {
  CHECK(placed({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "[::1]"}, {"MASTER_PORT", "1"}}).address == "::1");
  CHECK(placed({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "::1"}, {"MASTER_PORT", "1"}}).address == "::1");
  CHECK_THROWS_WITH_AS(chevron::detail::resolve("127.0.0.1 ", 1), doctest::Contains("MASTER_ADDR=\"127.0.0.1 \" is unknown: "),
                       usage_error);
  CHECK_THROWS_WITH_AS(chevron::detail::resolve("127.0.0.1 ", 1), doctest::Contains("one alone and without blanks"), usage_error);
  CHECK_THROWS_WITH_AS(chevron::detail::resolve("nowhere.invalid", 1), doctest::Contains("rank 0's machine"), usage_error);
}

TEST_CASE("what is missing or wrong is named") {
  CHECK(refusal({{"RANK", "0"}}).find("WORLD_SIZE is missing, while RANK is set (launcher: environment)") != std::string::npos);
  CHECK(refusal({{"WORLD_SIZE", "2"}}).find("RANK is missing, while WORLD_SIZE is set") != std::string::npos);
  CHECK(refusal({{"TORCHELASTIC_RUN_ID", "x"}}).find("RANK is missing, while TORCHELASTIC_RUN_ID is set") != std::string::npos);
  CHECK(refusal({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_JOB_ID", "1"}})
            .find("SLURM_STEP_NODELIST is missing, while Slurm says 2 ranks") != std::string::npos);
  CHECK(refusal({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NODELIST", "n1"}})
            .find("SLURM_JOB_ID is missing, while Slurm says 2 ranks") != std::string::npos);
  CHECK(refusal({{"OMPI_COMM_WORLD_RANK", "0"}}).find("OMPI_COMM_WORLD_SIZE is missing") != std::string::npos);
  CHECK(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}).find("MASTER_ADDR is missing, while environment says 2 ranks") !=
        std::string::npos);
  CHECK(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}}).find("MASTER_PORT is missing") != std::string::npos);
  CHECK(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}).find("RANK=2 is not below WORLD_SIZE=2") != std::string::npos);
  CHECK(refusal({{"RANK", "one"}, {"WORLD_SIZE", "2"}}).find("RANK=one is not a number") != std::string::npos);
  CHECK(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2x"}}).find("WORLD_SIZE=2x is not a number") != std::string::npos);
  CHECK(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "70000"}}).find("MASTER_PORT=70000") !=
        std::string::npos);
  CHECK(refusal({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}).find("RANK=-1") != std::string::npos);
}

TEST_CASE("the first host of a node list") {
  CHECK(first_host("one") == "one");
  CHECK(first_host("one,two") == "one");
  CHECK(first_host("n[007-9],m1") == "n007");
  CHECK(first_host("gnode[10,20-25]") == "gnode10");
  CHECK(first_host("a1,n[2-3]") == "a1");
  CHECK(first_host("rack[3-4]-x,y") == "rack3-x");
  CHECK_THROWS_AS(first_host("n[1"), usage_error);
}

TEST_CASE("a layout must use every process") {
  job job;
  job.rank = 3;
  job.world = 4;
  CHECK(job.topology(2, 2).pipeline_rank() == 1);
  CHECK(job.topology(2, 2).replica() == 1);
  CHECK(job.topology(4).pipeline_rank() == 3);
  CHECK_THROWS_WITH_AS(job.topology(3),
                       "3 pipeline ranks × 1 replicas need 3 processes, but there are 4 (launcher: ). Remedy: as many processes "
                       "as pipeline ranks × replicas",
                       usage_error);
  CHECK_THROWS_AS(job.topology(0, 0), usage_error);
}

TEST_CASE("a process that a launcher has started as one of several forks no ranks") {
  auto const forking = [](variables const& set) -> std::string {
    try {
      launch({.nproc = 2, .environment = [&](std::string const& name) -> std::optional<std::string> {
                auto const it = set.find(name);
                return it == set.end() ? std::nullopt : std::optional<std::string>(it->second);
              }});
    } catch (usage_error const& e) {
      return e.what();
    }
    return "forked";
  };
  CHECK(forking({{"TORCHELASTIC_RUN_ID", "x"}, {"RANK", "0"}, {"WORLD_SIZE", "2"}}) ==
        "--nproc 2 starts processes, but torchrun has already done so (WORLD_SIZE=2). Remedy: leave --nproc away, or unset "
        "WORLD_SIZE");
  CHECK(forking({{"RANK", "1"}, {"WORLD_SIZE", "3"}}).find("but environment has already done so (WORLD_SIZE=3)") !=
        std::string::npos);
  CHECK(forking({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}}).find("but Open MPI has already") !=
        std::string::npos);
  CHECK(forking({{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}}).find("(PMI_SIZE=4)") != std::string::npos);
  CHECK(forking({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "2"}}).find("but Slurm has already") != std::string::npos);
  // The shell of a batch script, a step of one task, one process that torchrun has started.
  check_unlaunched(2, [](std::string const& name) -> std::optional<std::string> {
    if (name == "SLURM_NTASKS") return "8";
    if (name == "SLURM_STEP_NUM_TASKS" || name == "WORLD_SIZE") return "1";
    if (name == "SLURM_PROCID" || name == "RANK") return "0";
    return std::nullopt;
  });
}

// Begun by the next one, in a process with one thread.
TEST_CASE("ranks of which two never end" * doctest::skip()) {
  chevron::detail::rank_processes ranks;
  int const rank = ranks.fork(3);
  if (rank == 0) ::_exit(0);
  if (rank > 0) {
    for (;;) ::pause();
  }
  int const code = ranks.wait({.last = std::chrono::milliseconds(200)}, [&](int lost, int, std::string const& how) {
    std::printf("rank %d %s\n", lost, how.c_str());
    std::fflush(stdout);
  });
  ::_exit(code);
}

TEST_CASE("a rank that never ends is not waited for once another has") {
  auto const end = subprocess::started("ranks of which two never end", {}).wait();
  CHECK(end.code == 4);
  CHECK(end.output.find("rank 1 did not end within 200 ms after another had") != std::string::npos);
}
