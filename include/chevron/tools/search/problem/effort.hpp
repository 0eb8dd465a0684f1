#pragma once

#include <cstdint>

#include <chevron/describe/list_works.hpp>

/// \file
/// The effort of a search, and its watcher, which may end the search.

namespace chevron::search {

/// The progress of a search.
struct progress {
  double length = 0;  ///< length of the shortest plan so far, in the costs' unit; 0: none yet
  double bound = 0;   ///< lower bound: no schedule is shorter
  int limit = 0;      ///< the limit of chunks in flight that is searched now; limits rise to the requested one
  int round = 1;      ///< number of the round, if `in_rounds` runs the search
};

/// A callback that may end a running search. The searching thread calls `stops` every 32 changes and between the parts of a
/// search; with 100,000 actions such a part takes a few tenths of a second. An ended search returns its best plan so far, which
/// is never longer than the catalogue's best, since the catalogue is always tried, or, if no schedule of the catalogue fits,
/// than a list schedule. The caller provides clocks and signals.
struct watcher {
  bool (*stops)(progress const& now, void* with) = nullptr;  ///< returns true to end the search
  void* with = nullptr;                                      ///< argument for `stops`
};

/// The effort of a search. Equal efforts give equal schedules on every machine, unless a watcher ends the search.
struct effort {
  int trials = 0;          ///< changes tried in all, a share at each limit (by span, all again at some); 0: `usual_trials`
  std::uint64_t seed = 1;  ///< seeds the random changes
  watcher watch{};
};

/// The number of actions that a search puts in order, for this many stages and microbatches.
constexpr int actions_of(int stages, int micro_batches, work_graph work) {
  return (work == work_graph::split_backward ? 3 : 2) * stages * micro_batches;
}

/// The number of changes that `find` tries by default for a plan of this many actions.
constexpr int usual_trials(int actions) {
  int const by_size = 600'000'000 / (actions > 0 ? actions : 1);
  return by_size < 2000 ? 2000 : by_size > 600'000 ? 600'000 : by_size;
}

namespace detail {

/// Reports a search's progress to its watcher, and remembers whether the watcher has ended the search.
class watched {
 public:
  constexpr explicit watched(watcher const& by) : by_(by) {}
  constexpr bool stop() {
    if (!stopped_ && by_.stops != nullptr) stopped_ = by_.stops(now, by_.with);
    return stopped_;
  }
  constexpr bool stopped() const { return stopped_; }

  progress now;
  static constexpr int every = 32;  // number of changes between two calls of the watcher

 private:
  watcher by_;
  bool stopped_ = false;
};

/// A watcher of one round of `in_rounds`: adds the round's number and the best length of all rounds, and calls the user's
/// watcher.
struct round_watcher {
  watcher of;
  int round = 1;
  double length = 0;

  static bool stops(progress const& now, void* with) {
    auto& self = *static_cast<round_watcher*>(with);
    if (self.of.stops == nullptr) return false;
    if (self.length == 0 || (now.length > 0 && now.length < self.length)) self.length = now.length;
    progress all = now;
    all.round = self.round;
    all.length = self.length;
    return self.of.stops(all, self.of.with);
  }
};

}  // namespace detail

/// Repeats a search, each time with twice the trials and other random numbers, until the watcher ends the search or the result
/// is `settled`. Returns the shortest result of all rounds. Without a watcher, the rounds may never end.
/// \param search `Result(effort)`, such as a lambda that calls `find` or `find_layers`
/// \param first_round the effort of the first round; `trials` 0: 5000
template <class Search>
auto in_rounds(Search const& search, effort const& first_round) {
  constexpr int most_trials = 1 << 28;
  detail::round_watcher watch{first_round.watch};
  effort round{first_round.trials > 0 ? first_round.trials : 5000, first_round.seed, {detail::round_watcher::stops, &watch}};
  auto best = search(round);
  while (!best.settled()) {
    watch.length = best.shortest();
    ++watch.round;
    ++round.seed;
    if (round.trials <= most_trials / 2) round.trials *= 2;
    best.add(search(round));
  }
  return best;
}

}  // namespace chevron::search
