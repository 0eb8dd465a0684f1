#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

/// \file
/// Files of metrics, as `chevron-train --metrics` and `chevron-finetune --metrics` write them: one JSON object a step.

namespace plan_program {

/// The figures of a run, by step. Steps rise.
struct metrics {
  std::string file;
  std::vector<std::string> figures;  ///< names of the file, in the order in which lines have them, without `step`
  std::vector<long> steps;
  /// By figure, then by step. Infinity: a line has null, which is how JSON spells a number that is not finite. NaN: a line lacks
  /// the figure.
  std::vector<std::vector<double>> values;
  std::vector<std::string> notes;  ///< sentences on steps that occur again, and on a last line that was cut off

  /// The index of a figure, or as many as there are figures.
  std::size_t index_of(std::string_view figure) const;
};

/// Reads a file of metrics; `-` is standard input. If a step occurs again, the run was resumed at it: the lines before it that
/// have this step or a later one do not count. A last line without its end that is no whole object is left out.
/// \throws usage naming file and line, for a file that cannot be read or has other content
metrics read_metrics(std::string const& file);

}  // namespace plan_program
