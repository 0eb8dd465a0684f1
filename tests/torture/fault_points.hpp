#pragma once

#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>

#include <chevron/plan/action.hpp>
#include <chevron/plan/text.hpp>
#include <chevron/run/core/error.hpp>

/// \file
/// Faults at the named points of run/core/fault_point.hpp: `CHEVRON_FAULT="rank 2, step 3, after 1RECV_F0: kill"`. Included by
/// that header where CHEVRON_FAULT_POINTS names this file.

namespace chevron::detail {

/// A fault that a test asks for. Its point is `before` or `after` an action of a program, as printed (`before 0SEND_F1`);
/// `before` or `after OPTIMIZER_STEP`; within that step of a sharded optimizer `stepped` (no replica has this rank's share yet)
/// or `gathering` (half of the parameters' shares are on their way); outside of steps `joining`, `saving` (the files are written,
/// none has its name), `publishing` (before the manifest) or `leaving`.
struct planned_fault {
  enum class kind {
    kill,           ///< SIGKILL to this process
    stop,           ///< SIGSTOP
    exit,           ///< ends with exit code 42, without a message
    slow,           ///< sleeps 0.3 s
    raise,          ///< `throw`: a std::runtime_error
    bad_alloc,      ///< `throw` in the text: a std::runtime_error
    close_sockets,  ///< all connections of this process break
    disk_full,      ///< no file can grow any more
    hang,           ///< never returns
    hold_locks      ///< never returns, and keeps stdout and stderr locked
  };
  int rank = 0;    ///< global rank
  long step = -1;  ///< -1: any step
  std::string point;
  kind what = kind::kill;
};

/// The kinds' names, in the order of `planned_fault::kind`.
inline constexpr std::string_view fault_names[] = {"kill",      "stop",          "exit",      "slow", "throw",
                                                   "bad_alloc", "close_sockets", "disk_full", "hang",  "hold_locks"};

/// Reads a fault. \throws usage_error for a text that does not fit
inline planned_fault fault_of(std::string_view text) {
  auto const refuse = [&](std::string const& why) -> usage_error {
    std::string kinds;
    for (std::string_view const name : fault_names) kinds += (kinds.empty() ? "" : ", ") + std::string(name);
    return usage_error("CHEVRON_FAULT=" + std::string(text) + ": " + why +
                       ". Remedy: as in `rank 2, step 3, after 1RECV_F0: kill`; kinds: " + kinds);
  };
  planned_fault out;
  std::string_view rest = text;
  auto const number = [&](std::string_view word) -> std::optional<long> {
    if (!rest.starts_with(word)) return std::nullopt;
    long value = 0;
    auto const [end, wrong] = std::from_chars(rest.data() + word.size(), rest.data() + rest.size(), value);
    std::string_view const after(end, static_cast<std::size_t>(rest.data() + rest.size() - end));
    if (wrong != std::errc() || !after.starts_with(", ")) throw refuse("no number and comma after `" + std::string(word) + "`");
    rest = after.substr(2);
    return value;
  };
  auto const rank = number("rank ");
  if (!rank) throw refuse("it does not begin with a rank");
  out.rank = static_cast<int>(*rank);
  out.step = number("step ").value_or(-1);
  auto const colon = rest.rfind(": ");
  if (colon == std::string_view::npos || colon == 0) throw refuse("it has no point and kind");
  out.point = rest.substr(0, colon);
  std::string_view const kind = rest.substr(colon + 2);
  for (std::size_t k = 0; k < std::size(fault_names); ++k) {
    if (kind != fault_names[k]) continue;
    out.what = static_cast<planned_fault::kind>(k);
    return out;
  }
  throw refuse("`" + std::string(kind) + "` is no kind");
}

/// The fault in this process's environment.
inline std::optional<planned_fault> const& told_fault() {
  static std::optional<planned_fault> const told = [] {
    char const* const text = std::getenv("CHEVRON_FAULT");
    return text == nullptr || *text == 0 ? std::nullopt : std::optional(fault_of(text));
  }();
  return told;
}

inline void break_connections() {
  std::error_code ignored;
  for (auto const& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    int const file = std::atoi(entry.path().filename().c_str());
    if (std::filesystem::read_symlink(entry.path(), ignored).string().starts_with("socket:")) ::shutdown(file, SHUT_RDWR);
  }
}

/// Written to stderr when a fault is triggered, so that a test knows that later events are its effect.
inline constexpr std::string_view fault_struck = "a fault strikes\n";

inline void strike(planned_fault const& f) {
  if (::write(STDERR_FILENO, fault_struck.data(), fault_struck.size()) < 0) return;
  switch (f.what) {
    case planned_fault::kind::kill: ::kill(::getpid(), SIGKILL); break;
    case planned_fault::kind::stop: ::kill(::getpid(), SIGSTOP); break;
    case planned_fault::kind::exit: ::_exit(42);
    case planned_fault::kind::slow: std::this_thread::sleep_for(std::chrono::milliseconds(300)); break;
    case planned_fault::kind::raise: throw std::runtime_error("a fault was asked for");
    case planned_fault::kind::bad_alloc: throw std::bad_alloc();
    case planned_fault::kind::close_sockets: break_connections(); break;
    case planned_fault::kind::disk_full: {
      rlimit const none{0, 0};
      ::setrlimit(RLIMIT_FSIZE, &none);
      break;
    }
    case planned_fault::kind::hold_locks:
      ::flockfile(stdout);
      ::flockfile(stderr);
      [[fallthrough]];
    case planned_fault::kind::hang:
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

/// Triggers this process's fault if its point is here. \param point `joining`, …
inline void fault_point(int rank, long step, std::string_view point) {
  auto const& told = told_fault();
  if (told && told->rank == rank && (told->step < 0 || told->step == step) && told->point == point) strike(*told);
}
/// Triggers this process's fault if its point is here. \param when `before` or `after` the action
inline void fault_point(int rank, long step, std::string_view when, action const& what) {
  if (told_fault()) fault_point(rank, step, std::string(when) + " " + to_text(what).str());
}

}  // namespace chevron::detail
