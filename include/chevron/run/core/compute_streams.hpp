#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chevron/run/core/device_threads.hpp>
#include <chevron/run/core/worker_thread.hpp>

/// \file
/// The streams on which a rank computes.

namespace chevron {

/// A stream of an accelerator on which a rank computes. While `owner` lives, no other rank gets the stream.
struct compute_lane {
  c10::Stream stream;
  std::shared_ptr<void> owner = {};  ///< null: a stream of LibTorch's pool, which other ranks may also get
};

namespace detail {

/// The next stream of LibTorch's pool.
inline compute_lane pooled_lane(at::Device where) {
  return {c10::impl::VirtualGuardImpl(where.type()).getStreamFromGlobalPool(where)};
}

/// The main stream (lane 0), on which a rank computes in order, and the side stream (lane 1), on which half of a fused pair
/// runs. On an accelerator both streams are different from the default stream; on the CPU the main stream is the calling
/// thread, and the side stream a worker thread.
///
/// Not thread-safe: only the rank's thread calls the functions.
class compute_streams {
 public:
  /// \param where the rank's device \param two whether fused pairs use both streams; else their halves run one after the other
  /// \param make returns a stream of an accelerator
  compute_streams(at::Device where, bool two, std::function<compute_lane(at::Device)> const& make = pooled_lane)
      : where_(where), two_(two) {
    if (on_accelerator()) {
      c10::impl::VirtualGuardImpl const device(where.type());
      if (!where_.has_index()) where_ = device.getDevice();
      for (int lane = 0; lane < (two ? 2 : 1); ++lane) lanes_.push_back(make(where_));
      here_.emplace(where_.type());
      thread_.emplace(where_);
      if (two) do_not_warn_of_lanes(at::globalContext());
    } else if (two) {
      side_ = std::make_unique<worker_thread>();
    }
  }

  at::Device where() const { return where_; }
  bool two() const { return two_; }
  bool on_accelerator() const { return !where_.is_cpu(); }
  /// The stream of a lane, on an accelerator.
  c10::Stream stream(int lane) const { return lanes_.at(static_cast<std::size_t>(lane)).stream; }

  /// Makes the main stream this thread's current stream while the object lives. The main stream first waits for the thread's
  /// earlier work; at the end, the thread's previous stream waits for the main stream. A nested scope has no effect.
  class scope {
   public:
    explicit scope(compute_streams& of) {
      if (!of.on_accelerator() || of.entered_) return;
      of_ = &of;
      device_.emplace(of.where_);
      outside_ = c10::impl::VirtualGuardImpl(of.where_.type()).getStream(of.where_);
      of.after(of.stream(0), *outside_);
      stream_.emplace(of.stream(0));
      of.entered_ = true;
    }
    ~scope() {
      if (of_ == nullptr) return;
      of_->entered_ = false;
      stream_.reset();
      try {
        of_->after(*outside_, of_->stream(0));
      } catch (std::exception const&) {
        // The device is lost; its next use reports the loss.
      }
    }
    scope(scope const&) = delete;
    scope& operator=(scope const&) = delete;

   private:
    compute_streams* of_ = nullptr;
    std::optional<c10::DeviceGuard> device_;
    std::optional<c10::Stream> outside_;
    std::optional<c10::StreamGuard> stream_;
  };

  /// Runs `beside` on lane `lane_of_beside` and `here` on the other lane. Both lanes start after all earlier work of the main
  /// stream; later work of the main stream waits for both. On the CPU a worker thread runs `beside`, with this thread's modes
  /// (grad mode, autocast, number of threads). An error is thrown once both have ended; an error of `beside` has precedence.
  template <class Beside, class Here>
  void both(int lane_of_beside, Beside const& beside, Here const& here) {
    if (!on_accelerator()) return with_worker(beside, here);
    after(stream(1), stream(0));
    auto const on_lane = [this](int lane, auto const& work) {
      c10::StreamGuard const on(stream(lane));
      return problem_of(work);
    };
    std::exception_ptr const first = on_lane(lane_of_beside, beside), second = on_lane(1 - lane_of_beside, here);
    try {
      after(stream(0), stream(1));
    } catch (...) {
      if (!first && !second) throw;  // otherwise this error follows from the error of `beside` or `here`
    }
    if (first) std::rethrow_exception(first);
    if (second) std::rethrow_exception(second);
  }

 private:
  /// Turns off LibTorch's warning about gradients' streams. LibTorch accumulates a parameter's gradient on the stream of the
  /// parameter's first use; with two lanes a gradient may come from the other stream, which recent versions take for a mistake.
  template <class Context>
  static void do_not_warn_of_lanes(Context& context) {
    if constexpr (requires { context.setWarnOnAccumulateGradStreamMismatch(false); })
      context.setWarnOnAccumulateGradStreamMismatch(false);
  }

  void after(c10::Stream const& later, c10::Stream const& earlier) {
    here_->record(earlier);
    here_->block(later);
  }

  /// Runs `work`. \returns its exception, or null
  template <class Work>
  static std::exception_ptr problem_of(Work const& work) {
    try {
      work();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }

  template <class Beside, class Here>
  void with_worker(Beside const& beside, Here const& here) {
    struct {
      std::mutex mutex;
      std::condition_variable changed;
      bool done = false;
      std::exception_ptr problem;
    } there;
    at::ThreadLocalState const modes;
    int const threads = at::get_num_threads();
    side_->post([&] {
      if (at::get_num_threads() != threads) at::set_num_threads(threads);
      std::exception_ptr problem;
      {
        at::ThreadLocalStateGuard const same(modes);
        problem = problem_of(beside);
      }
      std::lock_guard const hold(there.mutex);
      there.problem = std::move(problem);
      there.done = true;
      there.changed.notify_one();
    });
    std::exception_ptr const problem = problem_of(here);
    std::unique_lock hold(there.mutex);
    there.changed.wait(hold, [&] { return there.done; });
    if (there.problem) std::rethrow_exception(there.problem);
    if (problem) std::rethrow_exception(problem);
  }

  at::Device where_;
  bool two_;
  bool entered_ = false;
  std::vector<compute_lane> lanes_;  // of an accelerator, else empty
  std::optional<c10::Event> here_;   // recorded anew by each `after`; waits for earlier records are not affected
  std::optional<device_thread> thread_;
  std::unique_ptr<worker_thread> side_;
};

}  // namespace detail

}  // namespace chevron
