#pragma once

#include <signal.h>

#include <chrono>
#include <string>

#if !__has_include(<gloo/context.h>)
#error "Gloo's headers are missing (LibTorch's wheel lacks them). Remedy: include path <include>/chevron/transports/gloo/shim"
#endif
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

/// \file
/// Connects ranks to a process group of c10d's Gloo.

namespace chevron::detail {

using gloo_group = c10::intrusive_ptr<c10d::ProcessGroupGloo>;

/// Ignores SIGPIPE, unless the program has set a handler. Otherwise a rank would be killed when Gloo writes to the socket of a
/// peer that has ended; with the signal ignored the write fails, and the error can be reported.
inline void survive_broken_pipes() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

/// Connects each of the ranks 0 … size - 1 to each other rank; all ranks must call it. Connects at once, since Gloo's lazy
/// connections have no timeout.
/// \param address of this machine, for connections from other ranks
/// \param keys    prefix of the group's keys in the store
/// \param patience longest wait for a connection
/// \param threads number of Gloo's threads that run collectives
inline gloo_group connect_gloo(std::string const& address, c10::intrusive_ptr<c10d::Store> store, std::string const& keys,
                               int rank, int size, std::chrono::milliseconds patience, int threads) {
  survive_broken_pipes();
  auto options = c10d::ProcessGroupGloo::Options::create(patience);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
  options->threads = threads;
  auto made = c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>(keys, std::move(store)), rank,
                                                          size, options);
  // From here on the failure monitor ends waits; Gloo's default timeout would break all connections in the middle of a long step.
  static_cast<c10d::Backend&>(*made).setTimeout(std::chrono::hours(24));
  return made;
}

}  // namespace chevron::detail
