#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include <chevron/run/core/error.hpp>

/// \file
/// Reads environment variables that launchers set: the launcher, this process's rank, and the store's address.

namespace chevron {

/// The values of the launcher's variables.
struct launch_environment {
  int rank = 0;                       ///< global rank, from 0
  int world = 1;                      ///< ranks of the job; 1: no launcher, or a launcher that started one process
  int local_rank = 0;                 ///< number among the ranks of this machine
  std::string launcher = "none";      ///< `none`, or the launcher's name in `detail::launchers`
  std::string address = "127.0.0.1";  ///< address of the store
  std::uint16_t port = 29500;         ///< port of the store
  bool store_is_there = false;        ///< the launcher hosts the store: every rank is a client
  std::string job = "job";            ///< name of the job, to distinguish jobs' keys in a shared store
  std::string secret;                 ///< CHEVRON_JOB_SECRET: part of the keys, known to this job only
};

/// Reads an environment variable. \returns nullopt if the variable is not set
using environment_reader = std::function<std::optional<std::string>(std::string const&)>;

/// Reads the process's own environment; an empty variable counts as not set.
inline std::optional<std::string> process_environment(std::string const& name) {
  char const* value = std::getenv(name.c_str());
  return value == nullptr || *value == 0 ? std::nullopt : std::optional<std::string>(value);
}

namespace detail {

inline int number_in(std::string const& name, std::string const& value, int least, int most) {
  int number = 0;
  auto const [end, fault] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (fault != std::errc() || end != value.data() + value.size() || number < least || number > most) {
    throw usage_error("environment variable " + name + "=" + value + " is not a number from " + std::to_string(least) + " to " +
                      std::to_string(most) + ". Remedy: correct or unset it");
  }
  return number;
}

/// Names of one launcher's variables. The launcher counts as found if `rank_name` or `size_name` is set.
struct launcher_words {
  char const* launcher;
  char const* rank_name;
  char const* size_name;
  char const* local_name;
  bool size_decides = false;  ///< only `size_name` identifies the launcher, since other programs also set `rank_name`
};

inline bool is_torchrun(environment_reader const& read) { return read("TORCHELASTIC_RUN_ID").has_value(); }

/// Whether srun has set the variables of PMI, as `srun --mpi=pmi2` does: they then name this task of Slurm's step. The processes
/// of an mpirun that srun has started have other numbers than the step's tasks.
inline bool is_pmi_of_srun(environment_reader const& read) {
  auto const size = read("SLURM_STEP_NUM_TASKS"), rank = read("SLURM_PROCID");
  return size && rank && size == read("PMI_SIZE") && rank == read("PMI_RANK");
}

/// All known launchers; of several that are found, the first counts. Launchers that run within a step of Slurm come before Slurm.
inline auto launchers(environment_reader const& read) {
  launcher_words const pmi{"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"};
  // Batch scripts have SLURM_PROCID too; only srun's tasks have SLURM_STEP_NUM_TASKS.
  launcher_words const slurm{"Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", true};
  bool const of_srun = is_pmi_of_srun(read);
  return std::to_array<launcher_words>(
      {{is_torchrun(read) ? "torchrun" : "environment", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
       {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
       {"Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"},
       {"jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK"},
       {"MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"},
       of_srun ? slurm : pmi,
       of_srun ? pmi : slurm});
}

/// Refuses a rank other than 0 of a launcher that tells no number of ranks: each process would else be a job of its own.
inline void check_unknown_launcher(environment_reader const& read) {
  for (char const* const name : {"PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE"}) {
    auto const rank = read(name);
    if (!rank || *rank == "0") continue;
    throw usage_error(
        "a launcher has started this process as rank " + *rank + " (" + name +
        "), and no variable tells the number of ranks: each process would train a job of its own. Remedy: set "
        "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process, or start with torchrun, srun or "
        "mpirun; or unset " +
        name);
  }
}

/// An address without the brackets that URLs have around one of IPv6: `[::1]` gives `::1`.
inline std::string without_brackets(std::string address) {
  bool const in_brackets = address.size() > 2 && address.front() == '[' && address.back() == ']';
  return in_brackets ? address.substr(1, address.size() - 2) : address;
}

inline std::string required(environment_reader const& read, launcher_words const& words, char const* name, char const* because) {
  if (auto value = read(name)) return *value;
  throw usage_error(std::string("environment variable ") + name + " is missing, while " + because +
                    " is set (launcher: " + words.launcher + "). Remedy: set both or neither, or start with --nproc N");
}

inline launch_environment place_from(environment_reader const& read, launcher_words const& words) {
  // torchrun may have set only TORCHELASTIC_RUN_ID.
  auto const set = [&](char const* name) { return read(name) ? name : "TORCHELASTIC_RUN_ID"; };
  auto const rank = required(read, words, words.rank_name, set(words.size_name));
  auto const size = required(read, words, words.size_name, set(words.rank_name));
  launch_environment out;
  out.launcher = words.launcher;
  out.world = number_in(words.size_name, size, 1, 1 << 20);
  out.rank = number_in(words.rank_name, rank, 0, (1 << 20) - 1);
  if (out.rank >= out.world) {
    throw usage_error(std::string(words.rank_name) + "=" + rank + " is not below " + words.size_name + "=" + size +
                      ". Remedy: ranks count from 0");
  }
  if (auto local = read(words.local_name)) out.local_rank = number_in(words.local_name, *local, 0, 1 << 20);
  return out;
}

}  // namespace detail

/// The first host of a Slurm node list: `gnode[10,20-25],x` gives `gnode10`. Keeps leading zeros (`n[007-9]` gives `n007`).
/// \throws usage_error for a list whose bracket is not closed
inline std::string first_host(std::string_view list) {
  auto const open = list.find('[');
  auto const comma = list.find(',');
  if (open == std::string_view::npos || comma < open) return std::string(list.substr(0, comma));
  auto const end = list.find_first_of(",-]", open);
  auto const close = list.find(']', open);
  if (end == std::string_view::npos || close == std::string_view::npos) {
    throw usage_error("node list " + std::string(list) + " has no closing bracket. Remedy: set MASTER_ADDR");
  }
  auto const after = list.find_first_of(",[", close);
  auto const suffix = list.substr(close + 1, after == std::string_view::npos ? after : after - close - 1);
  return std::string(list.substr(0, open)) + std::string(list.substr(open + 1, end - open - 1)) + std::string(suffix);
}

/// Reads this process's rank and the store's address from the variables of the first launcher found, in the order of
/// `detail::launchers`. Without a launcher, returns a job of one rank.
/// \throws usage_error if some of a launcher's variables are missing (the message names one), or are no numbers; and for a rank
/// of a launcher that tells no number of ranks
inline launch_environment read_environment(environment_reader const& read = process_environment) {
  bool const torchrun = detail::is_torchrun(read);
  std::optional<launch_environment> found;
  for (auto const& words : detail::launchers(read)) {
    bool const named = torchrun && words.launcher == std::string_view("torchrun");
    if (named || read(words.size_name) || (!words.size_decides && read(words.rank_name))) {
      found = detail::place_from(read, words);
      break;
    }
  }
  if (!found) {
    detail::check_unknown_launcher(read);
    return {};
  }
  launch_environment out = *found;

  auto const address = read("MASTER_ADDR");
  auto const port = read("MASTER_PORT");
  if (address) out.address = detail::without_brackets(*address);
  if (port) out.port = static_cast<std::uint16_t>(detail::number_in("MASTER_PORT", *port, 1, 65535));
  if (out.launcher == "Slurm") {
    auto const nodes = read("SLURM_STEP_NODELIST"), id = read("SLURM_JOB_ID");
    if (out.world > 1 && ((!address && !nodes) || (!port && !id))) {
      throw usage_error(std::string("environment variable ") + (!address && !nodes ? "SLURM_STEP_NODELIST" : "SLURM_JOB_ID") +
                        " is missing, while Slurm says " + std::to_string(out.world) +
                        " ranks. Remedy: start with srun, or set MASTER_ADDR and MASTER_PORT to where rank 0 runs");
    }
    if (!address && nodes) out.address = first_host(*nodes);
    if (!port && id) out.port = static_cast<std::uint16_t>(20000 + std::strtoul(id->c_str(), nullptr, 10) % 20000);
    out.job = "slurm." + id.value_or("") + "." + read("SLURM_STEP_ID").value_or("");
  } else if (out.world > 1 && (!address || !port)) {
    char const* const missing = !address ? "MASTER_ADDR" : "MASTER_PORT";
    throw usage_error(std::string("environment variable ") + missing + " is missing, while " + out.launcher + " says " +
                      std::to_string(out.world) + " ranks. Remedy: set it to where rank 0 runs, or start with --nproc N");
  }
  if (auto const id = read("FLUX_JOB_ID"); id && out.launcher == "Flux") out.job = "flux." + *id;
  if (auto const space = read("PMIX_NAMESPACE"); space && out.launcher == "Open MPI") out.job = "pmix." + *space;
  out.secret = read("CHEVRON_JOB_SECRET").value_or("");
  if (torchrun) {
    // torchrun's agent hosts the store if this variable says so, else rank 0.
    auto const agent = read("TORCHELASTIC_USE_AGENT_STORE");
    out.store_is_there = agent && (*agent == "True" || *agent == "true" || *agent == "1");
    out.job = read("TORCHELASTIC_RUN_ID").value_or("") + "." + read("TORCHELASTIC_RESTART_COUNT").value_or("0");
  }
  return out;
}

/// Checks that `nproc` processes may be forked.
/// \throws usage_error if a launcher has started several processes, since each process would fork
inline void check_unlaunched(int nproc, environment_reader const& read = process_environment) {
  if (nproc <= 0) return;
  for (auto const& words : detail::launchers(read)) {
    auto const rank = read(words.rank_name), size = read(words.size_name);
    if (!rank || !size || detail::number_in(words.size_name, *size, 1, 1 << 20) == 1) continue;
    throw usage_error("--nproc " + std::to_string(nproc) + " starts processes, but " + words.launcher + " has already done so (" +
                      words.size_name + "=" + *size + "). Remedy: leave --nproc away, or unset " + words.size_name);
  }
}

}  // namespace chevron
