#pragma once

#include <string>
#include <vector>

#include <chevron/lower/gathers.hpp>
#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/step_graph.hpp>

/// \file
/// Schedules as CSV in PyTorch's notation: a row for each rank, no header, but a first line that declares the plan's own actions
/// (X, Y, Z; csv_cell.hpp), if it has any; cells such as `3F0`, a fused pair as
/// `(0F7;7B3)OVERLAP_F_B`; with communication also `3SEND_F0`.

namespace chevron::show {

/// Whether idle time is written to the file.
enum class idle_cells {
  left_out,  ///< each row is the rank's list of actions
  written    ///< an empty cell for each step in which the rank waits, if every action takes one step
};

namespace detail {

/// The number of a list's actions that run as one at this position: 2 at the F of a fused pair, else 1.
constexpr int actions_at(plan_view const& plan, int rank, int position) {
  return plan.at(rank, position).fused != 0 && position + 1 < plan.length(rank) ? 2 : 1;
}

/// The cell for the action or fused pair at this position.
inline std::string cell_at(plan_view const& plan, int rank, int position) {
  action const a = plan.at(rank, position);
  if (actions_at(plan, rank, position) == 1) return to_text(a, plan.size.slices).str();
  return to_text(fused_pair{a, plan.at(rank, position + 1)}, plan.size.slices).str();
}

/// The first line of a file, which declares the plan's own actions: `# own actions: X after=W every`; empty if there are none.
inline std::string own_line(plan_view const& plan) {
  std::string out;
  for (int k = 0; k < own_kinds; ++k) {
    own_kind const& one = plan.own[k];
    if (!one.declared) continue;
    auto const kinds = [](char const* word, std::uint8_t bits) {
      std::string letters;
      for (int i = 0; i < compute_kinds; ++i) {
        if ((bits & kind_bit(static_cast<kind>(i))) != 0) letters += letters_of(static_cast<kind>(i));
      }
      return letters.empty() ? letters : word + letters;
    };
    out += (out.empty() ? "# own actions: " : ", ") +
           std::string(letters_of(static_cast<kind>(static_cast<int>(kind::own_x) + k))) + kinds(" after=", one.after) +
           kinds(" before=", one.before) + (one.every ? " every" : "");
  }
  return out.empty() ? out : out + "\n";
}

/// The results computed so far while a plan is simulated step by step.
class made_so_far {
 public:
  explicit made_so_far(plan_view const& plan) : plan_(plan), graph_(plan), made_(static_cast<std::size_t>(graph_.results())) {}

  /// Whether the inputs of an action have been computed.
  bool ready(action a) const { return is_made(graph_.needs(a)) && is_made(graph_.needs_of_cell(a)); }
  /// Whether the inputs of the action, or of both halves of the pair, at this position have been computed.
  bool ready(int rank, int position) const {
    bool all = true;
    for (int i = 0; i < actions_at(plan_, rank, position); ++i) all = all && ready(plan_.at(rank, position + i));
    return all;
  }
  void make(action a) {
    if (int const result = graph_.makes(a); result >= 0) made_[static_cast<std::size_t>(result)] = true;
  }

 private:
  bool is_made(int result) const { return result < 0 || made_[static_cast<std::size_t>(result)]; }

  plan_view plan_;
  step_graph graph_;
  std::vector<bool> made_;  // by result: whether it has been computed
};

}  // namespace detail

/// A plan as CSV. PyTorch's `compute_only` loader accepts files with and without idle cells. With `idle_cells::written` each
/// column is one step in time; the rows of deadlocked ranks end at the deadlock.
inline std::string csv(plan_view const& plan, idle_cells idle = idle_cells::left_out) {
  int const ranks = plan.size.ranks;
  std::vector<std::string> rows(static_cast<std::size_t>(ranks));
  std::vector<int> cells(static_cast<std::size_t>(ranks));
  auto const add = [&](int rank, std::string const& cell) {
    std::size_t const r = static_cast<std::size_t>(rank);
    rows[r] += (cells[r]++ > 0 ? "," : "") + cell;
  };
  // Simulates step by step: where idle time is written, an action runs in the first step after the steps of its inputs.
  detail::made_so_far made(plan);
  std::vector<int> next(static_cast<std::size_t>(ranks));
  std::vector<int> waiting(static_cast<std::size_t>(ranks));  // empty cells not written yet: no row ends in them
  for (bool moved = true; moved;) {
    moved = false;
    std::vector<action> ran;
    for (int r = 0; r < ranks; ++r) {
      int& i = next[static_cast<std::size_t>(r)];
      if (i == plan.length(r)) continue;
      int& empty = waiting[static_cast<std::size_t>(r)];
      if (idle == idle_cells::written && !made.ready(r, i)) {
        ++empty;
        continue;
      }
      for (; empty > 0; --empty) add(r, "");
      add(r, detail::cell_at(plan, r, i));
      for (int const stop = i + detail::actions_at(plan, r, i); i < stop; ++i) ran.push_back(plan.at(r, i));
      moved = true;
    }
    for (action a : ran) made.make(a);
  }
  std::string out = detail::own_line(plan);
  for (std::string const& row : rows) out += row + "\n";
  return out;
}

/// Whether a file with communication contains the waits for sends and reductions.
enum class csv_waits {
  left_out,  ///< for PyTorch 2.11
  written    ///< for PyTorch 2.15: a WAIT_SEND_F or WAIT_SEND_B for each send, a WAIT_REDUCE_GRAD for each reduction
};

/// A program as CSV with communication (PyTorch's `compute_comms`), without slots, peers and the optimizer's step.
///
/// A receive is written at the step at which its message is sent, as in PyTorch's own files, whose dry run blocks in a receive
/// until the send. So one common order of all rows exists in which each action's inputs come first, even if every message
/// blocks.
/// \param gathers the UNSHARD and RESHARD of each rank, from `fewest_gathers`; empty: none. A RESHARD is written before
///                the rank's next computation, after the stage's REDUCE_GRAD
inline std::string csv_with_communication(program_view const& program, csv_waits waits, gather_plan const& gathers = {}) {
  plan_view const& plan = program.plan;
  int const ranks = plan.size.ranks;
  std::vector<std::string> rows(static_cast<std::size_t>(ranks));
  auto const add = [&](int rank, std::string const& cell) {
    std::string& row = rows[static_cast<std::size_t>(rank)];
    row += (row.empty() ? "" : ",") + cell;
  };
  int const slices = plan.size.slices;
  detail::made_so_far made(plan);
  std::vector<int> next(static_cast<std::size_t>(ranks));      // by rank: index in the program
  std::vector<int> computed(static_cast<std::size_t>(ranks));  // by rank: index in the plan, whose order the program has
  std::vector<int> reducing(static_cast<std::size_t>(ranks), -1);
  auto const wait_for_reduction = [&](int rank) {
    int& stage = reducing[static_cast<std::size_t>(rank)];
    if (waits == csv_waits::written && stage >= 0) add(rank, std::to_string(stage) + "WAIT_REDUCE_GRAD");
    stage = -1;
  };
  std::vector<std::size_t> gathered(static_cast<std::size_t>(ranks));  // by rank: the events that are written
  // Writes the events up to those before the computation at `position`.
  auto const gather_until = [&](int rank, int position) {
    if (gathers.of_rank.empty()) return;
    std::vector<gather_event> const& events = gathers.of_rank[static_cast<std::size_t>(rank)];
    for (std::size_t& i = gathered[static_cast<std::size_t>(rank)]; i < events.size(); ++i) {
      gather_event const& one = events[i];
      if (one.position > position || (one.position == position && !one.gathers)) break;
      add(rank, std::to_string(one.stage) + (one.gathers ? "UNSHARD" : "RESHARD"));
    }
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int r = 0; r < ranks; ++r) {
      // In each turn one computation or fused pair runs, with the messages and reductions around it.
      bool ran = false;
      for (int& i = next[static_cast<std::size_t>(r)]; i < program.length(r); ++i) {
        instruction const& one = program.at(r, i);
        action const a = one.op;
        if (is_compute(a.kind)) {
          int& position = computed[static_cast<std::size_t>(r)];
          if (ran || !made.ready(r, position)) break;
          ran = true;
          gather_until(r, position);
          add(r, detail::cell_at(plan, r, position));
          int const stop = position + detail::actions_at(plan, r, position);
          i += stop - position - 1;  // the second half of a pair is the next instruction
          for (; position < stop; ++position) made.make(plan.at(r, position));
        } else if (is_send(a.kind)) {
          add(r, to_text(a, slices).str());
          add(one.peer, to_text(chevron::detail::receive_of(a), slices).str());
        } else if (is_wait(a.kind)) {
          if (waits == csv_waits::written) add(r, to_text(a, slices).str());
        } else if (a.kind == kind::reduce_gradients) {
          wait_for_reduction(r);  // at most one reduction of a rank runs at a time
          add(r, to_text(a, slices).str());
          reducing[static_cast<std::size_t>(r)] = static_cast<int>(a.stage);
        }
        moved = true;
      }
    }
  }
  std::string out = detail::own_line(plan);
  for (int r = 0; r < ranks; ++r) {
    gather_until(r, plan.length(r));
    wait_for_reduction(r);
    out += rows[static_cast<std::size_t>(r)] + "\n";
  }
  return out;
}

}  // namespace chevron::show
