#pragma once

#include <cstdint>

#include <chevron/describe/sized.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// What list scheduling keeps while it plays: whose turn it is, what is ready on each rank, what has been done.

namespace chevron {

/// What a step consists of: forwards and whole backwards, or forwards, input and weight gradients.
enum class work_graph { full_backward, split_backward };

namespace detail {

inline constexpr double never = 1e300;

/// Whose turn it is. Ranks act in the order of the times of their next tries, of equal times the lower rank first. A tree of the
/// earliest times is walked from left to right through the ranks that are due now, and brought up to date on the way: about two
/// nodes a turn where all ranks act at once, and never more than twice the depth of the tree.
class turns {
 public:
  /// All ranks are due at time 0.
  constexpr explicit turns(int ranks) {
    while (leaves_ < ranks) leaves_ *= 2;
    earliest_ = buffer<double>(2 * leaves_);
    double* const earliest = earliest_.data;
    for (int i = 0; i < leaves_; ++i) earliest[leaves_ + i] = i < ranks ? 0 : never;
    for (int i = leaves_ - 1; i > 0; --i) earliest[i] = earliest[2 * i];
    descend(1);
  }

  constexpr double now() const { return now_; }  ///< `never`: nobody has anything to wait for
  constexpr int rank() const { return at_ - leaves_; }

  /// The rank whose turn it is tries again at `time`; whose turn comes next?
  constexpr void next_turn(double time) {
    double* const earliest = earliest_.data;
    int at = at_;
    earliest[at] = time;
    if (time <= now_ && !goes_back_) return;
    while (at > 1) {
      if (at % 2 == 0 && earliest[at + 1] <= now_ && !goes_back_) {
        descend(at + 1);
        return;
      }
      at /= 2;
      double const left = earliest[2 * at];
      double const right = earliest[2 * at + 1];
      earliest[at] = left <= right ? left : right;
    }
    now_ = earliest[1];
    goes_back_ = false;
    descend(1);
  }

  /// A rank that waits tries at `time`, unless it would try earlier anyway.
  constexpr void wake(int rank, double time) {
    double* const earliest = earliest_.data;
    for (int i = leaves_ + rank; i > 0 && time < earliest[i]; i /= 2) earliest[i] = time;
    if (time <= now_ && leaves_ + rank < at_) goes_back_ = true;
  }

 private:
  constexpr void descend(int node) {
    while (node < leaves_) node = 2 * node + (earliest_.data[2 * node] <= now_ ? 0 : 1);
    at_ = node;
  }

  int leaves_ = 1;
  int at_ = 1;
  double now_ = 0;
  bool goes_back_ = false;   // a rank to the left became due now: a cost of 0
  buffer<double> earliest_;  // node i: the earlier of 2i and 2i + 1; from `leaves_` on the ranks
};

/// What there is to do of one kind on one stage, microbatch after microbatch.
struct listed_work {
  action what{};  // of microbatch 0
  int taken = 0;  // how many microbatches have been,
  int known = 0;  // and for how many it is known when they can start
  int rank = 0;
  double length = 0;
  int change = 0;                 // of the chunks in flight on its rank,
  std::int64_t bytes_change = 0;  // and of their bytes
  std::int64_t bytes_room = 0;    // it is admitted where no more than that are in flight
  int fed = 0;                    // so many works need its results:
  int feeds[2]{};
};

/// The works of a step. Each rank's stand together, in the order in which it prefers them.
struct listed_works {
  int families;  // of kinds: forwards; B or I; W
  buffer<listed_work> work;
  buffer<double> ready;  // by work: when what comes next can start, as far as that is known
  buffer<int> room;      // by work: it is admitted where fewer chunks are in flight
  int entry = 0;         // the forwards of stage 0

  template <class Listing>
  constexpr listed_works(Listing const& what, plan const& into, stages_by_rank const& placed)
      : families(what.work == work_graph::split_backward ? 3 : 2),
        work(families * into.stages, zeroed),
        ready(families * into.stages),
        room(families * into.stages) {
    bool const split = families == 3;
    kind const kinds[3] = {kind::forward, split ? kind::backward_input : kind::backward, kind::backward_weight};
    double const length[3] = {what.times.forward,
                              split ? what.times.backward_input : what.times.backward_input + what.times.backward_weight,
                              what.times.backward_weight};
    int place_of[3] = {0, 0, 0};  // a family's among the others
    for (int family = 0; family < families; ++family) {
      int const preferred = what.rank_of_kind[static_cast<int>(kinds[family])];
      for (int other = 0; other < families; ++other) {
        int const to_it = what.rank_of_kind[static_cast<int>(kinds[other])];
        if (to_it < preferred || (to_it == preferred && other < family)) ++place_of[family];
      }
    }

    int const* const first = placed.first.data;
    buffer<int> index_memory(families * into.stages);
    int* const index = index_memory.data;  // by stage and family
    for (int r = 0; r < into.size.ranks; ++r) {
      int const held = placed.held(r);
      for (int i = 0; i < held; ++i) {
        for (int family = 0; family < families; ++family) {
          // Forwards from the latest stage to the earliest, gradients the other way.
          index[placed.stage.data[first[r] + i] * families + family] =
              first[r] * families + place_of[family] * held + (family == 0 ? held - 1 - i : i);
        }
      }
    }

    std::int64_t const* const bytes = into.byte_limit > 0 ? into.stage_bytes.data : nullptr;
    for (int r = 0; r < into.size.ranks; ++r) {
      // What the later stages of its rank will need while a stage's forward is in flight.
      int later = 0;
      std::int64_t later_bytes = 0;
      for (int i = first[r + 1] - 1; i >= first[r]; --i) {
        int const stage = placed.stage.data[i];
        std::int64_t const bytes_here = bytes != nullptr ? bytes[stage] : 0;
        for (int family = 0; family < families; ++family) {
          int const at = index[stage * families + family];
          bool const forward = family == 0;
          listed_work& w = work.data[at];
          w.what = make_action(kinds[family], stage, 0);
          w.rank = r;
          w.length = length[family];
          w.change = forward ? 1 : family == families - 1 ? -1 : 0;
          w.bytes_change = w.change * bytes_here;
          w.bytes_room = forward ? into.byte_limit - bytes_here - later_bytes : most_bytes;
          room.data[at] = forward && into.in_flight_limit > 0 ? into.in_flight_limit - later : most_chunks;
          ready.data[at] = never;
          if (forward) w.feeds[w.fed++] = stage + 1 < into.stages ? index[(stage + 1) * families] : index[stage * families + 1];
          if (family == 1 && stage > 0) w.feeds[w.fed++] = index[(stage - 1) * families + 1];
          if (family == 1 && split) w.feeds[w.fed++] = index[stage * families + 2];
        }
        ++later;
        later_bytes += bytes_here;
      }
    }
    entry = index[0];
  }

 private:
  static constexpr int most_chunks = 2147483647;
  static constexpr std::int64_t most_bytes = 9223372036854775807;
};

/// How far a rank has come.
struct listed_progress {
  int at;  // where its next action goes
  int in_flight;
  std::int64_t bytes;
  bool waits;  // for something from another rank
};

}  // namespace detail

}  // namespace chevron
