#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <chevron/show/figures.hpp>
#include <chevron/show/picture.hpp>
#include <chevron/show/picture_messages.hpp>
#include <chevron/show/svg.hpp>

/// \file
/// Chunks in flight over time as SVG: a row a rank, on the same axis as the timeline that `svg` draws at the same width.

namespace chevron::show {

inline std::string in_flight_svg(picture const& p, svg_style const& style = {}) {
  using detail::drawing;
  figures const numbers = figures_of(p);
  double const margin = 20;
  double const left = 72;
  double const right = style.width - margin - 4;
  double const row = p.rows <= 16 ? 30 : 18;
  double const pitch = row + 8;
  double const zero = first_start(p);
  double length = 0;
  for (box const& b : p.boxes) length = std::max(length, b.end - zero);
  double const per_unit = length > 0 ? (right - left) / length : 1;
  int most = 1;
  for (int peak : numbers.peak_in_flight) most = std::max(most, peak);

  // A staircase a row, closed along its base line.
  std::vector<std::string> stairs(static_cast<std::size_t>(std::max(p.rows, 0)));
  std::vector<double> level(stairs.size());
  auto const base = [&](int r) { return margin + r * pitch + row; };
  for (in_flight_point const& now : in_flight_over_time(p)) {
    std::size_t const r = static_cast<std::size_t>(now.rank);
    double const x = left + (now.time - zero) * per_unit;
    double const y = base(now.rank) - row * now.chunks / most;
    if (stairs[r].empty()) stairs[r] = "M" + drawing::at(x) + " " + drawing::at(base(now.rank));
    stairs[r] += "H" + drawing::at(x) + "V" + drawing::at(y);
  }
  drawing d;
  for (int r = 0; r < p.rows; ++r) {
    std::size_t const at = static_cast<std::size_t>(r);
    d.rect(left, base(r) - row, numbers.makespan * per_unit, row, "fill=\"#f3f5f8\"");
    if (!stairs[at].empty()) {
      d.out += "<path class=\"in-flight\" d=\"" + stairs[at] + "V" + drawing::at(base(r)) + "Z\" fill=\"#9cc0f2\"/>\n";
    }
    d.text(margin, base(r) - row / 2 + (p.rows <= 16 ? -1 : 4), "rank " + std::to_string(r));
    if (p.rows <= 16) d.text(margin, base(r) - 2, "peak " + std::to_string(numbers.peak_in_flight[at]), "font-size=\"10\"");
  }
  double const bottom = base(std::max(p.rows - 1, 0)) + 6;
  double const step = axis_step(length, (right - left) / 75);
  for (int i = 0; length > 0 && i * step <= length * (1 + 1e-9); ++i) {
    d.text(left + i * step * per_unit, bottom + 12, number(i * step), "font-size=\"11\" text-anchor=\"middle\"");
  }
  std::string const size = std::to_string(style.width) + " " + drawing::at(bottom + margin);
  return "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + size +
         "\" role=\"img\">\n<title>chunks in flight over time</title>\n"
         "<g font-family=\"system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\" font-size=\"12\" "
         "fill=\"#5b6472\">\n" +
         d.out + "</g>\n</svg>\n";
}

}  // namespace chevron::show
