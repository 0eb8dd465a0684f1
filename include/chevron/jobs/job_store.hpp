#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chevron/base/random_digits.hpp>
#include <chevron/jobs/environment.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>

/// \file
/// A job's store: the prefix of its keys, which differs from every other job's, and the launcher of a forked job as the store's
/// host. The launcher must never wait for a network.

namespace chevron::detail {

/// The key prefix of a forked job: random. The launcher draws the prefix before it forks, so only the job's processes know it.
inline std::string drawn_keys() { return "chevron." + random_digits(4); }

/// The key prefix of a launched job: the launcher's name for the job, and a hash of the job's secret.
inline std::string keys_of(launch_environment const& told) {
  return "chevron." + told.job + (told.secret.empty() ? "" : "." + c10::sha1("keys of " + told.secret).str());
}

/// Checks that a store is this job's: the host writes a hash that does not disclose the keys, and every other rank compares the
/// hash with its own. If two jobs use one address, the second job fails instead of waiting for ranks that never join.
/// \param store the whole store, without a prefix \param keys the job's key prefix \param hosts whether this rank is the host
/// \param at the store's address, for the error \param patience longest wait for the hash
/// \throws preflight_error if the store is another job's; timeout_error if no hash is written
inline void check_owner(c10d::Store& store, std::string const& keys, bool hosts, std::string const& at,
                        std::chrono::milliseconds patience, error_context where) {
  std::string const key = "chevron/owner", mine = c10::sha1("owner of " + keys).str();
  if (hosts) return store.set(key, mine);
  where.action = "launch";
  std::string theirs, why = "the store named no owner within " + std::to_string(patience.count()) + " ms";
  auto const until = std::chrono::steady_clock::now() + patience;
  try {
    bool there = false;
    while (!(there = store.check({key})) && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (there) theirs = store.get_to_str(key);
  } catch (std::exception const& e) {
    why = message_of(e);
  }
  if (theirs == mine) return;
  if (theirs.empty()) {
    throw timeout_error(
        "the store at " + at + " belongs to no job (" + why + "). Remedy: is rank 0 up, and is MASTER_PORT right?",
        std::move(where));
  }
  throw preflight_error(
      "the store at " + at +
          " belongs to another job. Remedy: another MASTER_PORT; or, if this is one job, the same CHEVRON_JOB_SECRET "
          "for all ranks",
      std::move(where));
}

/// Claims a rank's number in the job's store. Detects two jobs that use one store with equal keys, and so claim a number twice.
/// \param store the job's store, with the job's key prefix
/// \throws preflight_error if the number is taken
inline void claim_rank(c10d::Store& store, int rank, std::string const& store_address) {
  if (store.add("claimed/" + std::to_string(rank), 1) > 1) {
    throw preflight_error("rank " + std::to_string(rank) + " is already taken in the job whose store is at " + store_address +
                              ". Remedy: if two jobs use one MASTER_PORT, another port for this job, and for jobs that are "
                              "started at the same time "
                              "a CHEVRON_JOB_SECRET for each",
                          {.rank = rank});
  }
}

/// Runs a thread that creates the store and publishes the failure found by the launcher. If the network stops answering, only
/// this thread blocks: the launcher still ends and reaps its ranks. For a process that ends by `_exit`.
class launcher_store {
 public:
  /// \param make returns the store; if `make` throws, this process ends, since no job is possible without a store
  template <class Make>
  explicit launcher_store(Make make) {
    std::thread([shared = shared_, make = std::move(make)] {
      try {
        c10::intrusive_ptr<c10d::Store> const store = make();
        std::unique_lock hold(shared->mutex);
        shared->changed.wait(hold, [&] { return shared->lost.has_value(); });
        failure const lost = *shared->lost;
        hold.unlock();
        auto const first = failure_of(store->compareSet("failure", std::string(), to_line(lost)));
        // If another rank published its failure first, that rank has printed the failure.
        if (first.reason == lost.reason) std::fprintf(stderr, "%s\n", lost.reason.c_str());
        hold.lock();
        shared->first = first;
        shared->changed.notify_all();
        shared->changed.wait(hold, [] { return false; });  // keeps the store alive for ranks that still read it
      } catch (std::exception const& e) {
        std::fprintf(stderr, "launcher: %s\n", message_of(e).c_str());
        ::_exit(static_cast<int>(exit_code::peer_lost));
      }
    }).detach();
  }

  /// Publishes the loss of a rank. Does not wait.
  void publish(failure lost) {
    std::lock_guard const hold(shared_->mutex);
    shared_->lost = std::move(lost);
    shared_->changed.notify_all();
  }

  /// Returns the failure that was published first, by any rank or by `publish`; nullopt if `publish` was never called. If the
  /// store does not answer within a second, returns the failure passed to `publish`.
  std::optional<failure> first() {
    std::unique_lock hold(shared_->mutex);
    if (!shared_->lost) return std::nullopt;
    if (shared_->changed.wait_for(hold, std::chrono::seconds(1), [this] { return shared_->first.has_value(); }))
      return shared_->first;
    std::fprintf(stderr, "%s\n", shared_->lost->reason.c_str());
    return shared_->lost;
  }

 private:
  struct state {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<failure> lost, first;
  };
  std::shared_ptr<state> shared_ = std::make_shared<state>();
};

}  // namespace chevron::detail
