#pragma once

#include <string_view>

#include <chevron/csv/csv_cell.hpp>
#include <chevron/describe/table.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/step_graph.hpp>

/// \file
/// Makes a plan of PyTorch's schedule CSV. Each row is a rank; the numbers of stages and microbatches are the largest that occur
/// plus one; a stage belongs to the rank that has its actions. Own actions (X, Y, Z) are as the file's first line declares them,
/// and those that it does not declare may stand anywhere. The result is not checked yet: `check` does that.

namespace chevron {

/// The contents of a file.
enum class csv_dialect {
  compute_only,        ///< computations alone: the runtime adds communication
  communication,       ///< computations, sends and receives, for PyTorch 2.11
  communication_waits  ///< computations, sends, receives, and a wait for each send and each reduction, for PyTorch 2.15
};

/// A schedule read from CSV.
struct csv_schedule {
  csv_dialect dialect = csv_dialect::compute_only;
  /// Whether the file gathers and frees parameters: it has an UNSHARD or a RESHARD.
  bool gathers = false;
  /// The computations. If the text is no schedule, `plan.problem` is set, and the other members are meaningless.
  chevron::plan plan;
  /// With communication: the file's own instructions with their peers. CSV has no memory slots.
  owned_program program;
};

namespace detail {

constexpr plan unread(finding const& problem) {
  plan out;
  out.problem = problem;
  out.begin = buffer<int>(1, zeroed);
  return out;
}

constexpr finding csv_finding(law broken, int line, int column, char const* words) {
  return {.broken = broken, .words = words, .line = line, .column = column};
}

/// The sizes of a text, for allocating memory, and its first fault.
struct csv_sizes {
  int ranks = 0;
  int computations = 0;
  int instructions = 0;
  int stages = 0;
  int micro_batches = 0;
  int slices = 1;
  bool only_forward = true;
  own_kind own[own_kinds]{};
  csv_dialect dialect = csv_dialect::compute_only;
  bool gathers = false;
  finding problem{};
};

constexpr csv_sizes measure_csv(std::string_view text) {
  csv_sizes out;
  int empty_line = 0, empty_column = 0;
  int largest_line = 1, largest_column = 1;  // place of the last number that increased the number of stages or microbatches
  int in_row = 0;
  bool sliced = false;
  csv_scanner scan(text);
  for (int k = 0; k < own_kinds; ++k) out.own[k] = scan.own(k);
  if (scan.problem()) {
    out.problem = scan.problem();
    return out;
  }
  while (!scan.done()) {
    csv_cell const cell = scan.next();
    if (scan.problem()) {
      out.problem = scan.problem();
      return out;
    }
    if (cell.empty && empty_line == 0) empty_line = scan.line(), empty_column = cell.column;
    if (!cell.empty) {
      if (out.instructions == max_csv_actions) {
        out.problem =
            csv_finding(law::description, scan.line(), cell.column, "more than 33554432 actions: too many for one schedule");
        return out;
      }
      ++out.instructions;
      if (cell.extra == csv_extra::unshard || cell.extra == csv_extra::reshard) out.gathers = true;
      if (cell.extra == csv_extra::wait_reduce_gradients || (cell.is_instruction() && is_wait(cell.what))) {
        out.dialect = csv_dialect::communication_waits;
      } else if (!cell.computes() && out.dialect == csv_dialect::compute_only) {
        out.dialect = csv_dialect::communication;
      }
    }
    if (cell.is_instruction() && cell.what != kind::reduce_gradients) {
      bool const first = out.instructions == 1;
      if (!first && sliced != (cell.slice >= 0)) {
        out.problem = csv_finding(law::description, scan.line(), cell.column,
                                  "some actions name a slice, such as 2F0.1, and some do not: either all do or none does");
        return out;
      }
      sliced = cell.slice >= 0;
      if (cell.slice >= out.slices) out.slices = cell.slice + 1;
    }
    if (cell.computes()) {
      ++out.computations;
      ++in_row;
      if (cell.stage >= out.stages || cell.micro_batch >= out.micro_batches)
        largest_line = scan.line(), largest_column = cell.column;
      if (cell.stage >= out.stages) out.stages = cell.stage + 1;
      if (cell.micro_batch >= out.micro_batches) out.micro_batches = cell.micro_batch + 1;
      if (cell.what != kind::forward) out.only_forward = false;
      if (is_own(cell.what)) out.own[own_number(cell.what)].declared = true;
    }
    if (scan.row_ended()) {
      if (in_row == 0) {
        out.problem = csv_finding(law::description, scan.line(), 1,
                                  "this line has no computation: each line is a rank, and each rank has a stage");
        return out;
      }
      if (++out.ranks > max_csv_ranks) {
        out.problem =
            csv_finding(law::description, scan.line(), 1, "more than 1024 lines: each is a rank, and there can be no more");
        return out;
      }
      in_row = 0;
    }
  }
  if (out.ranks == 0) {
    out.problem = csv_finding(law::description, 1, 1,
                              "nothing is here: wanted is a line of actions for each rank, such as 0F0,0F1,0B0,0B1");
  } else if (out.dialect != csv_dialect::compute_only && empty_line > 0) {
    out.problem = csv_finding(law::description, empty_line, empty_column,
                              "an empty cell: with communication in the file there are no idle steps");
  } else if (out.slices > max_micro_batches / out.micro_batches) {
    out.problem = csv_finding(law::shape, largest_line, largest_column,
                              "with this number there are more than 65535 microbatches times slices");
  } else if (out.stages > out.computations / (out.micro_batches * out.slices)) {
    // Reported before memory is allocated, so that one absurd number costs nothing.
    out.problem =
        csv_finding(law::complete, largest_line, largest_column,
                    "with this number there are more stages times microbatches than the file has computations: each stage "
                    "needs an F for each microbatch, both counted from 0 without a gap");
  }
  return out;
}

}  // namespace detail

/// Reads a schedule. Allocates memory only after the whole text has been scanned.
constexpr csv_schedule read_csv(std::string_view text) {
  csv_schedule out;
  detail::csv_sizes const sizes = detail::measure_csv(text);
  out.dialect = sizes.dialect;
  out.gathers = sizes.gathers;
  if (sizes.problem) {
    out.plan = detail::unread(sizes.problem);
    return out;
  }
  plan& made = out.plan;
  made.size = {sizes.ranks, sizes.micro_batches, 0, sizes.slices};
  made.stages = sizes.stages;
  made.forward_only = sizes.only_forward;
  for (int k = 0; k < own_kinds; ++k) made.own[k] = sizes.own[k];
  made.actions = buffer<action>(sizes.computations);
  made.begin = buffer<int>(sizes.ranks + 1);
  bool const lowered = sizes.dialect != csv_dialect::compute_only;
  buffer<instruction> instructions(lowered ? sizes.instructions : 0);
  buffer<int> begin(sizes.ranks + 1);
  int computations = 0, filled = 0, rank = 0;
  made.begin.data[0] = begin.data[0] = 0;
  csv_scanner scan(text, sizes.slices);
  while (!scan.done()) {
    csv_cell const cell = scan.next();
    if (cell.computes()) made.actions.data[computations++] = cell.as_action();
    if (lowered && cell.is_instruction()) instructions.data[filled++] = {cell.as_action(), no_peer, no_slot, no_slot, no_slot};
    if (scan.row_ended()) {
      ++rank;
      made.begin.data[rank] = computations;
      begin.data[rank] = filled;
    }
  }
  detail::place_by_actions(made);
  if (!lowered) return out;

  // Fills in the peer of each message; `check_messages` reports a message without one.
  step_graph const graph(made);
  for (int i = 0; i < filled; ++i) {
    instruction& one = instructions.data[i];
    if (is_compute(one.op.kind)) continue;
    if (int const other = graph.other_end(one.op); other >= 0) one.peer = made.rank_of.data[other];
  }
  out.program.source = made;
  out.program.instructions = static_cast<buffer<instruction>&&>(instructions);
  out.program.begin = static_cast<buffer<int>&&>(begin);
  out.program.slots = buffer<slot_counts>(sizes.ranks, zeroed);
  return out;
}

}  // namespace chevron
