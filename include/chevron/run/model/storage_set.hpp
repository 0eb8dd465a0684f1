#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

/// \file
/// The memory of tensors, each piece once, without holding on to it.

namespace chevron {

/// Storages, however many tensors share one, and which of them are still there.
class storage_set {
 public:
  /// One that is known already, and a tensor without memory of its own kind, change nothing.
  void add(at::Tensor const& t) {
    if (t.defined() && t.has_storage()) all_.try_emplace(t.storage().unsafeGetStorageImpl(), t);
  }
  /// Of this one so many bytes are meant, not all that it has.
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

  /// Forgets what is gone, and asks what is still there how large it has become.
  void drop_gone() {
    for (auto at = all_.begin(); at != all_.end();) {
      auto const held = at->second.of.lock();
      if (held && !at->second.part) at->second.bytes = static_cast<std::int64_t>(held->nbytes());
      at = held ? std::next(at) : all_.erase(at);
    }
  }

  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (auto const& [place, one] : all_) sum += one.bytes;
    return sum;
  }
  /// Of those that were there and are gone.
  std::int64_t bytes_gone() const {
    std::int64_t sum = 0;
    for (auto const& [place, one] : all_) sum += one.of.expired() ? one.bytes : 0;
    return sum;
  }

 private:
  struct entry {
    explicit entry(at::Tensor const& t)
        : of(t.storage().getWeakStorageImpl()), bytes(static_cast<std::int64_t>(t.storage().nbytes())) {}
    // A weak reference keeps the address from being used again; the memory is freed all the same.
    c10::weak_intrusive_ptr<c10::StorageImpl> of;
    std::int64_t bytes;
    bool part = false;
  };

  std::unordered_map<c10::StorageImpl*, entry> all_;
};

}  // namespace chevron
