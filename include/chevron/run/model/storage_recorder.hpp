#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <chevron/run/model/storage_set.hpp>

/// \file
/// Records the storages of operators' results.

namespace chevron {

/// While the object lives, adds the storages of the results of this thread's operators to a set; for a view, the storage of its
/// base. Uses at::RecordFunction, as PyTorch's profilers do, on any device; no bit of a result changes. A storage that no
/// operator returned (a tensor of at::from_blob before its first use) is not recorded.
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

}  // namespace chevron
