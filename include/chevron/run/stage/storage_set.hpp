#pragma once

#include <cstdint>
#include <iterator>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

/// \file
/// A set of weak references to storages, and a recorder of the storages of operators' results.

namespace chevron::detail {

/// Storages, as weak references, and their sizes in bytes: one entry for each storage, even if several tensors share it.
class storage_set {
 public:
  /// Adds a tensor's storage; no effect if the set has the storage, or the tensor has none.
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
  void remove(storage_set const& other) {
    for (auto const& [place, one] : other.all_) all_.erase(place);
  }

  /// Drops freed storages, and updates the sizes of all others.
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
    // A weak reference lets the memory be freed, but keeps the StorageImpl's address from being reused.
    c10::weak_intrusive_ptr<c10::StorageImpl> of;
    std::int64_t bytes;
    bool part = false;
  };

  std::unordered_map<c10::StorageImpl*, entry> all_;
};

/// During the object's lifetime, adds the storages of all results of this thread's operators to a set; for a view, the storage
/// of the view's base. Uses at::RecordFunction, like PyTorch's profilers, on any device; results are unchanged, bit for bit. A
/// storage that no operator returned (a tensor of at::from_blob before its first use) is not recorded.
class storage_recorder {
 public:
  explicit storage_recorder(storage_set& into)
      : into_(&into),
        outer_(current()),
        handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback(nullptr, &ends).needsOutputs(true).scopes({at::RecordScope::FUNCTION}))) {
    current() = this;
  }
  ~storage_recorder() {
    at::removeCallback(handle_);
    current() = outer_;
  }
  storage_recorder(storage_recorder const&) = delete;
  storage_recorder& operator=(storage_recorder const&) = delete;

 private:
  static storage_recorder*& current() {
    static thread_local storage_recorder* watch = nullptr;
    return watch;
  }

  void see(c10::IValue const& value) {
    if (value.isTensor()) into_->add(value.toTensor());
    if (!value.isList()) return;
    for (c10::IValue const& one : value.toListRef()) see(one);
  }
  static void ends(at::RecordFunction const& op, at::ObserverContext*) {
    if (current() == nullptr) return;
    for (c10::IValue const& value : op.outputs()) current()->see(value);
  }

  storage_set* into_;
  storage_recorder* outer_;
  at::CallbackHandle handle_;
};

}  // namespace chevron::detail
