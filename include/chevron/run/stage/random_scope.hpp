#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <chevron/run/core/device_threads.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>

/// \file
/// Random numbers (dropout …) that depend on seed, step, stage and microbatch, but not on threads or the schedule.

namespace chevron {

/// The kind of computation that draws.
enum class random_use : std::uint8_t {
  forward,          ///< of a stage, or of the loss
  backward,         ///< a node of autograd's graph and the hooks before it; if nodes share a stream, a whole B or I
  backward_weight,  ///< a whole W, if nodes share a stream
  optimizer_step,   ///< `before_optimizer_step` and the optimizer
  own_action,       ///< the handler of X, Y or Z (`trainer_options::own_actions`)
  batch             ///< functions of the batch: `slice_cuts`, `loss_weight`, weights of declared losses
};

/// The place in the computation at which random numbers are drawn; the place alone determines the stream of numbers. Each F of
/// a stage has its own stream, and so has each node of the F's graph in the backward: a model drops the same units under every
/// schedule, in threads and in processes, when a step is resumed or redone, and when an F is recomputed for the backward.
struct rng_key {
  std::uint64_t seed = 0;  ///< the training job's seed
  long step = 0;           ///< the step's number, from 0
  int replica = 0;
  int stage = 0;
  int micro_batch = 0;  ///< index within the optimizer step, over all accumulated batches
  int part = 0;         ///< index within the stage, from 0
  random_use use = random_use::forward;
  /// In a backward the node's number in the part's graph, from 1 (backward_scope.hpp); in an own action its letter; otherwise 0.
  std::uint64_t node = 0;
  int shard = 0;           ///< within `sharded_random` 1 + the shard's number; otherwise 0: all shards draw the same numbers
  int region = 0;          ///< within `sharded_random` the scope's number in this part, from 1; otherwise 0
};

/// The seed of the stream at a place.
constexpr std::uint64_t stream_of(rng_key const& at) {
  std::uint64_t state = at.seed;
  auto const mix = [&state](std::uint64_t value) {  // splitmix64's finaliser over a running sum
    state += 0x9e3779b97f4a7c15ULL + value;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ULL;
    state = (state ^ (state >> 27)) * 0x94d049bb133111ebULL;
    state ^= state >> 31;
  };
  mix(static_cast<std::uint64_t>(at.step));
  mix(static_cast<std::uint64_t>(at.replica));
  mix(static_cast<std::uint64_t>(at.stage));
  mix(static_cast<std::uint64_t>(at.micro_batch));
  mix(static_cast<std::uint64_t>(at.part));
  if (at.shard != 0) {
    mix(static_cast<std::uint64_t>(at.shard));
    mix(static_cast<std::uint64_t>(at.region));
  }
  if (at.use != random_use::forward) {
    mix(static_cast<std::uint64_t>(at.use));
    mix(at.node);
  }
  return state;
}

class random_scope;

namespace detail {

/// The source of random numbers for this thread's operators that are called without a generator.
struct random_stream {
  random_stream* outer = nullptr;
  virtual at::Generator const& ready() = 0;

 protected:
  ~random_stream() = default;
};

/// One generator for all draws, created at the first draw: creating it takes microseconds, and most stages draw nothing.
struct one_stream final : random_stream {
  std::uint64_t seed = 0;
  at::Generator generator;

  at::Generator const& ready() override {
    static thread_local at::Generator const of_thread = at::make_generator<at::CPUGeneratorImpl>();
    if (!generator.defined()) {
      generator = outer == nullptr ? of_thread : at::make_generator<at::CPUGeneratorImpl>();
      generator.set_current_seed(seed);
    }
    return generator;
  }
};

inline thread_local random_stream* current_stream = nullptr;
inline thread_local random_scope* current_scope = nullptr;  // the innermost scope

/// ATen has one CPU generator for the whole process, which ranks in threads would share. This dispatch key, which ATen leaves to
/// other libraries, is enabled per thread: operators with a generator argument then go to `draw_from_stream`, all others ignore
/// the key.
inline constexpr c10::DispatchKey random_key = c10::DispatchKey::DeferredInit;

inline bool on_main_memory(c10::OperatorHandle const& op, torch::jit::Stack const& stack) {
  auto const& arguments = op.schema().arguments();
  std::size_t const first = stack.size() - arguments.size();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    c10::IValue const& value = stack[first + i];
    if (value.isTensor() && value.toTensor().defined()) return value.toTensor().is_cpu();
    if (arguments[i].name() == "device" && value.isDevice()) return value.toDevice().is_cpu();
  }
  return true;
}

inline void draw_from_stream(c10::OperatorHandle const& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto const& arguments = op.schema().arguments();
  std::size_t const first = stack->size() - arguments.size();
  for (std::size_t i = 0; current_stream != nullptr && i < arguments.size(); ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (arguments[i].name() != "generator" || !value.isNone() || !on_main_memory(op, *stack)) continue;
    value = current_stream->ready();
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, random_key), stack);
}

/// Registers `draw_from_stream` for all operators with a generator argument, once in a process.
inline void intercept_draws() {
  static bool const done = [] {
    static torch::Library all(torch::Library::IMPL, "_", random_key, __FILE__, __LINE__);
    all.fallback(torch::CppFunction::makeFallthrough());
    static torch::Library drawing(torch::Library::IMPL, "aten", random_key, __FILE__, __LINE__);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (c10::OperatorName const& name : dispatcher.getAllOpNames()) {
      auto const op = dispatcher.findSchema(name);
      if (!op || name.name.rfind("aten::", 0) != 0) continue;
      bool draws = false;
      for (auto const& argument : op->schema().arguments()) draws = draws || argument.name() == "generator";
      if (!draws) continue;
      std::string const full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
      drawing.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&draw_from_stream>());
    }
    return true;
  }();
  static_cast<void>(done);
}

/// During this object's lifetime, this thread draws from `stream`.
class drawing_from {
 public:
  explicit drawing_from(random_stream& stream) : stream_(&stream), include_((intercept_draws(), random_key)) {
    stream.outer = std::exchange(current_stream, &stream);
  }
  ~drawing_from() { current_stream = stream_->outer; }
  drawing_from(drawing_from const&) = delete;
  drawing_from& operator=(drawing_from const&) = delete;

 private:
  random_stream* stream_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

/// Seeds the default generators of the accelerators of the tensors `near`; the destructor restores the generators' states.
class seeded_devices {
 public:
  seeded_devices(std::uint64_t seed, std::span<at::Tensor const> near) {
    for (at::Tensor const& t : near) {
      if (!t.defined() || t.is_cpu()) continue;
      at::Generator of_device = at::globalContext().defaultGenerator(t.device());
      if (std::any_of(before_.begin(), before_.end(), [&](auto const& known) { return known.first == of_device; })) continue;
      std::lock_guard const hold(of_device.mutex());
      before_.emplace_back(of_device, of_device.get_state());
      of_device.set_current_seed(seed);
    }
  }
  ~seeded_devices() {
    for (auto& [of_device, before] : before_) {
      try {
        std::lock_guard const hold(of_device.mutex());
        of_device.set_state(before);
      } catch (std::exception const&) {
        // The device is lost: its next use reports that.
      }
    }
  }
  seeded_devices(seeded_devices const&) = delete;
  seeded_devices& operator=(seeded_devices const&) = delete;

  /// \throws usage_error if a draw used a device on which several ranks of this process compute
  bool drew() const {
    bool any = false;
    for (auto const& [of_device, before] : before_) {
      if (of_device.get_offset() == 0) continue;
      any = true;
      if (device_thread::share(of_device.device())) {
        throw usage_error(
            "random numbers were drawn on " + of_device.device().str() +
            ", whose generator several ranks of this process share, so that none draws its own. Remedy: a device or a "
            "process for each rank, or no draws");
      }
    }
    return any;
  }

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> before_;  // generators, with their states before
};

}  // namespace detail

/// Records where in the model the nodes of one microbatch's autograd graph were created. Each `random_scope` with this object
/// as an argument records its thread's nodes; a `backward_scope` (backward_scope.hpp) looks up the place of a node that draws.
class node_places {
 public:
  /// Nodes [first, last) by LibTorch's sequence number. A nested range is listed after the enclosing range.
  struct range {
    std::uint64_t first = 0, last = 0;
    rng_key at;
  };
  /// Parameters of one stage, whose gradients' hooks may draw. The list is not copied: it must outlive this object.
  struct leaves {
    rng_key at;
    std::vector<parameter> const* all;
  };

  /// Begins a range of nodes created at place `at`. \returns the range's index, for `end`
  std::size_t begin(rng_key const& at) {
    std::uint64_t const next = at::sequence_number::peek();
    ranges_.push_back({next, next, at});
    return ranges_.size() - 1;
  }
  void end(std::size_t number) { ranges_[number].last = at::sequence_number::peek(); }  ///< ends the range `number`
  /// Adds parameters of the stage at place `at`.
  void add_leaves(rng_key const& at, std::vector<parameter> const& all) { leaves_.push_back({at, &all}); }
  /// Forgets all ranges and leaves.
  void clear() {
    ranges_.clear();
    leaves_.clear();
  }
  std::vector<range> const& ranges() const { return ranges_; }       ///< in the order of `begin`
  std::vector<leaves> const& all_leaves() const { return leaves_; }  ///< in the order of `add_leaves`

 private:
  std::vector<range> ranges_;
  std::vector<leaves> leaves_;
};

/// During this object's lifetime, this thread draws from the stream of one place, in operators called without a generator:
/// dropout, `at::randn` and the like. The process's default generator is unchanged. The executor opens a scope around every F;
/// an un-pipelined model with such scopes draws the same numbers.
///
/// On an accelerator, operators draw from the device's default generator; fused operators have no generator argument. So the
/// scope seeds the default generators of the devices of `near`, and restores their states at the end. Each rank that is a
/// thread needs its own device: draws on a shared device are refused.
class random_scope {
 public:
  /// \param at place of the stream \param near tensors on the accelerators used for draws; none for the CPU
  /// \param places records the nodes that this forward creates, for draws in the backward; may be null
  explicit random_scope(rng_key const& at, std::span<at::Tensor const> near = {}, node_places* places = nullptr)
      : places_(places),
        at_(at),
        outer_(std::exchange(detail::current_scope, this)),
        devices_(stream_of(at), near),
        drawing_(stream_) {
    stream_.seed = stream_of(at);
    for (at::Tensor const& t : near)
      if (t.defined() && !t.is_cpu()) near_.push_back(t);
    if (places_ != nullptr) range_ = places_->begin(at);
  }
  /// Makes this thread draw from the enclosing scope's stream again, and restores the states of devices' generators.
  ~random_scope() {
    if (places_ != nullptr) places_->end(range_);
    detail::current_scope = outer_;
  }
  random_scope(random_scope const&) = delete;
  random_scope& operator=(random_scope const&) = delete;

  /// Whether any number was drawn. \throws usage_error if a draw used a device on which several ranks of this process compute
  bool drew() const { return drew_within_ || devices_.drew() || stream_.generator.defined(); }

 private:
  friend class sharded_random;

  node_places* places_;
  rng_key at_;
  std::vector<at::Tensor> near_;  // on accelerators
  random_scope* outer_;
  std::size_t range_ = 0;     // index in `places_`
  int regions_ = 0;           // number of `sharded_random` scopes so far
  bool drew_within_ = false;  // a number was drawn in a `sharded_random` scope
  detail::one_stream stream_;
  detail::seeded_devices devices_;
  detail::drawing_from drawing_;
};

/// During this object's lifetime, within a stage's forward, each shard draws from its own stream: for dropout of tensors cut
/// over shards. Otherwise all shards draw the same numbers, for whole tensors. A recomputed F repeats its numbers.
///
///     chevron::sharded_random const own(group.shard());
///     x = torch::dropout(x, 0.1, is_training());
///
/// No effect outside of a `random_scope`.
class sharded_random {
 public:
  /// \param shard from 0
  explicit sharded_random(int shard) : around_(detail::current_scope) {
    if (around_ == nullptr) return;
    rng_key key = around_->at_;
    key.shard = 1 + shard;
    key.region = ++around_->regions_;
    own_.emplace(key, around_->near_, around_->places_);
  }
  /// Ends the shard's stream. \throws usage_error if a draw used a device on which several ranks of this process compute
  ~sharded_random() noexcept(false) {
    if (own_ && own_->drew()) around_->drew_within_ = true;
  }
  sharded_random(sharded_random const&) = delete;
  sharded_random& operator=(sharded_random const&) = delete;

 private:
  random_scope* around_;
  std::optional<random_scope> own_;
};

/// Builds a model or data by `make` with random numbers of a seed: the same numbers in every thread, process and run.
/// (`at::manual_seed` in the body of `run_threads` seeds one generator, from which the threads of all ranks draw.)
///
///     auto model = chevron::seeded(1, [] { return nn::Sequential(nn::Linear(2, 32), nn::Linear(32, 1)); });
///
/// CPU only. Draws differ from those after `at::manual_seed(seed)`, and `at::manual_seed` within `make` has no effect.
/// \param make called once, in this thread
/// \returns the result of `make`
template <class Make>
decltype(auto) seeded(std::uint64_t seed, Make&& make) {
  random_scope const scope({.seed = seed, .stage = -1});  // stage -1: other numbers than dropout's with this seed
  return std::forward<Make>(make)();
}

}  // namespace chevron
