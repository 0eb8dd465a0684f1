#pragma once

#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <thread>
#include <utility>

/// \file
/// Work that may hang, where the caller must not.

namespace chevron::detail {

/// Does something in a thread of its own and waits for it, but no longer than this; what is late goes on alone. Does nothing
/// where no thread is to be had. Nobody hears of what it throws.
/// \param work owns all that it needs
template <class Work>
void do_within(std::chrono::milliseconds longest, Work work) noexcept {
  try {
    auto over = std::make_shared<std::promise<void>>();
    auto const done = over->get_future();
    std::thread([over = std::move(over), work = std::move(work)] {
      try {
        work();
      } catch (std::exception const&) {
        // As promised.
      }
      over->set_value();
    }).detach();
    done.wait_for(longest);
  } catch (std::exception const&) {
    // No memory or no thread.
  }
}

}  // namespace chevron::detail
