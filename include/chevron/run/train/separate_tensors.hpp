#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <chevron/run/comm/agreement.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// The checks that no two ranks of one process train the same tensor, and that the parameters of a sharded optimizer have no
/// memory in common.

namespace chevron::detail {

/// Compares the addresses of trained parameters over the ranks. Collective. To be called before any rank writes to a parameter or
/// its `.grad`, which would be a race between two threads.
/// \param stages by number; stages of other ranks are empty
/// \throws usage_error, the same on every rank, if rank threads share a trained parameter
inline void check_separate_tensors(std::vector<stage> const& stages, transport& comm) {
  agreement mine;  // rows of process and address, stage, name
  for (std::size_t s = 0; s < stages.size(); ++s) {
    if (!stages[s]) continue;
    for (parameter const& p : stages[s].parameters()) {
      if (!p.value.requires_grad()) continue;
      auto const address = reinterpret_cast<std::uintptr_t>(p.value.unsafeGetTensorImpl());
      mine.add({std::to_string(::getpid()) + "/" + std::to_string(address), std::to_string(s), p.name});
    }
  }
  auto const called = [](agreement_row const& of) {
    return "stage " + of[1] + "'s " + of[2] + " on rank " + std::to_string(of.rank);
  };
  std::vector<agreement_row> const all = mine.gather(comm);
  std::unordered_map<std::string, agreement_row const*> seen;  // by process and address
  for (agreement_row const& now : all) {
    agreement_row const& before = *seen.try_emplace(now[0], &now).first->second;
    if (before.rank == now.rank) continue;
    throw usage_error(
        called(now) + " and " + called(before) +
            " are one tensor: ranks that are threads would both write to it. Remedy: build it anew on each rank" +
            (now[1] == before[1] ? "" : ", and tie the two: stage.tie(\"" + now[2] + "\", \"a group of their own\")"),
        {.ranks = {now.rank, before.rank}});
  }
}

/// Whether two tensors have an element in common.
inline bool have_common_element(at::Tensor const& a, at::Tensor const& b) {
  if (a.numel() == 0 || b.numel() == 0 || !a.has_storage() || !b.has_storage() || !a.storage().is_alias_of(b.storage()))
    return false;
  struct extent {
    std::int64_t begin, end;  // bytes in the storage
  };
  auto const extent_of = [](at::Tensor const& t) {
    std::int64_t last = t.storage_offset();
    for (std::int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    auto const width = static_cast<std::int64_t>(t.itemsize());
    return extent{t.storage_offset() * width, (last + 1) * width};
  };
  extent const of_a = extent_of(a), of_b = extent_of(b);
  if (of_a.end <= of_b.begin || of_b.end <= of_a.begin) return false;
  if (a.itemsize() != b.itemsize() || (a.is_non_overlapping_and_dense() && b.is_non_overlapping_and_dense())) return true;
  // One of the tensors has gaps, in which elements of the other may lie: marks the elements of one, and looks for marks.
  at::NoGradGuard const off;
  at::Tensor const marks = at::zeros({std::max(of_a.end, of_b.end) / static_cast<std::int64_t>(a.itemsize())}, at::kBool);
  auto const over_marks = [&](at::Tensor const& t) { return marks.as_strided(t.sizes(), t.strides(), t.storage_offset()); };
  over_marks(a).fill_(true);
  return over_marks(b).any().item<bool>();
}

/// Checks, for a sharded optimizer, that no two trained parameters of a rank have an element in common. Each replica steps its
/// share of every parameter, and then receives the other shares: if two parameters share an element, the step of one replica
/// overwrites the step of another.
/// \param stages by number; stages of other ranks are empty
/// \throws usage_error naming two parameters
inline void check_separate_memory(std::vector<stage> const& stages) {
  struct trained {
    std::size_t stage;
    parameter const* of;
  };
  std::map<void const*, std::vector<trained>> by_storage;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    if (!stages[s]) continue;
    for (parameter const& p : stages[s].parameters()) {
      if (!p.value.requires_grad() || !p.value.has_storage()) continue;
      auto& all = by_storage[p.value.storage().unsafeGetStorageImpl()];
      for (trained const& other : all) {
        if (other.of->value.is_same(p.value) || !have_common_element(other.of->value, p.value)) continue;
        throw usage_error("stage " + std::to_string(other.stage) + "'s " + other.of->name + " and stage " + std::to_string(s) +
                          "'s " + p.name +
                          " have elements in common, and with a sharded optimizer each replica would step its share of both, "
                          "and overwrite the other's step. Remedy: parameters with memory of their own, one parameter under "
                          "both names, or sharding::nothing");
      }
      all.push_back({s, &p});
    }
  }
}

}  // namespace chevron::detail
