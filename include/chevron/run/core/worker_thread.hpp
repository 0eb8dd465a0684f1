#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

/// \file
/// A thread that runs functions in order.

namespace chevron::detail {

/// Runs the functions that are posted, in order; the destructor waits until all have run.
class worker_thread {
 public:
  worker_thread() : thread_([this] { run(); }) {}
  ~worker_thread() {
    {
      std::lock_guard const hold(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  worker_thread(worker_thread const&) = delete;
  worker_thread& operator=(worker_thread const&) = delete;

  /// Appends a function, which must not throw.
  void post(std::function<void()> work) {
    {
      std::lock_guard const hold(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_one();
  }

 private:
  void run() {
    std::unique_lock hold(mutex_);
    for (;;) {
      changed_.wait(hold, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      hold.unlock();
      work();
      work = nullptr;
      hold.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace chevron::detail
