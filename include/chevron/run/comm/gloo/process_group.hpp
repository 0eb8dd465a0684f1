#pragma once

#include <signal.h>

#include <chrono>
#include <string>

#if !__has_include(<gloo/context.h>)
#error \
    "Gloo's headers are missing (LibTorch's wheel leaves them out). Remedy: include path <include>/chevron/run/comm/gloo/shim"
#endif
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

/// \file
/// Groups of ranks that c10d's Gloo connects.

namespace chevron::detail {

using gloo_group = c10::intrusive_ptr<c10d::ProcessGroupGloo>;

/// Gloo writes to its sockets so that a peer's end kills the writer by SIGPIPE; as an error it can be reported. A program that
/// has chosen what to do with this signal is left alone.
inline void survive_broken_pipes() {
  struct sigaction now {};
  if (::sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) ::signal(SIGPIPE, SIG_IGN);
}

/// Connects ranks 0 … size - 1 that call this alike, each to each: nothing is connected lazily, since Gloo's lazy connections
/// know no timeout.
/// \param address of this machine, where the others connect to
/// \param keys    what the group's keys in the store begin with
/// \param threads that carry out collectives
inline gloo_group connect_gloo(std::string const& address, c10::intrusive_ptr<c10d::Store> store, std::string const& keys,
                               int rank, int size, std::chrono::milliseconds patience, int threads) {
  survive_broken_pipes();
  auto options = c10d::ProcessGroupGloo::Options::create(patience);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
  options->threads = threads;
  auto made = c10::make_intrusive<c10d::ProcessGroupGloo>(c10::make_intrusive<c10d::PrefixStore>(keys, std::move(store)), rank,
                                                          size, options);
  // From here on the watch keeps the time; Gloo's default would break all connections in the middle of a long step.
  static_cast<c10d::Backend&>(*made).setTimeout(std::chrono::hours(24));
  return made;
}

}  // namespace chevron::detail
