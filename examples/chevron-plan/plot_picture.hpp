#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

/// \file
/// Figures of runs as curves over steps, time or tokens.

namespace plan_program {

struct plot_point {
  double x = 0;
  double y = 0;
};

/// A figure of one run.
struct plot_curve {
  std::string name;
  std::size_t run = 0;                                  ///< its number, which chooses colour and dashes; the same in all panels
  std::vector<std::vector<plot_point>> parts;           ///< finite values without a gap between them, x rising
  std::vector<std::vector<plot_point>> behind;          ///< with smoothing: the values themselves
  std::vector<std::pair<plot_point, plot_point>> gaps;  ///< from the last value before missing steps to the next one
  std::vector<double> not_finite;                       ///< x of values that are infinite or no number
};

/// One figure of all runs, with an axis of its own.
struct plot_panel {
  std::string words;  ///< what the axis counts
  std::vector<plot_curve> curves;
};

struct plot_chart {
  std::string title, subtitle;
  std::string x_words;
  bool logarithmic = false;        ///< axes of figures; all values are then above 0
  std::vector<plot_panel> panels;  ///< from top to bottom, over one axis of x
};

/// An SVG and its size in pixels.
struct plot_drawing {
  std::string svg;
  double width = 0, height = 0;
};

/// Colours and dashes tell so many runs apart.
inline constexpr std::size_t most_runs = 32;

/// Digits with commas between groups of three from five digits on: `12,000`; decimals stay as they are.
std::string with_commas(std::string digits);

/// Panels one below the other; follows the reader's light or dark scheme. In each half pixel of the axis of x a curve keeps its
/// first, least, greatest and last value, so that no extreme is lost however many steps there are.
plot_drawing plot_picture(plot_chart const& chart);

}  // namespace plan_program
