#pragma once

#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <thread>
#include <utility>

/// \file
/// Runs work that may hang, in a separate thread for which the caller waits a limited time.

namespace chevron::detail {

/// Runs `work` in a detached thread and waits at most `longest` for its end; after that the thread continues alone. Does not
/// run `work` if no memory or no thread is available. Drops a `std::exception` of `work`.
/// \param work must own all data that it uses, since it may run on after the call returns
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
