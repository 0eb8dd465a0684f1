#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/model/stage.hpp>

/// \file
/// The check that no two ranks of one process train the same tensor.

namespace chevron::detail {

/// Compares the addresses of trained parameters over the ranks. Collective. To be called before any rank writes to a parameter or
/// its `.grad`, which would be a race between two threads.
/// \param stages by number; stages of other ranks are empty
/// \throws usage_error, the same on every rank, if rank threads share a trained parameter
inline void check_separate_tensors(std::vector<stage> const& stages, transport& comm) {
  struct owner {
    std::size_t rank;
    std::string stage, name;
    std::string text() const { return "stage " + stage + "'s " + name + " on rank " + std::to_string(rank); }
  };
  std::string mine;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    if (!stages[s]) continue;
    for (parameter const& p : stages[s].parameters()) {
      if (!p.value.requires_grad()) continue;
      mine += std::to_string(::getpid()) + "/" + std::to_string(reinterpret_cast<std::uintptr_t>(p.value.unsafeGetTensorImpl())) +
              "\t" + std::to_string(s) + "\t" + p.name + "\n";
    }
  }
  std::vector<std::string> const all = comm.all_gather_text(mine);
  std::map<std::string, owner> seen;  // by process and address: the first rank that has the tensor
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    std::istringstream in(all[rank]);
    std::string address;
    for (owner now{rank, {}, {}};
         std::getline(in, address, '\t') && std::getline(in, now.stage, '\t') && std::getline(in, now.name);) {
      owner const& before = seen.try_emplace(address, now).first->second;
      if (before.rank == rank) continue;
      throw usage_error(
          now.text() + " and " + before.text() +
              " are one tensor: ranks that are threads would both write to it. Remedy: build it anew on each rank" +
              (now.stage == before.stage ? "" : ", and tie the two: stage.tie(\"" + now.name + "\", \"a group of their own\")"),
          {.ranks = {static_cast<int>(now.rank), static_cast<int>(before.rank)}});
    }
  }
}

}  // namespace chevron::detail
