#pragma once

#include <cstdint>

#include <chevron/describe/sized.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/dispatch.hpp>

/// \file
/// The state of list scheduling while it plays a step: each rank's ready actions, and the actions that have run.

namespace chevron {

/// The kinds of a step's actions: forwards and whole backwards, or forwards, input gradients and weight gradients.
enum class work_graph { full_backward, split_backward };

namespace detail {

/// All actions of one kind on one stage, in the order of microbatches.
struct listed_work {
  action what{};  // the action of microbatch 0
  int taken = 0;  // number of microbatches that have run
  int known = 0;  // number of microbatches whose earliest start is known
  int rank = 0;
  double length = 0;
  int change = 0;                 // change of the rank's chunks in flight by one action
  std::int64_t bytes_change = 0;  // change of the rank's bytes in flight by one action
  std::int64_t bytes_room = 0;    // the action may run if at most this many bytes are in flight
  int fed = 0;                    // number of works that need its results
  int feeds[2]{};
};

/// The works of a step (a work: all actions of a kind on a stage), rank after rank; each rank's in its order of preference.
struct listed_works {
  int families;  // number of families of kinds: forwards; B or I; W
  buffer<listed_work> work;
  buffer<double> ready;  // by work: the earliest start of the next action; `never`: not known
  buffer<int> room;      // by work: the action may run if fewer chunks than this are in flight
  int entry = 0;         // index of stage 0's forwards

  template <class Listing>
  constexpr listed_works(Listing const& what, plan const& into, stages_by_rank const& placed)
      : families(what.work == work_graph::split_backward ? 3 : 2),
        work(families * into.stages, zeroed),
        ready(families * into.stages),
        room(families * into.stages) {
    bool const split = families == 3;
    kind const kinds[3] = {kind::forward, gradient_kind(split), kind::backward_weight};
    double const length[3] = {what.times.forward,
                              split ? what.times.backward_input : what.times.backward_input + what.times.backward_weight,
                              what.times.backward_weight};
    int place_of[3] = {0, 0, 0};  // a family's place in the order of preference
    for (int family = 0; family < families; ++family) {
      int const preferred = what.rank_of_kind[static_cast<int>(kinds[family])];
      for (int other = 0; other < families; ++other) {
        int const to_it = what.rank_of_kind[static_cast<int>(kinds[other])];
        if (to_it < preferred || (to_it == preferred && other < family)) ++place_of[family];
      }
    }

    int const* const first = placed.first.data;
    buffer<int> index_memory(families * into.stages);
    int* const index = index_memory.data;  // index of a work in `work`, by its action's number in a step of one microbatch
    step_graph const graph(into.rank_of.data, into.stages, 1);
    for (int r = 0; r < into.size.ranks; ++r) {
      int const held = placed.held(r);
      for (int i = 0; i < held; ++i) {
        for (int family = 0; family < families; ++family) {
          // Forwards of the latest stage first, gradients of the earliest stage first.
          index[family * into.stages + placed.stage.data[first[r] + i]] =
              first[r] * families + place_of[family] * held + (family == 0 ? held - 1 - i : i);
        }
      }
    }

    std::int64_t const* const bytes = into.byte_limit > 0 ? into.stage_bytes.data : nullptr;
    for (int r = 0; r < into.size.ranks; ++r) {
      // Chunks that the rank's later stages will need while a stage's forward is in flight. For slices see `sliced_room`.
      bool const limited = into.in_flight_limit > 0 && into.size.slices == 1;
      int later = 0;
      std::int64_t later_bytes = 0;
      for (int i = first[r + 1] - 1; i >= first[r]; --i) {
        int const stage = placed.stage.data[i];
        std::int64_t const bytes_here = bytes != nullptr ? bytes[stage] : 0;
        for (int family = 0; family < families; ++family) {
          int const at = index[family * into.stages + stage];
          bool const forward = family == 0;
          listed_work& w = work.data[at];
          w.what = make_action(kinds[family], stage, 0);
          w.rank = r;
          w.length = length[family];
          w.change = forward ? 1 : family == families - 1 ? -1 : 0;
          w.bytes_change = w.change * bytes_here;
          w.bytes_room = forward && into.size.slices == 1 ? into.byte_limit - bytes_here - later_bytes : most_bytes;
          room.data[at] = forward && limited ? into.in_flight_limit - later : most_chunks;
          ready.data[at] = never;
          int const source = graph.source_of(w.what);
          if (source < 0) continue;
          listed_work& from = work.data[index[source]];
          from.feeds[from.fed++] = at;
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

/// Checks whether limits have room for the forward of a slice. A microbatch's gradients begin after the forwards of all its
/// slices. So a stage and the rank's earlier stages must leave room for a whole microbatch on each of the rank's later stages;
/// the oldest microbatch can then always continue.
class sliced_room {
 public:
  constexpr sliced_room(plan const& into, stages_by_rank const& placed)
      : into_(into), placed_(placed), held_(into.size.slices > 1 ? into.stages : 0, zeroed) {}

  /// Whether the limit has room for a forward of this stage.
  constexpr bool admits(int stage) const {
    int const slices = into_.size.slices, rank = into_.rank_of[stage];
    int const first = placed_.first.data[rank], last = placed_.first.data[rank + 1];
    int chunks = 0, later = last - first;
    std::int64_t bytes = 0, later_bytes = 0;
    for (int i = first; i < last; ++i) later_bytes += bytes_of(placed_.stage.data[i]);
    bool behind = false;
    for (int i = first; i < last; ++i) {
      int const here = placed_.stage.data[i];
      behind = behind || here == stage;
      chunks += held_.data[here] + (here == stage ? 1 : 0);
      bytes += (held_.data[here] + (here == stage ? 1 : 0)) * bytes_of(here);
      --later;
      later_bytes -= bytes_of(here);
      if (!behind) continue;
      if (into_.in_flight_limit > 0 && chunks > into_.in_flight_limit - slices * later) return false;
      if (into_.byte_limit > 0 && bytes > into_.byte_limit - slices * later_bytes) return false;
    }
    return true;
  }
  constexpr void change(int stage, int by) { held_.data[stage] += by; }

 private:
  constexpr std::int64_t bytes_of(int stage) const { return into_.byte_limit > 0 ? into_.stage_bytes[stage] : 0; }

  plan const& into_;
  stages_by_rank const& placed_;
  buffer<int> held_;  // by stage: slices in flight
};

/// The progress of a rank in list scheduling.
struct listed_progress {
  int at;  // index in `plan::actions` of the rank's next action
  int in_flight;
  std::int64_t bytes;
  bool waits;  // whether the rank waits for another rank's result
};

}  // namespace detail

}  // namespace chevron
