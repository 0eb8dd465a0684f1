#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <chevron/tools/show/picture.hpp>
#include <chevron/tools/show/svg_drawing.hpp>

/// \file
/// The progress of a failed run, drawn on its plan's timeline: finished and unfinished actions, and the waits of ranks.

namespace chevron::show::detail {

inline constexpr char const* alarm = "#c0182b";
inline constexpr char const* faint_text = "#9aa3b0";

/// Whether the box for which all waiting ranks wait in the end is on this row.
inline bool is_awaited_row(picture const& p, int row) {
  return p.awaited >= 0 && p.boxes[static_cast<std::size_t>(p.awaited)].rank == row;
}

/// The rectangle of a box.
struct place {
  double x = 0, y = 0, width = 0, height = 0;
};

inline bool is_faint(progress so_far) { return so_far == progress::not_begun || so_far == progress::waiting; }

/// The attributes of a box's rectangle besides its colour.
inline std::string look_of(progress so_far) {
  if (is_faint(so_far)) return " fill-opacity=\"0.24\"";
  return so_far == progress::under_way ? " fill-opacity=\"0.55\"" : "";
}

/// Slanting lines over a box. They are drawn one by one, since not every viewer supports SVG patterns.
inline std::string hatching(place const& at, std::string const& colour) {
  drawing lines;
  for (double from = at.x - at.height + 3; from < at.x + at.width; from += 6) {
    // From the lower edge at `from` to the upper edge, cut off at both sides of the box.
    double const x1 = std::max(from, at.x), x2 = std::min(from + at.height, at.x + at.width);
    if (x1 >= x2) continue;
    lines.line(x1, at.y + at.height - (x1 - from), x2, at.y + at.height - (x2 - from), "");
  }
  return "<g stroke=\"" + colour + "\" stroke-width=\"1.2\" stroke-opacity=\"0.55\">\n" + lines.out + "</g>\n";
}

inline std::string outline(place const& at, double beyond, std::string const& more) {
  drawing d;
  d.rect(at.x - beyond, at.y - beyond, at.width + 2 * beyond, at.height + 2 * beyond, "fill=\"none\" rx=\"3\" " + more);
  return d.out;
}

/// The marks of progress on a box.
inline std::string marks_on(place const& at, progress so_far) {
  if (so_far == progress::under_way) return hatching(at, "#1f2630") + outline(at, -0.5, "stroke=\"#1f2630\" stroke-width=\"1\"");
  if (so_far != progress::waiting) return "";
  return outline(at, -0.75, std::string("stroke=\"") + alarm + "\" stroke-width=\"1.5\" stroke-dasharray=\"4 2.5\"");
}

/// An arrow from a waiting box to the box that it waits for.
inline std::string wait_arrow(place const& from, place const& to) {
  double const x1 = from.x + std::min(5.0, from.width / 2), y1 = from.y + from.height / 2;
  bool const down = to.y > from.y;
  double const x2 = to.x + to.width - std::min(5.0, to.width / 2), y2 = down ? to.y - 2.5 : to.y + to.height + 2.5;
  double const length = std::max(1e-9, std::hypot(x2 - x1, y2 - y1));
  double const ux = (x2 - x1) / length, uy = (y2 - y1) / length;
  drawing d;
  d.line(x1, y1, x2 - 5 * ux, y2 - 5 * uy, std::string("stroke=\"") + alarm + "\" stroke-width=\"1.6\"");
  d.out += "<circle cx=\"" + drawing::at(x1) + "\" cy=\"" + drawing::at(y1) + "\" r=\"2.6\" fill=\"" + alarm + "\"/>\n";
  auto const point = [&](double along, double across) {
    return drawing::at(x2 - along * ux - across * uy) + "," + drawing::at(y2 - along * uy + across * ux);
  };
  d.out += "<polygon points=\"" + point(0, 0) + " " + point(8, 3.6) + " " + point(8, -3.6) + "\" fill=\"" + alarm + "\"/>\n";
  return d.out;
}

/// The marks of progress over all boxes.
/// \param places the boxes' rectangles
inline std::string progress_marks(picture const& p, std::vector<place> const& places) {
  std::string out = "<g class=\"progress\">\n";
  for (std::size_t i = 0; i < p.boxes.size() && i < places.size(); ++i) out += marks_on(places[i], p.boxes[i].so_far);
  if (p.awaited >= 0 && static_cast<std::size_t>(p.awaited) < places.size()) {
    out += outline(places[static_cast<std::size_t>(p.awaited)], 1.5,
                   std::string("class=\"awaited\" stroke=\"") + alarm + "\" stroke-width=\"3\"");
  }
  for (auto const& [from, to] : p.waits) {
    out += wait_arrow(places[static_cast<std::size_t>(from)], places[static_cast<std::size_t>(to)]);
  }
  return out + "</g>\n";
}

/// The legend of the marks of progress, in one line.
inline std::string progress_legend(picture const& p, double x, double y, double size) {
  auto const has = [&](progress so_far) {
    return std::any_of(p.boxes.begin(), p.boxes.end(), [&](box const& b) { return b.so_far == so_far; });
  };
  drawing d;
  auto const words = [&](std::string const& what) {
    d.text(x + 34, y, what, "fill=\"#5b6472\"");
    x += 34 + text_width(what, size) + 22;
  };
  auto const key = [&] { return place{x, y - 10, 28, 12}; };
  for (auto const& [so_far, meaning] :
       {std::pair{progress::done, "done"}, std::pair{progress::under_way, "under way"},
        std::pair{progress::waiting, "waited; arrow: awaited action"}, std::pair{progress::not_begun, "never begun"}}) {
    if (!has(so_far)) continue;
    d.rect(key().x, key().y, key().width, key().height,
           "class=\"key\" rx=\"2\" fill=\"" + std::string(ink_of(kind::forward, 0, 1).fill) + "\"" + look_of(so_far));
    d.out += marks_on(key(), so_far);
    words(meaning);
  }
  if (p.awaited < 0) return d.out;
  d.out += outline(key(), 0, std::string("stroke=\"") + alarm + "\" stroke-width=\"3\"");
  words("all waited for this");
  return d.out;
}

}  // namespace chevron::show::detail
