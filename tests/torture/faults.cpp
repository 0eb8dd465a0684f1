#include "faults.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <regex>
#include <sstream>
#include <string>

#include <chevron/checkpoint.hpp>
#include <chevron/multiprocess.hpp>

#include "jobs.hpp"

#include "support/small_model.hpp"

namespace torture {

namespace {

using namespace std::chrono_literals;

constexpr auto longest_job = 40s;
/// Steps before the fault may take long on a busy machine; after it somebody waits for this long.
constexpr std::chrono::milliseconds patience = 25s, deadline = 1500ms;
constexpr int tries = 3;

bool outside_of_steps(scenario const& what) { return !what.point.starts_with("step "); }

job_shape shape_of(scenario const& what) {
  return {what.schedule, pipeline_ranks, what.replicas, micro_batches, what.post_validation,
          what.shares,   what.gradients, what.shards(), what.late};
}

void train(scenario const& what, chevron::transport& comm, std::filesystem::path const& folder) {
  auto const data = small_model::make_batch(2 * micro_batches, 1);
  chevron::trainer trainer(setup_of(shape_of(what), comm));
  std::optional<chevron::evaluator> evaluator;
  if (what.evaluates) evaluator.emplace(trainer);
  while (trainer.next_step() < job_steps) {
    if (trainer.next_step() == struck_step) comm.deadline(deadline);
    trainer.step(data.input, data.target);
    if (what.saves) chevron::save_checkpoint(trainer, folder);
    if (evaluator) {
      if (what.rank % 2 == 0) {
        evaluator->loss(data.input, data.target);
      } else {
        evaluator->outputs(data.input);
      }
    }
  }
  auto const last = trainer.synchronize();
  if (comm.topology().global_rank == 0) std::printf("trained to step %ld, loss %.17g\n", trainer.next_step(), last.loss);
}

/// The whole of a job.
int be_the_job(scenario const& what, std::filesystem::path const& folder) {
  ::setenv("CHEVRON_FAULT", what.fault().c_str(), 1);
  if (what.backend == "threads") {
    return chevron::run_main(0, nullptr, [&](int, char**) {
      chevron::run_threads({.pipeline_ranks = pipeline_ranks,
                            .replicas = what.replicas,
                            .shards = what.shards(),
                            .deadline = patience,
                            .grace = 500ms},
                           [&](chevron::transport& comm) { train(what, comm, folder); });
      return 0;
    });
  }
  return over_gloo(
      shape_of(what),
      [&](chevron::transport& comm) {
        comm.deadline(outside_of_steps(what) ? deadline : patience);
        train(what, comm, folder);
      },
      {.join = 4000ms, .children = {.grace = 500ms, .last = 3000ms}});
}

/// The exit code that docs/reference/errors.md promises, by the kind of fault.
int promised_code(scenario const& what) {
  std::string const& kind = what.kind;
  bool const while_saving = what.point.ends_with("saving") || what.point.ends_with("publishing");
  if (kind == "kill" || kind == "close_sockets") return 3;
  if (kind == "exit") return 42;
  if (kind == "stop" || kind == "hang" || kind == "hold_locks") return 4;
  if (kind == "disk_full") return 7;
  if (kind == "slow") return 0;
  return while_saving ? 7 : 1;
}

/// Whom a line of stderr blames; nothing if it says nothing about a rank.
std::optional<int> blamed_in(std::string const& line) {
  static std::regex const rank("rank ([0-9]+)");
  static std::regex const where("^rank ([0-9]+)(, step [0-9]+)?(, [^:]*)?: ");
  static std::regex const place(" \\(replica [0-9]+, pipeline rank [0-9]+, shard [0-9]+\\)");
  std::smatch found;
  std::string rest = std::regex_replace(line, place, "");
  std::optional<int> speaker;
  if (std::regex_search(rest, found, where)) {
    speaker = std::stoi(found[1]);
    rest = found.suffix();
  }
  rest = rest.substr(0, rest.find("; this rank was waiting for "));
  static std::regex const printed_elsewhere("; rank [0-9]+'s message says more$");
  rest = std::regex_replace(rest, printed_elsewhere, "");
  if (std::regex_search(rest, found, rank)) return std::stoi(found[1]);
  return speaker;
}

void judge(scenario const& what, verdict& out) {
  out.struck = out.output.find(chevron::detail::fault_struck) != std::string::npos;
  out.right_code = out.code == promised_code(what);
  out.right_rank = out.right_action = true;
  bool const says_where = what.kind == "throw" || what.kind == "bad_alloc";
  bool named = false, placed = false, with_shard = !what.cut;
  std::string const of_struck = "ank " + std::to_string(what.rank) + " (replica 0, pipeline rank " +
                                std::to_string(what.rank / what.shards() % pipeline_ranks) + ", shard " +
                                std::to_string(what.rank % what.shards()) + ")";
  std::string const before = "before ";
  auto const at = what.point.find(before);
  std::string const action = at == std::string::npos ? "" : what.point.substr(at + before.size());
  std::istringstream lines(out.output);
  for (std::string line; std::getline(lines, line);) {
    auto const blamed = blamed_in(line);
    if (!blamed) continue;
    named = true;
    if (*blamed != what.rank) out.right_rank = false;
    with_shard = with_shard || line.find(of_struck) != std::string::npos;
    if (!action.empty() && line.find(", " + action + ": ") != std::string::npos) placed = true;
  }
  if (what.kind == "slow") {
    out.right_rank = !named && out.output.find("trained to step " + std::to_string(job_steps)) != std::string::npos;
    return;
  }
  // If a rank is killed after all other ranks have ended, the output may name no rank.
  if (!named || !with_shard) out.right_rank = false;
  if (says_where && !action.empty()) out.right_action = placed;
}

}  // namespace

verdict try_fault(scenario const& what) {
  // A machine that is too busy may make a rank late before its fault is due.
  verdict out;
  for (int i = 0; i < tries && !out.struck; ++i) {
    scratch_folder const folder;
    static_cast<outcome&>(out) = run_apart([&] { return be_the_job(what, folder.path); }, longest_job);
    judge(what, out);
  }
  return out;
}

}  // namespace torture
