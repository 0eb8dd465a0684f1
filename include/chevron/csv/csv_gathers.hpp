#pragma once

#include <cstdint>
#include <string_view>

#include <chevron/csv/csv_read.hpp>
#include <chevron/plan/finding.hpp>

/// \file
/// Judges UNSHARD and RESHARD of a schedule read from CSV, which gather and free the sharded parameters of a stage.

namespace chevron {

/// The gathers of a file.
struct csv_gathers {
  int gathers = 0;   ///< UNSHARD of all ranks; 0: the file gathers nothing, its stages are whole at all times
  int resident = 0;  ///< the most stages of a rank that are gathered at once
  int late = 0;      ///< gathers with no computation of their rank between them and the computation that needs them, though an
                     ///< earlier computation of the rank exists
  finding broken{};  ///< the first fault
};

/// Plays the UNSHARD and RESHARD of a file. A file that has any must gather each stage before its computations, and free it
/// after them: a computation needs its stage gathered; UNSHARD a stage that is not gathered; RESHARD a stage that is gathered
/// and has computed since; no stage is gathered at the end of a row. PyTorch's runtime requires the same of stages under FSDP.
/// \param read the schedule that was read from `text`, each of whose cells names a stage of its own rank
/// \param resident the most stages of a rank that may be gathered at once; 0: any number
constexpr csv_gathers judge_gathers(csv_schedule const& read, std::string_view text, int resident = 0) {
  csv_gathers out;
  if (!read.gathers) return out;
  int const stages = read.plan.stages;
  buffer<std::uint8_t> gathered(stages, zeroed), computed(stages, zeroed);  // computed: since the stage's UNSHARD
  buffer<int> steps_before(stages, zeroed);                                 // computations of the rank before the UNSHARD
  buffer<int> line(stages, zeroed), column(stages, zeroed);                 // of the last UNSHARD
  int now = 0, steps = 0, rank = 0;
  csv_scanner scan(text, read.plan.size.slices);
  auto const fault = [&](csv_cell const& cell, char const* words, std::int64_t limit = 0) {
    out.broken = {.broken = law::resident,
                  .rank = rank,
                  .number = cell.stage,
                  .limit = limit,
                  .words = words,
                  .slices = read.plan.size.slices,
                  .line = scan.line(),
                  .column = cell.column};
  };
  while (!scan.done()) {
    csv_cell const cell = scan.next();
    int const s = cell.stage;
    if (cell.extra == csv_extra::unshard) {
      if (gathered.data[s] != 0) {
        fault(cell,
              "UNSHARD gathers a stage that is gathered already. Remedy: a RESHARD of the stage before it, or no second UNSHARD");
        return out;
      }
      gathered.data[s] = 1;
      computed.data[s] = 0;
      steps_before.data[s] = steps;
      line.data[s] = scan.line();
      column.data[s] = cell.column;
      ++out.gathers;
      if (++now > out.resident) out.resident = now;
      if (resident > 0 && now > resident) {
        fault(cell,
              "UNSHARD gathers one stage more than the rank may have gathered at once. Remedy: a RESHARD of another stage before "
              "it; the limit is ",
              resident);
        return out;
      }
    } else if (cell.extra == csv_extra::reshard) {
      if (gathered.data[s] == 0) {
        fault(cell, "RESHARD frees a stage that is not gathered. Remedy: an UNSHARD of the stage before it, or no RESHARD");
        return out;
      }
      if (computed.data[s] == 0) {
        fault(cell,
              "RESHARD frees a stage that has not computed since its UNSHARD, and PyTorch refuses to free it. Remedy: neither of "
              "the two");
        return out;
      }
      gathered.data[s] = 0;
      --now;
    } else if (cell.computes()) {
      if (gathered.data[s] == 0) {
        fault(cell, " runs while its stage is not gathered. Remedy: before it, best one computation earlier, ");
        out.broken.number = -1;
        out.broken.what = cell.as_action();
        out.broken.other = make_action(kind::unshard, s, 0);
        return out;
      }
      if (computed.data[s] == 0 && steps > 0 && steps_before.data[s] == steps) ++out.late;
      computed.data[s] = 1;
      if (!cell.fused) ++steps;  // the halves of a pair are one computation
    }
    if (!scan.row_ended()) continue;
    for (int left = 0; left < stages && now > 0; ++left) {
      if (gathered.data[left] == 0) continue;
      fault(cell,
            "UNSHARD is never freed, and the next step gathers the stage again. Remedy: a RESHARD after the stage's last "
            "computation");
      out.broken.number = left;
      out.broken.line = line.data[left];
      out.broken.column = column.data[left];
      return out;
    }
    steps = 0;
    ++rank;
  }
  return out;
}

}  // namespace chevron
