#pragma once

#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include <c10/util/hash.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/random_digits.hpp>
#include <chevron/run/failure/failure.hpp>
#include <chevron/run/launch/environment.hpp>

/// \file
/// Keys of a job in a store, which differ from those of every other job.

namespace chevron::detail {

/// The key prefix of a forked job: random, drawn by the launcher before it forks, so known to the job's processes only.
inline std::string drawn_keys() { return "chevron." + random_digits(4); }

/// The key prefix of a launched job: the launcher's name of the job, and a hash of the job's secret.
inline std::string keys_of(launch_environment const& told) {
  return "chevron." + told.job + (told.secret.empty() ? "" : "." + c10::sha1("keys of " + told.secret).str());
}

/// Shows to which job a store belongs: its host writes a hash that does not disclose the keys, and the other ranks compare. Of
/// two jobs with one address, the second fails instead of waiting for ranks that never come.
class store_owner {
 public:
  /// \param store the whole store, without a prefix \param keys the job's key prefix
  store_owner(c10d::Store& store, std::string const& keys) : store_(store), mine_(c10::sha1("owner of " + keys).str()) {}

  /// Writes this job's hash, as the store's host.
  void host() { store_.set(key, mine_); }
  /// Compares the store's hash with this job's, as another rank.
  /// \param at the store's address, for the error \param patience longest wait for the hash
  /// \throws preflight_error where the store is another job's; timeout_error where no hash is written
  void check(std::string const& at, std::chrono::milliseconds patience, error_context where) {
    where.action = "launch";
    std::string theirs, why = "it did not say whose it is within " + std::to_string(patience.count()) + " ms";
    auto const until = std::chrono::steady_clock::now() + patience;
    try {
      bool there = false;
      while (!(there = store_.check({key})) && std::chrono::steady_clock::now() < until)
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (there) theirs = store_.get_to_str(key);
    } catch (std::exception const& e) {
      why = message_of(e);
    }
    if (theirs == mine_) return;
    if (theirs.empty())
      throw timeout_error("the store at " + at + " is no job's (" + why + "). Remedy: is rank 0 up, and is MASTER_PORT right?",
                          std::move(where));
    throw preflight_error(
        "the store at " + at +
            " is another job's. Remedy: another MASTER_PORT; or, if this is one job, the same CHEVRON_JOB_SECRET "
            "for all ranks",
        std::move(where));
  }

 private:
  static constexpr char const* key = "chevron/owner";
  c10d::Store& store_;
  std::string mine_;
};

/// Claims a rank's number in the job's store. If two jobs use one store with equal keys, two processes claim the same number.
/// \param store the job's store, with the job's key prefix
/// \throws preflight_error if the number is taken
inline void claim_rank(c10d::Store& store, int rank, std::string const& store_address) {
  if (store.add("claimed/" + std::to_string(rank), 1) > 1) {
    throw preflight_error(
        "rank " + std::to_string(rank) + " is already taken in the job whose store is at " + store_address +
            ". Remedy: two jobs use one MASTER_PORT; give this one another, and jobs that are started at the same "
            "time each a CHEVRON_JOB_SECRET of its own",
        {.rank = rank});
  }
}

}  // namespace chevron::detail
