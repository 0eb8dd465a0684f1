// Jobs that save after each step, killed at any instant, and gone on with: from the newest manifest, with the losses of the run that was
// never interrupted.
#include "tortures.hpp"

#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>

#include "jobs.hpp"

namespace torture {

namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr long last_step = 12;

/// Trains from the folder's last checkpoint to the last step, and prints each step's loss.
int train(job_shape const& shape, fs::path const& folder, bool keeps_two) {
  return over_gloo(shape, [&](chevron::transport& comm) {
    chevron::trainer trainer(setup_of(shape, comm));
    int const replica = comm.topology().replica();
    bool const speaks = comm.topology().global_rank == 0;
    bool const resumed = chevron::resume(trainer, folder).has_value();
    if (speaks) std::printf("%s at %ld\n", resumed ? "resumed" : "begins", trainer.next_step());
    while (trainer.next_step() < last_step) {
      long const step = trainer.next_step();
      auto const data = batch_of(shape, step, replica);
      auto const report = trainer.step(data.input, data.target);
      if (speaks) std::printf("loss %ld %a\n", step, report.settled ? report.loss : trainer.synchronize().loss);
      if (!report.settled && !speaks) trainer.synchronize();
      chevron::save_checkpoint(trainer, folder);
      if (keeps_two) chevron::remove_old_checkpoints(trainer, folder, 2);
    }
  });
}

std::map<long, std::string> losses_of(std::string const& output) {
  std::map<long, std::string> out;
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word, value;
    long step = 0;
    if (words >> word >> step >> value && word == "loss") out[step] = value;
  }
  return out;
}

/// The processes of a group but its first: the ranks.
std::vector<pid_t> ranks_of(pid_t launcher) {
  std::vector<pid_t> out;
  std::ifstream children("/proc/" + std::to_string(launcher) + "/task/" + std::to_string(launcher) + "/children");
  for (pid_t each; children >> each;) out.push_back(each);
  return out;
}

}  // namespace

std::vector<result> killed_while_saving(std::size_t count, std::uint64_t seed, std::size_t processes) {
  std::vector<job_shape> const shapes{
      {.schedule = "ZB-H1", .pipeline_ranks = 2},
      {.schedule = "ZBVZeroBubble", .pipeline_ranks = 2, .replicas = 2, .shares = true},
      {.schedule = "LoopedBFS", .pipeline_ranks = 2, .replicas = 2, .shares = true, .gradients = true, .late = true},
      {.schedule = "ZB-H2", .pipeline_ranks = 2, .post_validation = true}};
  std::vector<std::map<long, std::string>> whole;
  double longest = 0;
  for (job_shape const& shape : shapes) {
    scratch_folder const folder;
    auto const run = run_apart([&] { return train(shape, folder.path, false); }, 60s);
    whole.push_back(losses_of(run.output));
    longest = std::max(longest, run.seconds);
    if (run.code == 0 && whole.back().size() == last_step) continue;
    return results_of("killed while saving", run);
  }
  result sum{.name = "killed while saving", .note = ""};
  std::set<std::string> resumed_at;
  long from_nothing = 0;
  auto const piece = [&](std::size_t i) -> std::string {
    std::mt19937_64 draw(seed * 1'000'003 + i);
    std::size_t const which = i % shapes.size();
    job_shape const& shape = shapes[which];
    bool const keeps_two = draw() % 2 == 0;
    scratch_folder const folder;
    // A third of a run is its start, where nothing is lost; on a busy machine it takes longer than it did alone.
    double const part = 0.3 + 0.9 * static_cast<double>(draw() % 1000) / 1000;
    auto const instant = std::chrono::microseconds(static_cast<long>(part * longest * 1e6));
    // In half of the sharded jobs a rank dies after its step, when others may have gathered a part of its parameters.
    bool const at_gather = shape.shares && draw() % 2 == 0;
    std::string const fault =
        "rank " + std::to_string(draw() % static_cast<std::uint64_t>(shape.pipeline_ranks * shape.replicas)) + ", step " +
        std::to_string(draw() % last_step) + (draw() % 2 == 0 ? ", stepped" : ", gathering") + ": kill";
    auto const first_run = [&] {
      if (at_gather) ::setenv("CHEVRON_FAULT", fault.c_str(), 1);
      return train(shape, folder.path, keeps_two);
    };
    auto const killed = run_apart(first_run, 60s, [&](pid_t job) {
      if (at_gather) return;
      ::usleep(static_cast<useconds_t>(instant.count()));
      auto const ranks = ranks_of(job);
      auto const choice = draw() % (ranks.size() + 2);
      if (choice == 0 || ranks.empty())
        ::kill(-job, SIGKILL);  // all of them
      else if (choice == 1)
        ::kill(job, SIGKILL);  // the launcher
      else
        ::kill(ranks[choice - 2], SIGKILL);  // a rank
    });
    if (killed.hangs) return "it hangs after the kill\n" + killed.output;
    if (at_gather && killed.code != 3) return fault + ": exit code " + std::to_string(killed.code) + "\n" + killed.output;
    long const newest = [&] {
      auto const last = chevron::last_checkpoint(folder.path);
      return last ? std::stol(last->filename().string().substr(5)) : 0L;
    }();
    auto const run = run_apart([&] { return train(shape, folder.path, keeps_two); }, 60s);
    if (run.hangs || run.code != 0) return "it cannot go on, exit code " + std::to_string(run.code) + "\n" + run.output;
    std::string const where = (newest > 0 ? "resumed at " : "begins at ") + std::to_string(newest) + "\n";
    if (run.output.find(where) == std::string::npos) return "it does not go on from the newest checkpoint, " + where + run.output;
    for (auto const& [step, loss] : losses_of(killed.output)) {
      if (whole[which].at(step) != loss) return "before the kill step " + std::to_string(step) + " had another loss\n";
    }
    auto const after = losses_of(run.output);
    if (static_cast<long>(after.size()) != last_step - newest) return "not all steps came after it went on\n" + run.output;
    for (auto const& [step, loss] : after) {
      if (whole[which].at(step) != loss) return "step " + std::to_string(step) + " has another loss than the run that was never interrupted\n";
    }
    for (auto const& entry : fs::recursive_directory_iterator(folder.path)) {
      if (entry.path().string().ends_with(".partial")) return "a partial file stays: " + entry.path().string() + "\n";
    }
    return where;
  };
  share_out(count, processes, piece, [&](std::size_t i, std::string const& said) {
    ++sum.tried;
    if (said.starts_with("resumed at ") || said.starts_with("begins at ")) {
      ++sum.harmless;
      resumed_at.insert(said);
      from_nothing += said.starts_with("begins");
      return;
    }
    ++sum.wrong;
    std::printf("FAILED: kill %zu: %s\n", i, said.c_str());
    std::fflush(stdout);
  });
  sum.wrong += static_cast<long>(count) - sum.tried;
  sum.note = "went on from " + std::to_string(resumed_at.size()) + " different places, " + std::to_string(from_nothing) +
             " times from nothing, each with the losses of the run that was never interrupted";
  return {sum};
}

}  // namespace torture
