#pragma once

#include <string>
#include <vector>

#include <chevron/lower/program.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Schedules as CSV in PyTorch's notation: a row a rank, no header, cells such as `3F0`; with communication `3SEND_F0` too.

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

/// Whether a file with communication says where sends and reductions are waited for.
enum class csv_waits {
  left_out,  ///< as PyTorch 2.11 reads it
  written    ///< as PyTorch 2.15 reads it: one WAIT_SEND_F or WAIT_SEND_B a send, one WAIT_REDUCE_GRAD a reduction
};

/// A program as CSV with communication (PyTorch's `compute_comms`), without slots, peers and the optimizer's step.
///
/// Receives stand where their message is sent, as in PyTorch's own files: its dry run lets a receive block until then. So all
/// rows together can be played in one order in which each action's needs are met before it, even if every message blocks.
inline std::string csv_with_communication(program_view const& program, csv_waits waits) {
  plan_view const& plan = program.plan;
  int const ranks = plan.size.ranks;
  std::size_t const micro_batches = static_cast<std::size_t>(plan.size.micro_batches);
  std::size_t const cells = static_cast<std::size_t>(plan.stages) * micro_batches;
  std::vector<std::string> rows(static_cast<std::size_t>(ranks));
  auto const add = [&](int rank, std::string const& cell) {
    std::string& row = rows[static_cast<std::size_t>(rank)];
    row += (row.empty() ? "" : ",") + cell;
  };
  auto const name = [](kind what, int stage, int micro_batch) { return to_text(make_action(what, stage, micro_batch)).str(); };
  std::vector<bool> forward(cells), gradient(cells);
  std::vector<int> next(static_cast<std::size_t>(ranks));
  std::vector<int> reducing(static_cast<std::size_t>(ranks), -1);
  auto const ready = [&](action a) {
    std::size_t const cell = static_cast<std::size_t>(a.stage) * micro_batches + a.micro_batch;
    if (a.what == kind::forward) return a.stage == 0 || forward[cell - micro_batches];
    if (a.what == kind::backward_weight) return true;
    return static_cast<int>(a.stage) + 1 == plan.stages || gradient[cell + micro_batches];
  };
  auto const wait_for_reduction = [&](int rank) {
    int& stage = reducing[static_cast<std::size_t>(rank)];
    if (waits == csv_waits::written && stage >= 0) add(rank, std::to_string(stage) + "WAIT_REDUCE_GRAD");
    stage = -1;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (int r = 0; r < ranks; ++r) {
      // One computation a turn, with all that belongs to it.
      bool computed = false;
      for (int& i = next[static_cast<std::size_t>(r)]; i < program.length(r); ++i) {
        instruction const& one = program.at(r, i);
        action const a = one.what;
        int const stage = static_cast<int>(a.stage);
        int const m = static_cast<int>(a.micro_batch);
        if (is_compute(a.what)) {
          if (computed || !ready(a)) break;
          computed = true;
          std::size_t const cell = static_cast<std::size_t>(stage) * micro_batches + static_cast<std::size_t>(m);
          if (a.what == kind::forward) forward[cell] = true;
          if (a.what == kind::backward || a.what == kind::backward_input) gradient[cell] = true;
          add(r, to_text(a).str());
        } else if (a.what == kind::send_forward || a.what == kind::send_backward) {
          bool const up = a.what == kind::send_forward;
          add(r, to_text(a).str());
          add(one.peer, name(up ? kind::receive_forward : kind::receive_backward, up ? stage + 1 : stage - 1, m));
        } else if (a.what == kind::wait_send_forward || a.what == kind::wait_send_backward) {
          if (waits == csv_waits::written) add(r, to_text(a).str());
        } else if (a.what == kind::reduce_gradients) {
          wait_for_reduction(r);  // at most one is under way
          add(r, to_text(a).str());
          reducing[static_cast<std::size_t>(r)] = stage;
        }
        moved = true;
      }
    }
  }
  std::string out;
  for (int r = 0; r < ranks; ++r) {
    wait_for_reduction(r);
    out += rows[static_cast<std::size_t>(r)] + "\n";
  }
  return out;
}

}  // namespace chevron::show
