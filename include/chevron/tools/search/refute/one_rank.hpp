#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <chevron/tools/search/refute/integer_durations.hpp>

/// \file
/// Decides whether one rank can do the rest of its work in time.

namespace chevron::detail {

/// Schedules one rank's remaining actions as if they could be interrupted: always runs the ready action with the earliest
/// latest end, which meets all latest ends if any schedule does (Jackson 1955). So if `in_time` is false, every order fails.
/// Starts and ends ascend along a chain.
class one_rank {
 public:
  /// The actions of a chain from index `next` to before `stop`.
  struct chain {
    int next, stop;
    whole_time left;  ///< time that the action at `next` still needs
  };

  /// \param start, takes, end of each action: earliest start, duration, latest end
  /// \param latest the latest end of any action
  /// \param chains the rest of the work; changed
  /// \param work reduced by 3 for each chain in each step
  static bool in_time(std::vector<chain>& chains, whole_time const* start, whole_time const* takes, whole_time const* end,
                      whole_time latest, std::int64_t& work) {
    std::size_t left = 0;
    for (chain const& one : chains) {
      if (one.next < one.stop) chains[left++] = one;
    }
    chains.resize(left);
    for (chain& one : chains) one.left = takes[one.next];
    whole_time now = 0;
    while (!chains.empty()) {
      work -= 3 * static_cast<std::int64_t>(chains.size());
      chain* first = nullptr;
      whole_time first_end = 0, soonest = far;
      for (chain& one : chains) {
        whole_time const ends = end[one.next], from = start[one.next];
        if (from > now) {
          soonest = std::min(soonest, from);
        } else if (first == nullptr || ends < first_end) {
          first = &one;
          first_end = ends;
        }
      }
      if (first == nullptr) {
        now = soonest;
        continue;
      }
      whole_time until = now + first->left;
      for (chain const& one : chains) {
        whole_time const from = start[one.next];
        if (from > now && from < until && end[one.next] < first_end) until = from;
      }
      first->left -= until - now;
      now = until;
      if (first->left > 0) continue;
      if (now > std::min(first_end, latest)) return false;
      if (++first->next == first->stop) {
        *first = chains.back();
        chains.pop_back();
      } else {
        first->left = takes[first->next];
      }
    }
    return true;
  }

 private:
  static constexpr whole_time far = whole_time{1} << 61;
};

}  // namespace chevron::detail
