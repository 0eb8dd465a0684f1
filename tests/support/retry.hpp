#pragma once

// Checks that a busy machine can spoil.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include <doctest/doctest.h>

namespace retry {

/// The complaints of one try.
struct complaints {
  std::string text;
  void unless(bool good, std::string const& wanted) {
    if (!good) text += "not: " + wanted + "\n";
  }
};

/// For checks that a mistake fails every time and a busy machine now and then: the time until an end and, with a short deadline,
/// the rank that is blamed. `once(wrong, number)` adds complaints to `wrong`; one of `most` tries without a complaint is enough.
/// Checks that hold on any machine are made within `once` by CHECK, in each try.
template <class Once>
void until_well(Once const& once, int most = 5) {
  for (int number = 1; number <= most; ++number) {
    complaints wrong;
    once(wrong, number);
    if (wrong.text.empty()) return;
    if (number < most) {
      MESSAGE("try " << number << " of " << most << ": " << wrong.text);
    } else {
      FAIL_CHECK("try " << number << " of " << most << ": " << wrong.text);
    }
  }
}

/// The time since it was made, without that in which the machine stood still and nothing else could go on either. For upper
/// limits.
class stopwatch {
 public:
  using clock = std::chrono::steady_clock;

  stopwatch() = default;
  ~stopwatch() {
    ended_ = true;
    ticking_.join();
  }
  clock::duration spent() const { return spent_.load(); }

 private:
  static constexpr auto tick = std::chrono::milliseconds(5);

  std::atomic<bool> ended_{false};
  std::atomic<clock::duration> spent_{clock::duration(0)};
  std::thread ticking_{[this] {
    auto last = clock::now();
    while (!ended_) {
      std::this_thread::sleep_for(tick);
      auto const now = clock::now();
      spent_ = spent_.load() + std::min<clock::duration>(now - last, 20 * tick);
      last = now;
    }
  }};
};

}  // namespace retry
