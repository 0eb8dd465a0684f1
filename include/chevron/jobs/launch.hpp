#pragma once

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chevron/jobs/environment.hpp>
#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/jobs/job_store.hpp>
#include <chevron/jobs/process_settings.hpp>
#include <chevron/jobs/rank_processes.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/failure.hpp>
#include <chevron/run/core/fault_point.hpp>
#include <chevron/run/core/topology.hpp>

/// \file
/// Connects this process to the other ranks of its job: `--nproc N` forks the ranks here, else a launcher started them.

namespace chevron {

/// Options of `launch`.
struct launch_options {
  int nproc = 0;                                         ///< number of ranks to fork on this machine; 0: read the environment
  std::chrono::milliseconds join{60000};                 ///< longest wait of ranks for each other at the start: 60 s
  detail::rank_processes::options children{};            ///< with nproc: times after which children are killed
  environment_reader environment = process_environment;  ///< replaced by tests
};

/// One rank of a job: this process. Must outlive the rank's transports.
struct job {
  int rank = 0;                                 ///< global rank, from 0
  int world = 1;                                ///< ranks of the job
  int local_rank = 0;                           ///< number among this machine's ranks: the number of its GPU
  std::string launcher;                         ///< a name in `detail::launchers`, `--nproc N` or `none`
  std::string interface_address = "127.0.0.1";  ///< address of this machine at which transports listen
  std::string store_address;                    ///< for messages to the user: `127.0.0.1:4711`
  std::chrono::milliseconds join{60000};        ///< longest wait for other ranks at the start
  c10::intrusive_ptr<c10d::Store> store;        ///< the job's store, with a prefix for this job's keys
  std::shared_ptr<failure_monitor> watch;       ///< publishes this rank's failures, receives other ranks' failures

  /// \returns this rank's place in a grid of pipeline ranks × replicas × shards
  /// \param expert_replicas number of neighbouring replicas over which a stage's experts are divided
  /// \throws usage_error if the grid and the job have different numbers of ranks
  chevron::topology topology(int pipeline_ranks, int replicas = 1, int shards = 1, int expert_replicas = 1) const {
    chevron::topology const grid{pipeline_ranks, replicas, rank, shards, expert_replicas};
    detail::check_grid(grid);
    if (long const needed = static_cast<long>(pipeline_ranks) * replicas * shards; needed != world) {
      throw usage_error(detail::words_of(grid) + " need " + std::to_string(needed) + " processes, but there " +
                        (world == 1 ? "is 1" : "are " + std::to_string(world)) + " (launcher: " + launcher +
                        "). Remedy: as many processes as pipeline ranks × replicas" + (shards > 1 ? " × shards" : ""));
    }
    return grid;
  }
};

namespace detail {

/// `keep_watch`: whether `launch` stores the process's failure monitor in `kept_watch`, for `run_main` to report errors.
inline bool keep_watch = false;
inline std::shared_ptr<failure_monitor> kept_watch;

struct resolved {
  sockaddr_storage at{};
  socklen_t size = 0;
};

inline resolved resolve(std::string const& host, std::uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (int const fault = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found); fault != 0) {
    bool const blank = host.find_first_of(" \t\n") != std::string::npos;
    throw usage_error("MASTER_ADDR=\"" + host + "\" is unknown: " + ::gai_strerror(fault) +
                      ". Remedy: the name or address of rank 0's machine" +
                      (blank ? ", one alone and without blanks (hostname -I writes several, and a blank after the last)" : ""));
  }
  resolved out;
  std::memcpy(&out.at, found->ai_addr, found->ai_addrlen);
  out.size = found->ai_addrlen;
  ::freeaddrinfo(found);
  return out;
}

/// A socket that listens on one address only; TCPStore itself would listen on all addresses.
class listener {
 public:
  listener(resolved const& here, std::string const& name) {
    handle_ = ::socket(here.at.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int const yes = 1;
    if (handle_ >= 0) ::setsockopt(handle_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (handle_ < 0 || ::bind(handle_, reinterpret_cast<sockaddr const*>(&here.at), here.size) != 0 ||
        ::listen(handle_, 1024) != 0) {
      int const fault = errno;
      if (handle_ >= 0) ::close(handle_);
      throw preflight_error("cannot listen on " + name + ": " + std::strerror(fault) +
                            (fault == EADDRINUSE ? ". Remedy: another job has this port; choose another MASTER_PORT"
                                                 : ". Remedy: MASTER_ADDR must be an address of the machine of rank 0"));
    }
  }
  listener(listener const&) = delete;
  listener& operator=(listener const&) = delete;
  ~listener() {
    if (handle_ >= 0) ::close(handle_);
  }
  std::uint16_t port() const {
    sockaddr_storage at{};
    socklen_t size = sizeof at;
    ::getsockname(handle_, reinterpret_cast<sockaddr*>(&at), &size);
    return ntohs(at.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(at).sin6_port
                                          : reinterpret_cast<sockaddr_in&>(at).sin_port);
  }
  /// Returns the socket; the caller then owns it.
  int release() { return std::exchange(handle_, -1); }

 private:
  int handle_ = -1;
};

/// Returns the address of this machine on the route to another machine, without sending anything; a loopback address if `there`
/// is one, and 127.0.0.1 if there is no route.
inline std::string address_towards(resolved const& there) {
  int const probe = ::socket(there.at.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_storage here{};
  socklen_t size = sizeof here;
  bool const known = probe >= 0 && ::connect(probe, reinterpret_cast<sockaddr const*>(&there.at), there.size) == 0 &&
                     ::getsockname(probe, reinterpret_cast<sockaddr*>(&here), &size) == 0;
  if (probe >= 0) ::close(probe);
  char name[NI_MAXHOST];
  if (!known || ::getnameinfo(reinterpret_cast<sockaddr*>(&here), size, name, sizeof name, nullptr, 0, NI_NUMERICHOST) != 0) {
    return "127.0.0.1";
  }
  return name;
}

inline c10::intrusive_ptr<c10d::TCPStore> connect_store(std::string const& address, std::uint16_t port,
                                                        std::chrono::milliseconds patience, int listening = -1) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = listening >= 0;
  if (listening >= 0) options.masterListenFd = listening;
  options.waitWorkers = false;
  options.timeout = patience;
  return c10::make_intrusive<c10d::TCPStore>(address, options);
}

/// Connects to the store at `address:port`. LibTorch would wait without limit for a server that sends nothing, and log each
/// try; so a detached thread connects, and `join_store` gives up before that thread.
/// \throws timeout_error if no store is connected within `patience`
inline c10::intrusive_ptr<c10d::TCPStore> join_store(std::string const& address, std::uint16_t port,
                                                     std::chrono::milliseconds patience, error_context where) {
  std::promise<c10::intrusive_ptr<c10d::TCPStore>> promised;
  auto joined = promised.get_future();
  std::thread([=, made = std::move(promised)]() mutable {
    try {
      made.set_value(connect_store(address, port, patience + std::chrono::seconds(30)));
    } catch (...) {
      made.set_exception(std::current_exception());
    }
  }).detach();
  std::string why = "no server answered within " + std::to_string(patience.count()) + " ms";
  try {
    if (joined.wait_for(patience) == std::future_status::ready) {
      auto store = joined.get();
      store->setTimeout(patience);
      return store;
    }
  } catch (std::exception const& e) {
    why = message_of(e);
  }
  where.action = "launch";
  throw timeout_error("no store at " + address + ":" + std::to_string(port) + " (" + why +
                          "). Remedy: is rank 0 up, and are MASTER_ADDR and MASTER_PORT right?",
                      std::move(where));
}

/// Runs in the parent of `--nproc`: hosts the store, waits for the ranks, and ends this process with the ranks' exit code.
[[noreturn]] inline void be_the_launcher(rank_processes& ranks, launch_options const& options, listener& socket,
                                         std::string const& prefix) {
  int code = static_cast<int>(exit_code::peer_lost);
  try {
    // At least 60 s: a `join` that suffices for ranks may be too short for starting the store.
    auto const patience = std::max(options.join, std::chrono::milliseconds(60000));
    launcher_store store([prefix, port = socket.port(), listening = socket.release(), patience] {
      return c10::make_intrusive<c10d::PrefixStore>(prefix, connect_store("127.0.0.1", port, patience, listening));
    });
    code = ranks.wait(options.children, [&](int rank, int of_rank, std::string const& how) {
      store.publish({.code = of_rank, .rank = rank, .reason = "rank " + std::to_string(rank) + " was lost (" + how + ")"});
    });
    // The rank that ended first need not be the rank that failed first.
    if (auto const first = store.first()) {
      bool const seen_from_afar = first->code == static_cast<int>(exit_code::peer_lost) && ranks.code_of(first->rank) > 0;
      code = seen_from_afar ? ranks.code_of(first->rank) : first->code;
    }
  } catch (std::exception const& e) {
    std::fprintf(stderr, "launcher: %s\n", message_of(e).c_str());
  }
  std::fflush(nullptr);
  ::_exit(code);
}

}  // namespace detail

/// Determines this process's rank and connects the rank to the job's store. With `nproc`, `launch` forks the ranks, so it must
/// be called before LibTorch has run anything; `launch` then returns in the children only, each with its share of this
/// machine's cores, and the calling process waits for the children and ends with their exit code. Under a launcher that has
/// started several processes, `nproc` is refused. Stores listen on loopback unless MASTER_ADDR names another address.
/// \param options number of ranks to fork, and time limits \returns the job, with the store and this rank's failure monitor
/// \throws usage_error for `nproc` under a launcher, incomplete variables, or an unknown MASTER_ADDR; preflight_error if the
/// port or a rank's number is taken; timeout_error if rank 0 does not answer within `join`
inline job launch(launch_options const& options = {}) {
  job out;
  out.join = options.join;
  int store_host = -1;
  if (options.nproc < 0)
    throw usage_error("--nproc " + std::to_string(options.nproc) + " is below 1. Remedy: the number of ranks");
  check_unlaunched(options.nproc, options.environment);
  if (options.nproc > 0) {
    detail::make_room_for_connections(options.nproc);
    std::string const prefix = detail::drawn_keys();
    detail::listener socket(detail::resolve("127.0.0.1", 0), "127.0.0.1");
    auto const port = socket.port();
    detail::rank_processes ranks;
    out.rank = ranks.fork(options.nproc);
    if (out.rank < 0) detail::be_the_launcher(ranks, options, socket, prefix);
    ::close(socket.release());
    out.local_rank = out.rank;
    out.world = options.nproc;
    out.launcher = "--nproc " + std::to_string(options.nproc);
    out.store_address = "127.0.0.1:" + std::to_string(port);
    if (!process_environment("OMP_NUM_THREADS")) {
      at::set_num_threads(std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / options.nproc));
    }
    out.store =
        c10::make_intrusive<c10d::PrefixStore>(prefix, detail::join_store("127.0.0.1", port, options.join, {.rank = out.rank}));
  } else {
    auto const told = read_environment(options.environment);
    out.rank = told.rank;
    out.world = told.world;
    out.local_rank = told.local_rank;
    out.launcher = told.launcher;
    if (told.world == 1) {
      out.store = c10::make_intrusive<c10d::HashStore>();
    } else {
      detail::make_room_for_connections(told.world);
      auto const there = detail::resolve(told.address, told.port);
      bool const is_v6 = told.address.find(':') != std::string::npos;
      auto const name = (is_v6 ? "[" + told.address + "]" : told.address) + ":" + std::to_string(told.port);
      bool const host = told.rank == 0 && !told.store_is_there;
      store_host = told.store_is_there ? -1 : 0;
      c10::intrusive_ptr<c10d::Store> tcp;
      if (host) {
        tcp = detail::connect_store(told.address, told.port, options.join, detail::listener(there, name).release());
      } else {
        tcp = detail::join_store(told.address, told.port, options.join, {.rank = told.rank, .peer = store_host});
      }
      std::string const prefix = detail::keys_of(told);
      if (!told.store_is_there)
        detail::check_owner(*tcp, prefix, host, name, options.join, {.rank = told.rank, .peer = store_host});
      out.store = c10::make_intrusive<c10d::PrefixStore>(prefix, tcp);
      out.interface_address = detail::address_towards(there);
      out.store_address = name;
      detail::claim_rank(*out.store, out.rank, name);
    }
  }
  detail::fault_point(out.rank, -1, "joining");
  out.watch = std::make_shared<failure_monitor>(out.store, out.rank, out.world, store_host);
  if (detail::keep_watch) {
    detail::kept_watch = out.watch;
    out.watch->end_process_after(std::chrono::milliseconds(1500));
  }
  return out;
}

}  // namespace chevron
