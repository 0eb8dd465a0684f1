#pragma once

#include <cstdint>
#include <string>

#include <chevron/csv/csv_gathers.hpp>
#include <chevron/csv/csv_read.hpp>
#include <chevron/lower/channel_order.hpp>
#include <chevron/lower/check_program.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/prove/check.hpp>

/// \file
/// Checks a schedule read from CSV: the laws of its plan and, if the file contains communication, the laws of its messages.
/// Also finds the line and column in the file that a finding is about.

namespace chevron {

namespace detail {

// What a rank's row has done so far for one (stage, microbatch), as bits.
inline constexpr std::uint16_t row_forward = 1, row_gradient = 2, row_done = 4;
inline constexpr int row_messages = 3;  // from this bit on, a bit for each kind from SEND_F to WAIT_SEND_B
constexpr std::uint16_t row_bit(kind what) {
  return static_cast<std::uint16_t>(1 << (row_messages + static_cast<int>(what) - static_cast<int>(kind::send_forward)));
}

/// Whether an action comes later in the rank's row than `position`.
constexpr bool follows(program_view const& program, int rank, int position, action wanted) {
  for (int i = program.begin[rank] + position + 1; i < program.begin[rank + 1]; ++i) {
    if (program.instructions[i].op == wanted) return true;
  }
  return false;
}

/// Checks one rank's row by itself: each message occurs once, is computed before it is sent, and is received before it is used.
constexpr finding check_row(program_view const& program, int rank, bool waits, std::uint16_t* seen, int* done) {
  plan_view const& plan = program.plan;
  int const micro_batches = plan.size.units();
  int const last_stage = plan.stages - 1;
  step_graph const graph(plan);
  for (int i = program.begin[rank]; i < program.begin[rank + 1]; ++i) {
    instruction const& one = program.instructions[i];
    action const a = one.op;
    int const position = i - program.begin[rank];
    int const stage = static_cast<int>(a.stage);
    int const m = static_cast<int>(a.micro_batch);
    if (stage > last_stage || m >= micro_batches || plan.rank_of[stage] != rank) {
      return misplaced(plan, program_finding(law::ids_in_range, rank, position, a));
    }
    if (a.kind == kind::reduce_gradients) {
      if (done[stage] < 0) return program_finding(law::no_duplicate, rank, position, a, " comes a second time");
      if (plan.forward_only) return program_finding(law::no_duplicate, rank, position, a, " has no place in a forward-only plan");
      for (int j = i + 1; j < program.begin[rank + 1] && done[stage] < micro_batches; ++j) {
        action const later = program.instructions[j].op;
        if (ends_cell(later.kind) && later.stage == a.stage) return program_finding(law::order, rank, position, a, "", later);
      }
      done[stage] = -1;
      continue;
    }
    std::uint16_t& cell = seen[stage * micro_batches + m];
    if (is_compute(a.kind)) {
      bool const forward = a.kind == kind::forward;
      if (action const wanted = receive_for(a); graph.comes_over(a) >= 0 && (cell & row_bit(wanted.kind)) == 0) {
        if (follows(program, rank, position, wanted)) return program_finding(law::order, rank, position, a, "", wanted);
        return program_finding(law::matched, rank, position, a, " reads a message that this rank never receives: there is no ",
                               wanted);
      }
      if (ends_cell(a.kind)) ++done[stage];
      if (graph.makes(a) >= 0) cell = static_cast<std::uint16_t>(cell | (forward ? row_forward : row_gradient));
      continue;
    }
    bool const up = a.kind == kind::send_forward || a.kind == kind::wait_send_forward || a.kind == kind::receive_backward;
    if (up ? stage == last_stage : stage == 0)
      return program_finding(law::matched, rank, position, a,
                             up ? " has no peer: no stage comes after that of " : " has no peer: no stage comes before that of ",
                             a);
    if (one.peer == rank)
      return program_finding(law::matched, rank, position, a,
                             " is a message of a rank to itself: the neighbouring stage is on this rank too and needs no ", a);
    if ((cell & row_bit(a.kind)) != 0) return program_finding(law::no_duplicate, rank, position, a, " comes a second time");
    if (is_send(a.kind)) {
      bool const forward = a.kind == kind::send_forward;
      if ((cell & (forward ? row_forward : row_gradient)) == 0) {
        action producer = beside(a, forward ? kind::forward : kind::backward);
        if (!forward && !follows(program, rank, position, producer)) producer.kind = gradient_kind(true);
        return program_finding(law::order, rank, position, a, "", producer);
      }
    }
    if (is_wait(a.kind) && (cell & row_bit(send_of_wait(a).kind)) == 0)
      return program_finding(law::order, rank, position, a, "", send_of_wait(a));
    cell = static_cast<std::uint16_t>(cell | row_bit(a.kind));
  }
  for (int i = program.begin[rank]; i < program.begin[rank + 1]; ++i) {
    action const a = program.instructions[i].op;
    int const position = i - program.begin[rank];
    std::uint16_t const cell = seen[static_cast<int>(a.stage) * micro_batches + static_cast<int>(a.micro_batch)];
    action const send = beside(a, a.kind == kind::forward ? kind::send_forward : kind::send_backward);
    if (is_compute(a.kind) && graph.crosses(a) >= 0 && (cell & row_bit(send.kind)) == 0)
      return program_finding(law::matched, rank, position, a, " makes a message that this rank never sends: there is no ", send);
    if (waits && is_send(a.kind) && (cell & row_bit(wait_for_send(a).kind)) == 0)
      return program_finding(law::matched, rank, position, a,
                             " is never waited for, though this file waits for its sends: there is no ", wait_for_send(a));
  }
  return {};
}

}  // namespace detail

/// Checks the messages of a file: each occurs once, on the right rank, two ranks send and receive in the same order, and no
/// rank waits for ever. CSV has no memory slots, so laws about slots are not checked.
/// \param program the file's program, whose plan has passed `check`
/// The messages travel over the channels of `plan_facts::channels`.
/// \param waits whether the file has a wait for each send
constexpr finding check_messages(program_view const& program, bool waits) {
  plan_view const& plan = program.plan;
  buffer<std::uint16_t> seen(plan.stages * plan.size.units(), zeroed);
  buffer<int> done(plan.stages, zeroed);
  for (int r = 0; r < plan.size.ranks; ++r) {
    if (finding const f = detail::check_row(program, r, waits, seen.data, done.data)) return f;
  }
  if (finding const f = detail::check_channels(program)) return f;
  if (finding const f = detail::check_program_progress(program); f || plan.channels.are_own()) return f;
  return check_channel_order(program, plan.channels);
}

/// Checks cells that PyTorch writes and Chevron has no instruction for (`csv_extra`): each must name a stage of its own rank.
/// Also checks that each REDUCE_GRAD has its WAIT_REDUCE_GRAD before the next REDUCE_GRAD.
/// \param read the schedule that was read from `text`, whose plan has passed `check`
/// \returns the first fault
constexpr finding check_csv_extras(csv_schedule const& read, std::string_view text) {
  csv_scanner scan(text);
  int reducing = -1;  // the stage whose reduction this rank has started and not yet waited for
  int reducing_line = 1, reducing_column = 1;
  bool const waits = read.dialect == csv_dialect::communication_waits;
  while (!scan.done()) {
    int const rank = scan.line() - scan.first_line() + (scan.row_ended() ? 1 : 0);
    csv_cell const cell = scan.next();
    char const* words = nullptr;
    if (!cell.empty && cell.extra != csv_extra::none) {
      if (cell.stage >= read.plan.stages || read.plan.rank_of.data[cell.stage] != rank)
        words = "this stage does not live on this rank";
      if (cell.extra == csv_extra::wait_reduce_gradients) {
        if (words == nullptr && reducing != cell.stage)
          words = "this wait has no reduction of its stage before it: wanted is a REDUCE_GRAD, then its WAIT_REDUCE_GRAD";
        reducing = -1;
      }
    } else if (waits && cell.is_instruction() && cell.what == kind::reduce_gradients) {
      if (reducing >= 0) words = "a second reduction before the first is waited for: wanted is a WAIT_REDUCE_GRAD between them";
      reducing = cell.stage;
      reducing_line = scan.line();
      reducing_column = cell.column;
    }
    if (words != nullptr) return detail::csv_finding(law::matched, scan.line(), cell.column, words);
    if (scan.row_ended() && reducing >= 0) {
      return detail::csv_finding(law::matched, reducing_line, reducing_column,
                                 "this reduction is never waited for: wanted is a WAIT_REDUCE_GRAD after it");
    }
  }
  return {};
}

namespace detail {

/// Finds a stage that has actions on two ranks, and reports its first action on the later rank. Checked first, since this fault
/// causes other findings.
constexpr finding check_one_rank_a_stage(plan_view const& plan) {
  for (int r = 0; r < plan.size.ranks; ++r) {
    for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
      int const home = plan.rank_of[static_cast<int>(plan.actions[i].stage)];
      if (home == r) continue;
      finding f = program_finding(law::ids_in_range, r, i - plan.begin[r], plan.actions[i],
                                  " is on the wrong rank: its stage lives on rank ");
      f.other_rank = home;
      return f;
    }
  }
  return {};
}

/// Whether a plan has as many B as W and no I: then its B is an input gradient, in an old spelling of PyTorch's.
constexpr bool spells_as_before(plan_view const& plan) {
  int by_kind[compute_kinds] = {};
  for (int i = 0; i < plan.total(); ++i) {
    if (is_compute(plan.actions[i].kind)) ++by_kind[static_cast<int>(plan.actions[i].kind)];
  }
  auto const count = [&](kind k) { return by_kind[static_cast<int>(k)]; };
  return count(gradient_kind(true)) == 0 && count(kind::backward) == count(kind::backward_weight);
}

/// The plan's first broken law. A W after a B is explained by PyTorch's old spelling where the file seems to use that.
constexpr finding check_computations(plan_view const& plan) {
  finding f = check(plan);
  if (f.broken == law::no_duplicate && f.other_position < 0 && f.what.kind == kind::backward_weight && spells_as_before(plan)) {
    f.words =
        " would add these gradients twice: this microbatch already has a B. Each B of this file has a W, so B is the old "
        "spelling "
        "of I here: write I for each B";
  }
  return f;
}

}  // namespace detail

/// The first broken law of a schedule that was read from `text`, or `law::none`.
constexpr finding check(csv_schedule const& read, std::string_view text) {
  if (read.plan.problem) return read.plan.problem;
  if (finding const f = detail::check_one_rank_a_stage(read.plan.view())) return f;
  if (finding const f = detail::check_computations(read.plan.view())) return f;
  if (read.dialect == csv_dialect::compute_only) return {};
  if (finding const f = check_csv_extras(read, text)) return f;
  if (finding const f = judge_gathers(read, text).broken) return f;
  finding f = check_messages(read.program.view(), read.dialect == csv_dialect::communication_waits);
  f.slices = read.plan.size.slices;
  return f;
}

/// A place in a text; line 0: no place.
struct csv_place {
  int line = 0;
  int column = 0;
};

/// The place of the first cell for which `wanted(cell, rank)` holds.
template <class Wanted>
constexpr csv_place find_csv_cell(std::string_view text, int slices, Wanted wanted) {
  csv_scanner scan(text, slices);
  int rank = 0;
  while (!scan.done()) {
    csv_cell const cell = scan.next();
    if (scan.problem()) break;
    if (!cell.empty && wanted(cell, rank)) return {scan.line(), cell.column};
    if (scan.row_ended()) ++rank;
  }
  return {};
}

/// The place of a finding in the text. `of_program`: a finding of `check_messages`, whose positions count messages, too.
constexpr csv_place place_of(finding const& f, std::string_view text, bool of_program) {
  if (f.line > 0) return {f.line, f.column};
  if (f.rank < 0) return {};
  if (f.position < 0) return {f.rank + csv_scanner(text).first_line(), 1};
  int step = -1;
  return find_csv_cell(text, f.slices, [&](csv_cell const& cell, int rank) {
    if (rank != f.rank || !(of_program ? cell.is_instruction() : cell.computes())) return false;
    return ++step == f.position;
  });
}

/// The text of a finding, with the places in the file of both actions that it names: `line 2, column 9: rank 1, step 2: …;
/// 1RECV_B0 is at line 2, column 17`.
inline std::string describe(finding const& f, csv_schedule const& read, std::string_view text) {
  std::string out = describe(f).str();
  if (!f || f.line > 0) return out;
  bool const of_program = !check(read.plan.view());
  auto const words = [](csv_place at) { return "line " + std::to_string(at.line) + ", column " + std::to_string(at.column); };
  if (csv_place const at = place_of(f, text, of_program); at.line > 0) out = words(at) + ": " + out;

  // The second action of the sentence.
  int const slices = read.plan.size.slices;
  csv_place second;
  std::string name;
  if (f.broken == law::no_duplicate) {
    auto const same = [&](csv_cell const& cell, int rank) {
      return rank == f.rank && cell.is_instruction() && cell.as_action() == f.what;
    };
    auto const split = [&](csv_cell const& cell, int rank) {
      return rank == f.rank && cell.computes() && cell.what != kind::forward && cell.stage == static_cast<int>(f.what.stage) &&
             cell.micro_batch == static_cast<int>(f.what.micro_batch);
    };
    bool const again = f.other_position >= 0 || of_program;
    second = again ? find_csv_cell(text, slices, same) : find_csv_cell(text, slices, split);
    name = again ? "the first" : "the other backward";
    if (read.plan.forward_only) second = {};
  } else if (f.broken == law::ids_in_range && f.other_rank >= 0) {
    second = find_csv_cell(text, slices, [&](csv_cell const& cell, int rank) {
      return rank == f.other_rank && cell.computes() && cell.stage == static_cast<int>(f.what.stage);
    });
    name = "stage " + std::to_string(f.what.stage);
  } else if (f.broken == law::order || f.broken == law::deadlock || (f.broken == law::fused_pair && f.links > 0) ||
             (f.broken == law::matched && !(f.other == f.what))) {
    second = find_csv_cell(text, slices,
                           [&](csv_cell const& cell, int) { return cell.is_instruction() && cell.as_action() == f.other; });
    name = to_text(f.other, slices).str();
  }
  if (second.line > 0) out += "; " + name + " is at " + words(second);
  return out;
}

}  // namespace chevron
