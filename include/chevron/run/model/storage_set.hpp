#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

/// \file
/// A set of storages that does not keep them alive.

namespace chevron {

/// Storages with their sizes in bytes, each once however many tensors share it.
class storage_set {
 public:
  /// Adds a tensor's storage; no effect on a known one, or for a tensor without storage.
  void add(at::Tensor const& t) {
    if (t.defined() && t.has_storage()) all_.try_emplace(t.storage().unsafeGetStorageImpl(), t);
  }
  /// Adds a tensor's storage, and counts `bytes` for it instead of its size.
  void add(at::Tensor const& t, std::int64_t bytes) {
    add(t);
    if (auto const found = all_.find(t.storage().unsafeGetStorageImpl()); found != all_.end()) {
      found->second.bytes = bytes;
      found->second.part = true;
    }
  }
  void merge(storage_set const& other) {
    for (auto const& [place, one] : other.all_) all_.try_emplace(place, one);
  }
  void remove(at::Tensor const& t) {
    if (t.defined() && t.has_storage()) all_.erase(t.storage().unsafeGetStorageImpl());
  }

  /// Drops freed storages, and updates the sizes of the others.
  void drop_gone() {
    for (auto at = all_.begin(); at != all_.end();) {
      auto const held = at->second.of.lock();
      if (held && !at->second.part) at->second.bytes = static_cast<std::int64_t>(held->nbytes());
      at = held ? std::next(at) : all_.erase(at);
    }
  }

  /// The sum of sizes, as of the last `add` or `drop_gone`.
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (auto const& [place, one] : all_) sum += one.bytes;
    return sum;
  }
  /// Bytes of the storages that were freed since the last `drop_gone`.
  std::int64_t bytes_gone() const {
    std::int64_t sum = 0;
    for (auto const& [place, one] : all_) sum += one.of.expired() ? one.bytes : 0;
    return sum;
  }

 private:
  struct entry {
    explicit entry(at::Tensor const& t)
        : of(t.storage().getWeakStorageImpl()), bytes(static_cast<std::int64_t>(t.storage().nbytes())) {}
    // A weak reference frees the memory, but keeps the address from being reused.
    c10::weak_intrusive_ptr<c10::StorageImpl> of;
    std::int64_t bytes;
    bool part = false;
  };

  std::unordered_map<c10::StorageImpl*, entry> all_;
};

}  // namespace chevron
