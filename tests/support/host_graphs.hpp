#pragma once

// Graphs of LibTorch's operators on the CPU, as a GPU's graphs of kernels: operators of a capture are recorded with the
// addresses that they read and write, have no effect, and are executed at a launch. Decisions of the host are made once, in
// the capture. Memory that is allocated in captures comes from a pool, and returns to it for later captures, even if launches
// still use it.

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/library.h>

#include <chevron/run/core/device_graph.hpp>

#include "support/tensors_in.hpp"

namespace host_graphs {

/// Memory of the graphs of one rank.
class pool : public std::enable_shared_from_this<pool> {
 public:
  ~pool() {
    for (auto const& [size, list] : free_) {
      for (void* const memory : list) c10::free_cpu(memory);
    }
  }
  c10::DataPtr take(std::size_t size) {
    std::lock_guard const hold(mutex_);
    auto& list = free_[size];
    void* memory = nullptr;
    if (list.empty()) {
      memory = c10::alloc_cpu(size);
    } else {
      memory = list.back();
      list.pop_back();
    }
    auto* const block = new taken{shared_from_this(), memory, size};
    return {memory, block, [](void* which) { delete static_cast<taken*>(which); }, at::kCPU};
  }

 private:
  struct taken {
    std::shared_ptr<pool> from;
    void* memory;
    std::size_t size;
    ~taken() {
      std::lock_guard const hold(from->mutex_);
      from->free_[size].push_back(memory);
    }
  };
  std::mutex mutex_;
  std::map<std::size_t, std::vector<void*>> free_;
};

class graph final : public chevron::device_graph {
 public:
  explicit graph(std::shared_ptr<pool> memory) : memory_(std::move(memory)) {}

  void launch() override {
    at::NoGradGuard const off;
    at::AutoDispatchBelowADInplaceOrView const below;
    for (operation const& o : operations_) {
      torch::jit::Stack stack = o.arguments;
      o.what.callBoxed(&stack);
      tensors const results = tensors_of(stack);
      for (std::size_t k = 0; k < results.size(); ++k) {
        // A view of an argument, or the argument itself, is in its place already.
        if (results[k].defined() && results[k].data_ptr() != o.results[k].data_ptr()) o.results[k].copy_(results[k]);
      }
    }
  }

  void carry_out(c10::OperatorHandle const& what, c10::DispatchKeySet below, torch::jit::Stack* stack) {
    std::string const& name = what.operator_name().name;
    TORCH_CHECK(name != "aten::_local_scalar_dense", "operation not permitted when stream is capturing\nFor debugging …");
    auto const& arguments = what.schema().arguments();
    auto const first = static_cast<std::ptrdiff_t>(stack->size() - arguments.size());
    std::lock_guard const hold(mutex_);
    operation noted{what, {}, {}};
    // Its schema does not say that it changes the running means.
    bool const silent = name.find("native_batch_norm") != std::string::npos;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      c10::IValue const& value = (*stack)[static_cast<std::size_t>(first) + i];
      noted.arguments.push_back(tensors_in::replaced(value, place_of));
      bool const writes = silent || (arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite());
      if (writes && value.isTensor() && value.toTensor().defined())
        before_.emplace_back(value.toTensor().variable_data(), value.toTensor().variable_data().clone());
    }
    what.redispatchBoxed(below, stack);
    if (name.find("empty") != std::string::npos) return;  // no work
    for (at::Tensor const& result : tensors_of({stack->begin() + first, stack->end()})) noted.results.push_back(place_of(result));
    operations_.push_back(std::move(noted));
  }

  /// Nothing has been done.
  void put_back() {
    at::NoGradGuard const off;
    for (std::size_t i = before_.size(); i-- > 0;) before_[i].first.copy_(before_[i].second);
    before_.clear();
  }

  c10::DataPtr allocate(std::size_t size) const { return memory_->take(size); }
  std::size_t operations() const { return operations_.size(); }

 private:
  using tensors = std::vector<at::Tensor>;
  struct operation {
    c10::OperatorHandle what;
    torch::jit::Stack arguments;
    tensors results;
  };

  static at::Tensor place_of(at::Tensor const& t) {
    if (!t.defined() || !t.is_cpu() || t.numel() == 0) return t;
    return at::for_blob(t.data_ptr(), t.sizes())
        .strides(t.strides())
        .options(t.options().requires_grad(false))
        .target_device(t.device())
        .make_tensor();
  }

  static tensors tensors_of(torch::jit::Stack const& stack) {
    tensors out;
    for (c10::IValue const& value : stack) {
      if (value.isTensor()) out.push_back(value.toTensor());
      if (!value.isTensorList()) continue;
      for (at::Tensor const& each : value.toTensorVector()) out.push_back(each);
    }
    return out;
  }

  std::shared_ptr<pool> memory_;
  std::mutex mutex_;  // the halves of a fused pair come from two threads
  std::vector<operation> operations_;
  std::vector<std::pair<at::Tensor, at::Tensor>> before_;
};

/// The capture that a thread is in, and the threads that compute for it.
struct under_way final : c10::DebugInfoBase {
  graph* into;
  explicit under_way(graph* which) : into(which) {}

  static graph* here() {
    auto* const now = static_cast<under_way*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::TEST_INFO));
    return now == nullptr ? nullptr : now->into;
  }
};

class allocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t size) override {
    graph* const now = under_way::here();
    return now == nullptr || size == 0 ? c10::GetDefaultCPUAllocator()->allocate(size) : now->allocate(size);
  }
  void copy_data(void* to, void const* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

// Of a library outside of LibTorch, which is not there; it comes after autograd.
inline constexpr c10::DispatchKey key = c10::DispatchKey::Fake;

inline void note(c10::OperatorHandle const& what, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto const below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, key);
  c10::impl::ExcludeDispatchKeyGuard const once(key);  // an operator's own operators are part of it
  under_way::here()->carry_out(what, below, stack);
}

class maker final : public chevron::graph_maker {
 public:
  std::size_t operations = 0, graphs = 0;

  std::string why_not(chevron::detail::compute_streams const&) const override { return ""; }
  void begin(chevron::detail::compute_streams const&) override {
    static bool const ready = [] {
      static torch::Library all(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
      all.fallback(torch::CppFunction::makeFromBoxedFunction<&note>());
      static allocator ours;
      c10::SetCPUAllocator(&ours, 1);
      return true;
    }();
    static_cast<void>(ready);
    operations = graphs = 0;
    memory_ = std::make_shared<pool>();
  }
  std::unique_ptr<chevron::device_graph> capture(chevron::detail::compute_streams const&,
                                                 std::function<void()> const& work) override {
    auto made = std::make_unique<graph>(memory_);
    try {
      c10::DebugInfoGuard const here(c10::DebugInfoKind::TEST_INFO, std::make_shared<under_way>(made.get()));
      c10::impl::IncludeDispatchKeyGuard const noted(key);
      work();
    } catch (...) {
      made->put_back();
      throw;
    }
    made->put_back();
    operations += made->operations();
    ++graphs;
    return made;
  }

 private:
  std::shared_ptr<pool> memory_;
};

}  // namespace host_graphs
