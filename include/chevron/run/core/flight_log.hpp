#pragma once

#include <sys/stat.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/base/new_file.hpp>
#include <chevron/csv/csv.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/run/core/bounded_work.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/now_ns.hpp>
#include <chevron/run/core/rank_trace.hpp>
#include <chevron/run/core/topology.hpp>

/// \file
/// Flight logs: the last actions of each rank, written when the job fails.
///
/// If CHEVRON_FLIGHT_LOGS names a folder, each rank that still can writes `rank-N.json` there: the plan, the rank's actions of
/// the last two steps with times, the published failure, and the rank's wait. `chevron-plan explain` reads the files. A log
/// must not make a failure worse: the file is small, is written within a second or not at all, and write errors are ignored.

namespace chevron::detail {

/// Data of a rank's executor for the rank's flight log.
struct kept_actions {
  topology who;
  std::string schedule;
  shape size;
  bool forward_only = false;
  std::string plan;  ///< the plan of all ranks, since a lost rank writes no log: CSV in PyTorch's notation; empty: too large
  std::shared_ptr<rank_trace const> trace;
  bool left = false;     ///< the executor was destroyed by an exception
  bool written = false;  ///< the rank has written its log
};

/// The data of all executors of this process. Never destroyed, since threads that hang may outlive static objects.
struct flight_recorders {
  std::mutex mutex;
  std::vector<std::shared_ptr<kept_actions>> all;
  static flight_recorders& instance() {
    static auto* const one = new flight_recorders;
    return *one;
  }
};

/// The folder for flight logs; null: no logs are written.
inline char const* flight_logs_folder() {
  char const* const folder = std::getenv("CHEVRON_FLIGHT_LOGS");
  return folder == nullptr || *folder == 0 ? nullptr : folder;
}

/// A plan as CSV; empty if a log with this CSV could exceed 1 MiB.
inline std::string csv_of(plan_view const& plan) {
  constexpr std::size_t most = std::size_t{600} << 10;
  std::string text = show::csv(plan);
  return text.size() > most ? std::string() : text;
}

/// Registers an executor's data for flight logs. The data remain registered if an exception destroys the executor.
class flight_recorder {
 public:
  flight_recorder(topology const& who, plan_view const& plan, std::shared_ptr<rank_trace const> trace)
      : exceptions_(std::uncaught_exceptions()) {
    if (flight_logs_folder() == nullptr) return;
    kept_ = std::make_shared<kept_actions>(
        kept_actions{who, plan.name, plan.size, plan.forward_only, csv_of(plan), std::move(trace)});
    auto& keeps = flight_recorders::instance();
    std::lock_guard const hold(keeps.mutex);
    // Drops this rank's executors that earlier exceptions destroyed: their data are obsolete.
    std::erase_if(keeps.all, [&](auto const& other) { return other->left && other->who.global_rank == who.global_rank; });
    keeps.all.push_back(kept_);
  }
  ~flight_recorder() {
    if (!kept_) return;
    auto& keeps = flight_recorders::instance();
    std::lock_guard const hold(keeps.mutex);
    kept_->left = true;
    if (std::uncaught_exceptions() == exceptions_) std::erase(keeps.all, kept_);
  }
  flight_recorder(flight_recorder const&) = delete;
  flight_recorder& operator=(flight_recorder const&) = delete;

 private:
  std::shared_ptr<kept_actions> kept_;
  int exceptions_;
};

/// A string in JSON, cut to 4,000 characters.
inline std::string ring_string(std::string const& plain) { return show::json_string(plain.substr(0, 4000)); }

/// The JSON text of a rank's log. Written as text, since <chevron/run.hpp> includes no library for JSON.
/// \param told the published failure
/// \param wait the wait that the failure ended; null: none
inline std::string flight_log_text(kept_actions const& of, failure const& told, failed_wait const* wait) {
  constexpr std::size_t most = 4096;
  using std::to_string;
  std::string plan = "[";
  for (std::size_t from = 0, to; (to = of.plan.find('\n', from)) != std::string::npos; from = to + 1) {
    plan += (from == 0 ? "\n    \"" : ",\n    \"") + of.plan.substr(from, to - from) + "\"";
  }
  std::int64_t const now = now_ns();
  std::int64_t const wall =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  std::string out =
      "{\n  \"chevron_ring\": 1,\n  \"rank\": " + to_string(of.who.global_rank) +
      ",\n  \"pipeline_ranks\": " + to_string(of.who.pipeline_ranks) + ",\n  \"replicas\": " + to_string(of.who.replicas) +
      ",\n  \"shards\": " + to_string(of.who.shards) + ",\n  \"schedule\": " + ring_string(of.schedule) +
      ",\n  \"microbatches\": " + to_string(of.size.micro_batches) + ",\n  \"slices\": " + to_string(of.size.slices) +
      ",\n  \"chunks\": " + to_string(of.size.chunks) + ",\n  \"forward_only\": " + (of.forward_only ? "true" : "false") +
      ",\n  \"plan\": " + plan + "],\n  \"failure\": {\"code\": " + to_string(told.code) + ", \"rank\": " + to_string(told.rank) +
      ", \"step\": " + to_string(told.step) + ", \"action\": " + ring_string(told.action) +
      ", \"reason\": " + ring_string(told.reason) + "},\n  \"waiting\": ";
  if (wait == nullptr) {
    out += "null";
  } else {
    out += "{\"peer\": " + to_string(wait->mine.peer) + ", \"step\": " + to_string(wait->mine.step) +
           ", \"action\": " + ring_string(wait->mine.action_text()) + ", \"text\": " + ring_string(wait->mine.text()) +
           ", \"until\": " + to_string(wait->at) + "}";
  }
  auto const actions = of.trace ? of.trace->flight_log() : std::vector<last_action>{};
  std::size_t const left_out = actions.size() > most ? actions.size() - most : 0;
  out += ",\n  \"written\": " + to_string(now) + ",\n  \"wall_clock_ahead\": " + to_string(wall - now) +
         ",\n  \"left_out\": " + to_string(left_out) + ",\n  \"actions\": [";
  for (std::size_t i = left_out; i < actions.size(); ++i) {
    auto const& [event, step, under_way] = actions[i];
    out += (i == left_out ? "\n    [" : ",\n    [") + to_string(step) + ", \"" + to_text(event.op, of.size.slices).str() +
           "\", " + to_string(event.reached) + ", " + to_string(event.start) + ", " +
           (under_way ? "null" : to_string(event.end)) + "]";
  }
  return out + "\n  ]\n}\n";
}

/// Writes a new file (new_file.hpp). Waits for a second at most, and ignores all errors.
inline void write_within_a_second(std::string path, std::string text) {
  do_within(std::chrono::milliseconds(1000), [path = std::move(path), text = std::move(text)] {
    ::mkdir(path.substr(0, path.rfind('/')).c_str(), 0755);  // the folder mostly exists
    try {
      write_file(path, text);
    } catch (std::exception const&) {
      // A failed job writes no log into a folder that cannot be written to.
    }
  });
}

/// Writes the flight logs of ranks of this process. Never throws; takes at most a second per rank.
/// \param told the published failure, or the failure that this rank found
/// \param only the rank whose log is written; -1: all ranks without a written log \param who the place of `only` in the grid
inline void write_flight_logs(failure const& told, int only, topology const& who = {}) noexcept {
  try {
    char const* const folder = flight_logs_folder();
    if (folder == nullptr) return;
    std::map<int, std::shared_ptr<kept_actions>> newest;  // by rank, its executor with the latest step
    auto& keeps = flight_recorders::instance();
    {
      std::lock_guard const hold(keeps.mutex);
      for (auto const& one : keeps.all) {
        if (only >= 0 && one->who.global_rank != only) continue;
        auto& best = newest[one->who.global_rank];
        if (best == nullptr || best->trace->begin() <= one->trace->begin()) best = one;
      }
      std::erase_if(newest, [&](auto const& one) { return only < 0 && one.second->written; });
      for (auto const& each : newest) each.second->written = each.second->written || only >= 0;
    }
    // The rank failed before it created an executor: the log has no plan and no actions.
    if (newest.empty() && only >= 0 && who.world() > 1)
      newest[only] = std::make_shared<kept_actions>(kept_actions{who, {}, {}, {}, {}, {}});
    for (auto const& [rank, one] : newest) {
      bool const waited = last_failed_wait.rank == rank;
      failure const& cause = waited ? last_failed_wait.cause : told;
      std::string const name = "/rank-" + std::to_string(rank) + ".json";
      write_within_a_second(folder + name, flight_log_text(*one, cause, waited ? &last_failed_wait : nullptr));
    }
  } catch (...) {
    // No memory or no thread: no log is written.
  }
}

}  // namespace chevron::detail
