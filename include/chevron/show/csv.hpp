#pragma once

#include <string>
#include <vector>

#include <chevron/plan/plan.hpp>

/// \file
/// Schedules as CSV in PyTorch's notation for compute only: a row a rank, no header, cells such as `3F0`.

namespace chevron::show {

/// Whether idle time is written.
enum class idle_cells {
  left_out,  ///< each row is the rank's list, nothing else
  written    ///< an empty cell a step in which the rank waits, where every action takes one step
};

/// A plan as CSV. PyTorch's `compute_only` loader takes both forms. With `idle_cells::written` the columns line up in time; ranks
/// that can never go on (a deadlock) end where they stop.
inline std::string csv(plan_view const& plan, idle_cells idle = idle_cells::left_out) {
  int const ranks = plan.size.ranks;
  std::vector<std::string> rows(static_cast<std::size_t>(ranks));
  std::vector<int> cells(static_cast<std::size_t>(ranks));
  auto const add = [&](int rank, std::string const& cell) {
    std::size_t const r = static_cast<std::size_t>(rank);
    rows[r] += (cells[r]++ > 0 ? "," : "") + cell;
  };
  if (idle == idle_cells::left_out) {
    for (int r = 0; r < ranks; ++r) {
      for (int i = 0; i < plan.length(r); ++i) add(r, to_text(plan.at(r, i)).str());
    }
  } else {
    // Step by step: an action runs in the first step in which what it needs ran before.
    int const micro_batches = plan.size.micro_batches;
    std::size_t const count = static_cast<std::size_t>(plan.stages) * static_cast<std::size_t>(micro_batches);
    std::vector<bool> forward(count), backward(count);
    std::vector<int> next(static_cast<std::size_t>(ranks));
    auto const at = [&](int stage, action a) {
      return static_cast<std::size_t>(stage * micro_batches + static_cast<int>(a.micro_batch));
    };
    auto const ready = [&](action a) {
      int const s = static_cast<int>(a.stage);
      if (a.what == kind::forward) return s == 0 || forward[at(s - 1, a)];
      if (a.what == kind::backward_weight) return static_cast<bool>(backward[at(s, a)]);
      return forward[at(s, a)] && (s + 1 == plan.stages || backward[at(s + 1, a)]);
    };
    std::vector<int> waiting(static_cast<std::size_t>(ranks));  // empty cells not yet written: none after the last action
    for (bool moved = true; moved;) {
      moved = false;
      std::vector<action> ran;
      for (int r = 0; r < ranks; ++r) {
        int& i = next[static_cast<std::size_t>(r)];
        if (i == plan.length(r)) continue;
        action const a = plan.at(r, i);
        int& empty = waiting[static_cast<std::size_t>(r)];
        if (!ready(a)) {
          ++empty;
          continue;
        }
        for (; empty > 0; --empty) add(r, "");
        add(r, to_text(a).str());
        ++i;
        ran.push_back(a);
        moved = true;
      }
      for (action a : ran) {
        if (a.what == kind::forward)
          forward[at(static_cast<int>(a.stage), a)] = true;
        else if (a.what != kind::backward_weight)
          backward[at(static_cast<int>(a.stage), a)] = true;
      }
    }
  }
  std::string out;
  for (std::string const& row : rows) out += row + "\n";
  return out;
}

}  // namespace chevron::show
