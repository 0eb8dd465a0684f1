#pragma once

#include <chrono>
#include <string>

#include <chevron/tools/search/problem/effort.hpp>

/// \file
/// How long a search goes on: the seconds it was given, signals that end it, and a line on a terminal that says how far it is.

namespace plan_program {

/// While it lives, SIGINT and SIGTERM end the search and not the program; a second one ends the program at once. One at a time.
class search_time {
 public:
  /// \param seconds for all that is searched; 0: as long as it takes
  explicit search_time(double seconds);
  ~search_time();
  search_time(search_time const&) = delete;
  search_time& operator=(search_time const&) = delete;

  /// What is searched from now on, and which share of all seconds will have passed when that is to end.
  void begin(std::string what, double share);
  /// The bound of what is searched is not one of all that is looked for: it is not shown.
  void hide_bound() { bound_shown_ = false; }
  /// For the search; it asks this object, which must outlive it.
  chevron::search::watcher watch() { return {ask, this}; }
  bool limited() const { return seconds_ > 0; }
  double passed() const;
  /// The signal that came, or 0.
  static int signal();

 private:
  using clock = std::chrono::steady_clock;

  static bool ask(chevron::search::progress const& now, void* with);
  void show(chevron::search::progress const& now, double at);
  void wipe();

  double seconds_;
  clock::time_point const began_ = clock::now();
  std::string what_;
  double until_ = 0;
  bool bound_shown_ = true;
  bool terminal_ = false;
  bool shown_ = false;
  double next_line_;  ///< when the line is drawn again, in seconds
};

}  // namespace plan_program
