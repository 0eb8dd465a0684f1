// timeout: 420
// waits: ranks that are stopped, and deadlines
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chevron/jobs/run_main.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>

#include "support/free_port.hpp"
#include "support/one_message.hpp"
#include "support/retry.hpp"
#include "support/subprocess.hpp"

#include <doctest/doctest.h>

using namespace chevron;
using namespace std::chrono_literals;

namespace {

using steady = std::chrono::steady_clock;

// ---- The program that is started, killed and stopped below: this test program itself, told so by an environment variable
// ----------

std::string setting(std::map<std::string, std::string> const& all, std::string const& name, std::string const& otherwise) {
  auto const it = all.find(name);
  return it == all.end() ? otherwise : it->second;
}

/// Messages as a pipeline of P ranks has them: every microbatch down and up again, sums over the replicas at the end of each
/// step.
int rank_program(std::map<std::string, std::string> const& settings) {
  auto const number = [&](char const* name, int otherwise) {
    return std::stoi(setting(settings, name, std::to_string(otherwise)));
  };
  launch_options options;
  options.nproc = number("nproc", 0);
  options.join = std::chrono::milliseconds(number("join", 60000));
  auto const job = launch(options);
  std::fprintf(stderr, "pid %d %d\n", job.rank, static_cast<int>(getpid()));
  if (job.rank == 0) std::fprintf(stderr, "store: %s\n", job.store_address.c_str());
  if (number("late", -1) == job.rank) std::this_thread::sleep_for(600s);
  if (number("leaves", -1) == job.rank) return 0;
  int const replicas = number("replicas", 1);
  auto const where = job.topology(job.world / replicas, replicas);
  int const r = where.pipeline_rank();
  int const last = where.pipeline_ranks - 1;
  int const micro_batches = number("microbatches", 3);
  int const steps = number("steps", 20);
  bool const busy = number("busy", -1) == job.rank;
  auto const until = setting(settings, "until", "");  // the job goes on until this file is there

  gloo_transport link(where, job);
  link.deadline(std::chrono::milliseconds(number("deadline", 60000)));
  link.open({.activation = 0, .receive = 2, .send = 2});
  for (int step = 0; step < steps; ++step) {
    link.begin_step(step);
    if (step == 3) std::fprintf(stderr, "warm %d\n", job.rank);
    if (busy && step == 5) {
      std::fprintf(stderr, "busy %d\n", job.rank);
      std::this_thread::sleep_for(600s);
    }
    if (number("throw", -1) == job.rank && step == 5)
      throw numerical_error("the loss is nan", {.rank = job.rank, .peer = -1, .step = step});
    if (number("exit", -1) == job.rank && step == 5) _exit(17);
    if (number("early", -1) == job.rank && step == 5) break;
    for (int m = 0; m < micro_batches; ++m) {
      at::Tensor x = at::full({2, 8}, step * 100 + m);
      if (r > 0) {
        link.post_receive(r - 1, make_action(kind::receive_forward, r, m), 0);
        x = std::move(link.receive(0)[0]);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(number("work", 1)));
      if (r < last) {
        at::Tensor const sent = x + 1;
        link.post_send(r + 1, make_action(kind::send_forward, r, m), 0, {&sent, 1});
        link.wait_send(0);
        link.post_receive(r + 1, make_action(kind::receive_backward, r, m), 1);
        at::Tensor const back = std::move(link.receive(1)[0]);
        if (back.flatten()[0].item<float>() != static_cast<float>(step * 100 + m + last))
          throw error(exit_code::numerical, "wrong values", {});
        x = back;
      }
      if (r > 0) {
        link.post_send(r - 1, make_action(kind::send_backward, r, m), 1, {&x, 1});
        link.wait_send(1);
      }
    }
    auto sum = at::full({100}, job.rank);
    link.start_all_reduce(0, sum);
    link.wait_bucket(0);
    double const mine = job.rank;
    std::vector<double> all(static_cast<std::size_t>(job.world));
    for (int i = 0; i < number("gathers", 1); ++i) link.all_gather({&mine, 1}, all);
    if (until.empty()) continue;
    // All stop together: where rank 0 saw it.
    double const seen = std::filesystem::exists(until) ? 1 : 0;
    link.all_gather({&seen, 1}, all);
    if (all[0] != 0) break;
  }
  link.close();
  if (job.rank == 0)
    std::fprintf(stderr, "all is well: %d ranks by %s, store at %s\n", job.world, job.launcher.c_str(),
                 job.store_address.c_str());
  return 0;
}

using subprocess::program_end;

/// The rank program, with its settings.
class started : public subprocess::started {
 public:
  started(std::string const& settings, std::vector<std::string> environment = {}, std::vector<std::string> in_front = {})
      : subprocess::started("rank program", with(std::move(environment), settings), std::move(in_front)) {}

  pid_t pid_of(int rank) {
    auto const key = "pid " + std::to_string(rank) + " ";
    REQUIRE(says(key));
    return static_cast<pid_t>(std::stoi(output().substr(output().find(key) + key.size())));
  }

 private:
  static std::vector<std::string> with(std::vector<std::string> environment, std::string const& settings) {
    environment.push_back("CHEVRON_RANK_PROGRAM=" + settings);
    return environment;
  }
};

/// One process a rank, as a launcher that only sets variables starts them.
std::vector<started> start_ranks(int world, std::string const& settings) {
  auto const port = free_port();
  std::vector<started> out;
  for (int rank = 0; rank < world; ++rank) {
    out.emplace_back(settings, std::vector<std::string>{"RANK=" + std::to_string(rank), "WORLD_SIZE=" + std::to_string(world),
                                                        "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + port});
  }
  return out;
}

bool runs_now(pid_t id) {
  std::ifstream stat("/proc/" + std::to_string(id) + "/stat");
  std::string line;
  if (!std::getline(stat, line)) return false;
  return line.at(line.rfind(')') + 2) != 'Z';  // an orphan may remain a zombie if no process reaps it
}
/// Killed processes need a moment to be gone.
bool is_running(pid_t id) {
  auto const until = steady::now() + 60s;
  while (runs_now(id) && steady::now() < until) std::this_thread::sleep_for(10ms);
  return runs_now(id);
}

/// Every rank says that it is warm. A short deadline may pass before, where the machine stalls: then `wrong` says so.
bool all_warm(std::vector<started>& ranks, retry::complaints& wrong) {
  for (auto& each : ranks) wrong.unless(each.says("warm"), "a warm rank: " + each.output());
  return wrong.text.empty();
}
void wants(retry::complaints& wrong, program_end const& end, std::string const& words, int lines) {
  wrong.unless(end.lines_with(words) == lines, std::to_string(lines) + " lines with `" + words + "` in:\n" + end.output);
}
/// One rank prints the whole message, each other one of `ranks` a short line with this cause.
void wants_one(retry::complaints& wrong, std::string const& output, std::vector<int> const& ranks, std::string const& whole,
               std::string const& cause) {
  std::string const fault = one_message::fault(output, ranks, whole, cause);
  wrong.unless(fault.empty(), "one whole message: " + fault);
}
using one_message::all_but;
std::string gone(int rank) { return "stopped, as rank " + std::to_string(rank) + " is gone"; }
std::string silent(int rank) { return "stopped, as rank " + std::to_string(rank) + " does not answer"; }

}  // namespace

TEST_CASE("rank program" * doctest::skip()) {
  char const* const text = std::getenv("CHEVRON_RANK_PROGRAM");
  if (text == nullptr) return;
  std::map<std::string, std::string> settings;
  std::istringstream in(text);
  for (std::string each; in >> each;) settings[each.substr(0, each.find('='))] = each.substr(each.find('=') + 1);
  int const code = run_main(0, nullptr, [&](int, char**) { return rank_program(settings); });
  std::fflush(nullptr);
  _exit(code);  // past doctest's own report
}

TEST_CASE("forked ranks exchange tensors and end well") {
  auto const end = started("nproc=4 replicas=2").wait();
  INFO(end.output);
  CHECK(end.code == 0);
  CHECK(end.lines_with("all is well: 4 ranks by --nproc 4, store at 127.0.0.1:") == 1);
}

TEST_CASE("a rank killed in the middle of a step: all others end with code 3 within 2 s and say what they waited for") {
  for (int victim = 0; victim < 4; ++victim) {
    retry::until_well([&](retry::complaints& wrong, int) {
      auto ranks = start_ranks(4, "steps=100000 work=2");
      for (auto& each : ranks) REQUIRE_MESSAGE(each.says("warm"), each.output());
      std::this_thread::sleep_for(std::chrono::milliseconds(37 * victim));
      retry::stopwatch const since;
      kill(ranks[static_cast<std::size_t>(victim)].id(), SIGKILL);
      std::string all;
      for (int r = 0; r < 4; ++r) {
        auto const end = ranks[static_cast<std::size_t>(r)].wait();
        if (r == victim) continue;
        INFO("victim " << victim << ", rank " << r << ": " << end.output);
        CHECK(end.code == 3);
        wants(wrong, end, "rank " + std::to_string(r) + ", step ", 1);
        wrong.unless(end.lines_with("rank " + std::to_string(victim)) >= 1, "the victim's name in: " + end.output);
        all += end.output;
        if (victim != 0) continue;
        // The store is gone with its host, so that no rank can learn which rank prints the message.
        CHECK(end.lines_with("lost") == 1);
        wants(wrong, end, "; this rank was waiting for ", 1);
      }
      if (victim != 0) {
        wants_one(wrong, all, all_but(victim, 4), "; this rank was waiting for ", gone(victim));
        program_end const joined{.code = 3, .output = all};
        wants(wrong, joined, "lost", 1);
      }
      wrong.unless(since.spent() < 2s, "all ended within 2 s");
    });
  }
}

TEST_CASE("a forked rank killed: the launcher names the signal, and ends with 3") {
  for (int victim : {0, 2, 3}) {
    retry::until_well([&](retry::complaints& wrong, int) {
      started job("nproc=4 steps=100000 work=2");
      auto const pid = job.pid_of(victim);
      std::vector<pid_t> all;
      for (int r = 0; r < 4; ++r) all.push_back(job.pid_of(r));
      REQUIRE(job.says("warm", 4));
      retry::stopwatch const since;
      kill(pid, SIGKILL);
      auto const end = job.wait();
      wrong.unless(since.spent() < 2s, "all ended within 2 s");
      INFO(end.output);
      CHECK(end.code == 3);
      auto const name = "rank " + std::to_string(victim) + " was lost (killed by signal 9)";
      wants_one(wrong, end.output, all_but(victim, 4), name + "; this rank was waiting for ", gone(victim));
      wants(wrong, end, name, 2);  // and the launcher
      for (auto each : all) CHECK_FALSE(is_running(each));
    });
  }
}

TEST_CASE("a stopped rank: the others end with code 4 after the deadline, and all name the rank that was stopped") {
  for (int victim : {0, 1, 3}) {
    retry::until_well([&](retry::complaints& wrong, int) {
      started job("nproc=4 steps=100000 work=2 deadline=1500");
      auto const pid = job.pid_of(victim);
      wrong.unless(job.says("warm", 4), "four warm ranks");
      retry::stopwatch const since;
      auto const stopped_at = steady::now();
      kill(pid, SIGSTOP);
      auto const end = job.wait();
      auto const spent = since.spent(), by_the_clock = steady::now() - stopped_at;
      INFO(end.output);
      CHECK(end.code > 0);
      wrong.unless(by_the_clock > 1450ms, "as long as the deadline");
      wrong.unless(spent < 1500ms + 4s, "soon after the deadline");  // the launcher gives the stopped one two seconds more
      wrong.unless(end.code == 4, "exit code 4: " + std::to_string(end.code));
      wants_one(wrong, end.output, all_but(victim, 4), "rank " + std::to_string(victim) + " did not answer within 1500 ms",
                silent(victim));
    });
  }
}

TEST_CASE("in collectives, too, the lost or stopped rank is named") {
  std::string const settings = "steps=100000 work=0 replicas=2 microbatches=1 gathers=100";
  SUBCASE("killed") {
    retry::until_well([&](retry::complaints& wrong, int) {
      auto ranks = start_ranks(4, settings);
      for (auto& each : ranks) REQUIRE_MESSAGE(each.says("warm"), each.output());
      kill(ranks[2].id(), SIGKILL);
      std::string all;
      for (std::size_t r : {0, 1, 3}) {
        auto const end = ranks[r].wait();
        INFO(end.output);
        CHECK(end.code == 3);
        all += end.output;
      }
      wants_one(wrong, all, {0, 1, 3}, "rank 2 was lost (", gone(2));
    });
  }
  SUBCASE("stopped") {
    retry::until_well([&](retry::complaints& wrong, int) {
      auto ranks = start_ranks(4, settings + " deadline=1500");
      if (!all_warm(ranks, wrong)) return;
      kill(ranks[2].id(), SIGSTOP);
      std::string all;
      for (std::size_t r : {0, 1, 3}) {
        auto const end = ranks[r].wait();
        INFO(end.output);
        CHECK(end.code > 0);
        wrong.unless(end.code == 4, "exit code 4: " + std::to_string(end.code));
        all += end.output;
      }
      wants_one(wrong, all, {0, 1, 3}, "rank 2 did not answer within 1500 ms", silent(2));
    });
  }
}

TEST_CASE("stopping the rank that hosts the store does not make the others wait for ever") {
  retry::until_well([&](retry::complaints& wrong, int) {
    auto ranks = start_ranks(4, "steps=100000 work=2 deadline=1500");
    if (!all_warm(ranks, wrong)) return;
    retry::stopwatch const since;
    kill(ranks[0].id(), SIGSTOP);
    for (std::size_t r = 1; r < 4; ++r) {
      auto const end = ranks[r].wait();
      INFO(end.output);
      CHECK(end.code > 0);
      wrong.unless(end.code == 4, "exit code 4: " + std::to_string(end.code));
      wants(wrong, end, "rank 0 did not answer within 1500 ms", 1);
    }
    wrong.unless(since.spent() < 1500ms + 2s, "soon after the deadline");
  });
}

TEST_CASE("a rank that fails by itself: the others report its reason and end with its kind of error") {
  auto const fails = [](std::string const& settings, int code, std::string const& words, std::vector<int> const& ranks,
                        std::string const& cause) {
    retry::until_well([&](retry::complaints& wrong, int) {
      auto const end = started(settings).wait();
      INFO(end.output);
      CHECK(end.code > 0);
      wrong.unless(end.code == code, "exit code " + std::to_string(code) + ": " + std::to_string(end.code));
      wants_one(wrong, end.output, ranks, words, cause);
    });
  };
  SUBCASE("an exception") {
    fails("nproc=4 throw=2", 6, "rank 2, step 5: the loss is nan", {0, 1, 2, 3}, "stopped, as rank 2 failed");
  }
  SUBCASE("an exit code") {
    fails("nproc=4 exit=1", 17, "rank 1 was lost (ended with exit code 17); this rank was waiting for", {0, 2, 3},
          "stopped, as rank 1 failed");
  }
  SUBCASE("an exception in the rank that hosts the store") {
    retry::until_well([&](retry::complaints& wrong, int) {
      auto ranks = start_ranks(3, "throw=0");
      std::string all;
      for (auto& each : ranks) {
        auto const end = each.wait();
        INFO(end.output);
        CHECK(end.code > 0);
        wrong.unless(end.code == 6, "exit code 6: " + std::to_string(end.code));
        all += end.output;
      }
      wants_one(wrong, all, {0, 1, 2}, "rank 0, step 5: the loss is nan", "stopped, as rank 0 failed");
    });
  }
}

TEST_CASE("a rank that leaves the loop too early is named within seconds, whatever the others wait for") {
  std::vector<started> jobs;
  for (std::string const layout : {"", " replicas=2"}) {
    for (std::string const rank : {"0", "1", "3"}) jobs.emplace_back("nproc=4 steps=10 work=0 early=" + rank + layout);
  }
  for (std::size_t j = 0; j < jobs.size(); ++j) {
    auto const end = jobs[j].wait();
    INFO(end.output);
    CHECK(end.code == 3);
    CHECK(end.took < 45s);  // the deadline is 60 s
    int const left = j % 3 == 0 ? 0 : j % 3 == 1 ? 1 : 3;
    auto const cause = [&](int rank) { return rank == left ? "given up by the other ranks" : gone(left); };
    CHECK(one_message::fault(end.output, {0, 1, 2, 3}, "rank " + std::to_string(left) + " has ended", cause) == "");
  }
}

TEST_CASE("a rank that computes when another is lost ends within 2 s, too") {
  retry::until_well([&](retry::complaints& wrong, int) {
    auto ranks = start_ranks(4, "steps=100000 busy=1");
    REQUIRE_MESSAGE(ranks[1].says("busy"), ranks[1].output());
    retry::stopwatch const since;
    kill(ranks[3].id(), SIGKILL);
    std::string all;
    for (std::size_t r = 0; r < 3; ++r) {
      auto const end = ranks[r].wait();
      INFO(end.output);
      CHECK(end.code == 3);
      if (r != 1) {
        all += end.output;
        continue;
      }
      // The monitor ends the busy rank later, when the store may be gone with its host, so this line has the cause, too.
      wants(wrong, end, "rank 3 was lost", 1);
      wants(wrong, end, "; this rank was busy and is ended", 1);
    }
    wants_one(wrong, all, {0, 2}, "rank 3 was lost", gone(3));
    wrong.unless(since.spent() < 2500ms, "all ended within 2.5 s");
  });
}

TEST_CASE("the launcher passes SIGTERM on and leaves nothing behind") {
  started job("nproc=3 steps=100000");
  std::vector<pid_t> all;
  for (int r = 0; r < 3; ++r) all.push_back(job.pid_of(r));
  REQUIRE(job.says("warm", 3));
  SUBCASE("SIGTERM") {
    kill(job.id(), SIGTERM);
    auto const end = job.wait();
    INFO(end.output);
    CHECK(end.code == 128 + SIGTERM);
  }
  SUBCASE("SIGKILL: the ranks do not outlive it") {
    kill(job.id(), SIGKILL);
    auto const end = job.wait();
    CHECK(end.code == 1000 + SIGKILL);
  }
  for (auto each : all) CHECK_FALSE(is_running(each));
}

TEST_CASE("half-set environments, strangers and missing ranks end with one clear line") {
  SUBCASE("a missing variable") {
    auto const end = started("", {"RANK=0"}).wait();
    INFO(end.output);
    CHECK(end.code == 2);
    CHECK(end.lines_with("environment variable WORLD_SIZE is missing, while RANK is set") == 1);
  }
  SUBCASE("a layout that does not fit") {
    auto const end = started("nproc=3 replicas=2").wait();
    CHECK(end.code == 2);
    INFO(end.output);
    CHECK(end.lines_with("need 2 processes, but there are 3") == 1);
    CHECK(end.lines_with("'s message says more") == 2);
    int speakers = 0;
    for (int speaker = 0; speaker < 3; ++speaker) {
      std::string const failed = ": failed; rank " + std::to_string(speaker) + "'s message says more";
      bool named = true;
      for (int const rank : all_but(speaker, 3)) named = named && end.lines_with("rank " + std::to_string(rank) + failed) == 1;
      speakers += named ? 1 : 0;
    }
    CHECK(speakers == 1);
  }
  SUBCASE("a second job at the same port") {
    auto const number = free_port();
    auto const port = "MASTER_PORT=" + number;
    auto const rank = [&](int r, std::string const& settings) {
      return started(settings, {"RANK=" + std::to_string(r), "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", port});
    };
    auto const ends = std::filesystem::temp_directory_path() / ("chevron-ends-" + std::to_string(getpid()) + "-" + number);
    std::string const first = "steps=10000000 work=2 until=" + ends.string();
    auto first_0 = rank(0, first), first_1 = rank(1, first);
    REQUIRE(first_1.says("warm"));
    auto second_0 = rank(0, ""), second_1 = rank(1, "");
    auto const end_0 = second_0.wait(), end_1 = second_1.wait();
    INFO(end_0.output << end_1.output);
    CHECK(end_0.code == 5);
    CHECK(end_0.lines_with("another job has this port") == 1);
    CHECK(end_1.code == 5);
    CHECK(end_1.lines_with("rank 1 is already taken") == 1);
    std::ofstream(ends) << "now";
    CHECK(first_0.wait().code == 0);
    CHECK(first_1.wait().code == 0);
    std::filesystem::remove(ends);
  }
  SUBCASE("a rank that never comes") {
    retry::until_well([&](retry::complaints& wrong, int) {
      auto const port = "MASTER_PORT=" + free_port();
      retry::stopwatch const since;
      auto const end = started("join=2000", {"RANK=0", "WORLD_SIZE=3", "MASTER_ADDR=127.0.0.1", port}).wait();
      INFO(end.output);
      CHECK(end.code == 4);
      CHECK(end.lines_with("rank 1, 2 did not join within 2000 ms") == 1);
      CHECK(end.took > 2s);
      wrong.unless(since.spent() < 6s, "ended soon after the 2 s");
    });
  }
}

TEST_CASE("a stranger who knows no more than where the store is cannot end a job") {
  auto const number = free_port();
  auto const ends = std::filesystem::temp_directory_path() / ("chevron-stranger-" + std::to_string(getpid()) + "-" + number);
  std::string const settings = "steps=10000000 work=2 until=" + ends.string();
  started forked(settings + " nproc=2");
  std::vector<started> ranks;
  for (char const* rank : {"0", "1"}) {
    ranks.emplace_back(settings, std::vector<std::string>{std::string("RANK=") + rank, "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
                                                          "MASTER_PORT=" + number, "CHEVRON_JOB_SECRET=a word"});
  }
  REQUIRE(forked.says("warm", 2));
  for (auto& each : ranks) REQUIRE(each.says("warm"));
  auto const at = forked.output().find("store: 127.0.0.1:");
  REQUIRE(at != std::string::npos);
  for (int port : {std::stoi(forked.output().substr(at + 17)), std::stoi(number)}) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<std::uint16_t>(port);
    options.waitWorkers = false;
    auto const store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    std::string const words = chevron::detail::to_line(failure{.rank = 1, .reason = "the stranger's words"});
    for (char const* job : {"chevron", "chevron.job", "chevron.job.", "chevron."})
      static_cast<c10d::Store&>(*store).set(std::string(job) + "/failure", words);
  }
  std::this_thread::sleep_for(1s);  // ranks look ten times a second
  std::ofstream(ends) << "now";
  for (auto* each : {&forked, &ranks[0], &ranks[1]}) {
    auto const end = each->wait();
    INFO(end.output);
    CHECK(end.code == 0);
    CHECK(end.lines_with("the stranger's words") == 0);
  }
  std::filesystem::remove(ends);
}

TEST_CASE("two equal jobs that are started at once with one port exchange no ranks: the second fails and says why") {
  auto const number = free_port();
  auto const ends = std::filesystem::temp_directory_path() / ("chevron-two-" + std::to_string(getpid()) + "-" + number);
  std::vector<started> ranks[2];
  for (int r : {3, 1, 2, 0}) {
    for (int job : {r % 2, 1 - r % 2}) {
      ranks[job].emplace_back("steps=10000000 work=2 until=" + ends.string(),
                              std::vector<std::string>{"RANK=" + std::to_string(r), "WORLD_SIZE=4", "MASTER_ADDR=127.0.0.1",
                                                       "MASTER_PORT=" + number, "CHEVRON_JOB_SECRET=" + std::to_string(job)});
    }
  }
  // Rank 0 is the last in each; that of the second job finds the port taken.
  bool const first_is_0 = ranks[0].back().says("warm", 1, 30s);
  auto& second = ranks[first_is_0 ? 1 : 0];
  for (auto& each : second) {
    auto const end = each.wait();
    INFO(end.output);
    CHECK(end.code == 5);
    CHECK(end.lines_with("another job has this port") + end.lines_with("belongs to another job. Remedy: another MASTER_PORT") ==
          1);
  }
  std::ofstream(ends) << "now";
  for (auto& each : ranks[first_is_0 ? 0 : 1]) {
    auto const end = each.wait();
    INFO(end.output);
    CHECK(end.code == 0);
  }
  std::filesystem::remove(ends);
}

TEST_CASE("a rank that is killed, or ends, before all have met: the others end with code 3 within seconds and name it") {
  // The last rank has come, and does something else before it meets the others.
  struct job {
    std::string settings;
    int victim;
    std::vector<started> ranks;
  };
  std::vector<job> jobs;
  for (int victim : {0, 1, 2}) jobs.push_back({"late=3 join=90000", victim, start_ranks(4, "late=3 join=90000")});
  jobs.push_back({"leaves=1 late=3 join=90000", -1, start_ranks(4, "leaves=1 late=3 join=90000")});
  for (auto& each : jobs) {
    for (auto& rank : each.ranks) REQUIRE_MESSAGE(rank.says("pid "), rank.output());
  }
  std::this_thread::sleep_for(1500ms);
  auto const begin = steady::now();
  for (auto& each : jobs) {
    if (each.victim >= 0) kill(each.ranks[static_cast<std::size_t>(each.victim)].id(), SIGKILL);
  }
  for (auto& each : jobs) {
    std::string all;
    for (int r = 0; r < 4; ++r) {
      auto const end = each.ranks[static_cast<std::size_t>(r)].wait();
      if (r == each.victim) continue;
      INFO(each.settings << ", victim " << each.victim << ", rank " << r << ": " << end.output);
      if (each.victim < 0 && r == 1) {
        CHECK(end.code == 0);
        continue;
      }
      CHECK(end.code == 3);
      CHECK(end.lines_with("rank " + std::to_string(each.victim < 0 ? 1 : each.victim)) >= 1);
      if (r != 3) {
        all += end.output;
      } else if (each.victim < 0) {  // its monitor ends this rank later, when the store may be gone with its host
        CHECK(end.lines_with("rank 1 has ended; this rank was busy and is ended") == 1);
      }
    }
    if (each.victim < 0) CHECK(one_message::fault(all, {0, 2}, "rank 1 has ended", gone(1)) == "");
  }
  CHECK(steady::now() - begin < 40s);
}

TEST_CASE("torchrun starts the ranks and prints their error as the root cause") {
  char const* const given = std::getenv("CHEVRON_TORCHRUN");
  std::string torchrun = given != nullptr ? given : "";
#ifdef CHEVRON_TORCHRUN
  if (torchrun.empty()) torchrun = CHEVRON_TORCHRUN;
#endif
  if (torchrun.empty())
    torchrun = std::string(__FILE__).substr(0, std::string(__FILE__).rfind("/tests/")) + "/.venv/bin/torchrun";
  if (access(torchrun.c_str(), X_OK) != 0) {
    MESSAGE("skipped: no torchrun at " << torchrun);
    return;
  }
  std::vector<std::string> const command{torchrun, "--no-python", "--nproc-per-node=2", "--master-port=" + free_port()};
  SUBCASE("well") {
    auto const end = started("", {}, command).wait();
    INFO(end.output);
    CHECK(end.code == 0);
    CHECK(end.lines_with("all is well: 2 ranks by torchrun, store at") == 1);
  }
  SUBCASE("failing") {
    auto const end = started("throw=1", {}, command).wait();
    INFO(end.output);
    CHECK(end.code != 0);
    auto const report = end.output.find("Root Cause");
    REQUIRE(report != std::string::npos);
    CHECK(end.output.find("the loss is nan", report) != std::string::npos);
  }
}
