#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <future>
#include <string>

/// Ends the process where `work` does not end: nothing can be waited for then.
inline void within(std::chrono::seconds longest, std::string const& what, std::function<void()> const& work) {
  auto ended = std::async(std::launch::async, work);
  if (ended.wait_for(longest) == std::future_status::ready) return ended.get();
  std::printf("values: %s did not end within %d s\n", what.c_str(), static_cast<int>(longest.count()));
  std::fflush(stdout);
  ::_exit(1);
}
