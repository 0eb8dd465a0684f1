#pragma once

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chevron/multiprocess.hpp>

#include "connection.hpp"
#include "errors.hpp"

/// \file
/// The job of this process: its ranks are those of a process group of torch.distributed, or of a launcher.

namespace chevron_pipelining {

/// Ends waits of Chevron at Ctrl-C. Python writes a signal's number into a pipe; a thread reads the number and reports a failure
/// of the job, so that this rank's wait ends at once and other ranks name this rank.
class interrupts {
 public:
  explicit interrupts(chevron::job const& of) : watch_(of.watch), rank_(of.rank) {
    if (::pipe2(ends_, O_CLOEXEC | O_NONBLOCK) != 0) return;
    thread_ = std::thread([this] { run(); });
  }
  ~interrupts() {
    if (!thread_.joinable()) return;
    ::close(ends_[1]);  // ends the thread
    thread_.join();
    ::close(ends_[0]);
  }
  interrupts(interrupts const&) = delete;
  interrupts& operator=(interrupts const&) = delete;

  /// While this object lives, Ctrl-C ends waits. Made and destroyed with the GIL. Without effect on threads other than Python's
  /// main thread, and where the program handles SIGINT itself.
  class scope {
   public:
    explicit scope(interrupts const& of) {
      py::module_ const signals = py::module_::import("signal"), threads = py::module_::import("threading");
      if (!threads.attr("current_thread")().is(threads.attr("main_thread")())) return;
      if (!signals.attr("getsignal")(SIGINT).is(signals.attr("default_int_handler"))) return;
      set_ = signals.attr("set_wakeup_fd");
      before_ = set_(of.ends_[1], py::arg("warn_on_full_buffer") = false);
    }
    ~scope() {
      if (set_) set_(before_);
    }
    scope(scope const&) = delete;
    scope& operator=(scope const&) = delete;

   private:
    py::object set_, before_;  // null: not set
  };

 private:
  void run() {
    for (pollfd one{ends_[0], POLLIN, 0}; ::poll(&one, 1, -1) >= 0 && (one.revents & POLLIN) != 0;) {
      unsigned char number = 0;
      while (::read(ends_[0], &number, 1) == 1) {
        if (number == SIGINT)
          watch_->report({.code = 130, .rank = rank_, .reason = "rank " + std::to_string(rank_) + " was interrupted (Ctrl-C)"});
      }
    }
  }

  std::shared_ptr<chevron::failure_monitor> watch_;
  int rank_, ends_[2] = {-1, -1};
  std::thread thread_;
};

/// This rank's connections to the other ranks of its pipeline, and of the pipeline's replicas.
class job {
 public:
  using store = c10::intrusive_ptr<c10d::Store>;

  /// \param shared the store of the process group; without, the variables of a launcher name the store
  /// \param prefix of the job's keys in the store \param rank, world over all replicas \param replicas copies of the pipeline
  /// \param host the rank whose process hosts the store; -1: none
  /// \param master the machine towards which this machine's ranks listen; empty: all ranks are on this machine
  /// \param deadline longest wait for a rank, in seconds
  /// \param gpu number of the GPU of this rank's stages; -1: they are on the CPU
  job(std::optional<store> const& shared, std::string const& prefix, int rank, int world, int replicas, int host,
      std::string const& master, double deadline, int gpu)
      : device_(gpu < 0 ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu))),
        job_(shared ? job_of(*shared, prefix, rank, world, host, master) : chevron::launch()),
        connection_(connect(job_.topology(job_.world / replicas, replicas), job_, gpu)),
        interrupts_(std::make_unique<chevron_pipelining::interrupts>(job_)) {
    transport().deadline(std::chrono::milliseconds(static_cast<long>(deadline * 1e3)));
  }
  ~job() {
    without_gil const free;
    auto const here = on_device();
    if (forked()) {  // threads are gone, and connections are the parent's: both stay untouched
      static_cast<void>(interrupts_.release());
      static_cast<void>(connection_.transport.release());
      static_cast<void>(new chevron::job(std::move(job_)));
      return;
    }
    interrupts_.reset();
    connection_.transport.reset();
    job_ = {};
  }
  job(job const&) = delete;
  job& operator=(job const&) = delete;

  /// Whether this process is a fork of the process that made the job.
  bool forked() const { return ::getpid() != owner_; }
  /// Whether a rank's failure has ended the job: no step or evaluation can run.
  bool failed() const { return job_.watch->failed(); }
  /// Refuses work in a forked child. \throws chevron::usage_error
  void check_owner() const {
    if (!forked()) return;
    throw chevron::usage_error("this process is a fork of rank " + std::to_string(job_.rank) +
                               ", which owns the connections to the other ranks. Remedy: pipelines in the parent alone, or "
                               "start processes by the method `spawn`");
  }
  /// Makes this rank's GPU current in this thread until the end of the scope; nothing on the CPU. LibTorch's and CUDA's calls
  /// without a device would otherwise create a context on the program's current GPU, which takes that GPU's memory.
  c10::OptionalDeviceGuard on_device() const {
    return c10::OptionalDeviceGuard(device_.is_cuda() && !forked() ? std::optional(device_) : std::nullopt);
  }
  /// Publishes that this rank ends by an exception of the program, outside of any step.
  void fail(std::string const& reason) {
    job_.watch->report({.code = 1, .rank = job_.rank, .reason = "rank " + std::to_string(job_.rank) + " ended: " + reason});
    job_.watch->linger();
  }
  /// Waits for all ranks, and closes the connections. Collective.
  void close() {
    check_owner();
    auto const here = on_device();
    interrupts_.reset();
    if (!job_.watch->failed()) connection_.close();
    job_.watch->finish();
  }

  int rank() const { return job_.rank; }
  int world() const { return job_.world; }
  at::Device device() const { return device_; }
  chevron::transport& transport() { return *connection_.transport; }
  interrupts const& ctrl_c() const { return *interrupts_; }

 private:
  static chevron::job job_of(store const& shared, std::string const& prefix, int rank, int world, int host,
                             std::string const& master) {
    chevron::detail::make_room_for_connections(world);
    chevron::job out;
    out.rank = rank, out.world = world, out.launcher = "torch.distributed";
    out.join = std::chrono::minutes(10);  // another rank may still compile the binding
    if (!master.empty()) out.interface_address = chevron::detail::address_towards(chevron::detail::resolve(master, 1));
    out.store = c10::make_intrusive<c10d::PrefixStore>(prefix, shared);
    out.watch = std::make_shared<chevron::failure_monitor>(out.store, rank, world, host);
    return out;
  }

  pid_t owner_ = ::getpid();
  at::Device device_;
  chevron::job job_;
  connection connection_;
  std::unique_ptr<interrupts> interrupts_;
};

}  // namespace chevron_pipelining
