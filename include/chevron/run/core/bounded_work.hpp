#pragma once

#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <thread>
#include <utility>

/// \file
/// Work that may hang, in a thread for which the caller waits a limited time.

namespace chevron::detail {

/// Runs `work` in a detached thread and waits for its end, at most `longest`; the thread then goes on alone. Without memory or a
/// thread `work` does not run. A `std::exception` of `work` is dropped.
/// \param work owns all that it needs, since it may outlive the call
template <class Work>
void do_within(std::chrono::milliseconds longest, Work work) noexcept {
  try {
    auto over = std::make_shared<std::promise<void>>();
    auto const done = over->get_future();
    std::thread([over = std::move(over), work = std::move(work)] {
      try {
        work();
      } catch (std::exception const&) {
        // dropped
      }
      over->set_value();
    }).detach();
    done.wait_for(longest);
  } catch (std::exception const&) {
    // no memory or no thread
  }
}

}  // namespace chevron::detail
