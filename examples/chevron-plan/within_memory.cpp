#include <deque>
#include <optional>

#include "within_memory.hpp"

namespace plan_program {

using namespace chevron;

std::optional<plan> brought_within(plan_view const& from, footprint_view const& takes, std::int64_t memory) {
  plan out = copy_of(from);
  int filled = 0;
  for (int r = 0; r < from.size.ranks; ++r) {
    footprint_changes const changes{takes, from.forward_only};
    std::int64_t held = static_bytes(from, takes, r);
    std::deque<action> waiting;
    auto const runs = [&](action a) {
      std::int64_t after = held;
      if (changes(a, after) > memory) return false;
      held = after;
      out.actions.data[filled++] = a;
      return true;
    };
    for (int i = from.begin[r]; i < from.begin[r + 1]; ++i) {
      action const a = from.actions[i];
      if (a.kind == kind::forward) {
        if (!waiting.empty() || !runs(a)) waiting.push_back(a);
        continue;
      }
      if (!runs(a)) return std::nullopt;
      while (!waiting.empty() && runs(waiting.front())) waiting.pop_front();
    }
    if (!waiting.empty()) return std::nullopt;
  }
  out.in_flight_limit = 0;
  if (check(out)) return std::nullopt;
  return out;
}

chunk_range chunks_within(plan_view const& placed, footprint_view const& takes, std::int64_t memory) {
  constexpr std::int64_t many = 1'000'000'000;
  std::int64_t safe = many, last = 0;
  chunk_range out;
  for (int r = 0; r < placed.size.ranks; ++r) {
    std::int64_t largest = 1, smallest = many << 30, while_backward = 0;
    for (int s = 0; s < placed.stages; ++s) {
      if (placed.rank_of[s] != r) continue;
      std::int64_t const each = std::max<std::int64_t>(takes.after_forward(s), 1), kept = takes.kept[s];
      // I may leave more than F did, with gradients for W; a recomputed backward stays whole.
      std::int64_t const more = takes.is_recomputed(s) ? each : std::max(each, kept);
      largest = std::max(largest, more);
      smallest = std::min(smallest, each);
      while_backward = std::max(while_backward, takes.activation[s] - each);
      auto const share = [&](std::int64_t of) {
        return std::min(1.0, std::max(1e-3, static_cast<double>(kept) / static_cast<double>(of)));
      };
      out.most_kept = std::max(out.most_kept, share(more));
      out.least_kept = std::min(out.least_kept, share(each));
    }
    std::int64_t const room = memory - static_bytes(placed, takes, r);
    safe = std::min(safe, (room - while_backward) / largest);
    last = std::max(last, room / smallest);
  }
  out.safe = static_cast<int>(std::clamp<std::int64_t>(safe, 0, many));
  out.last = static_cast<int>(std::clamp<std::int64_t>(last, 0, many));
  return out;
}

}  // namespace plan_program
