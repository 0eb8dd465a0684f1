#include <algorithm>
#include <array>
#include <cmath>

#include <chevron/tools/show/svg_drawing.hpp>

#include "fit.hpp"

namespace plan_program {
namespace {

using chevron::show::number;
using chevron::show::detail::drawing;
using chevron::show::detail::text_width;

constexpr char const* style = R"(<style>
.sheet { fill: #ffffff; } .name { fill: #1f2630; stroke: #ffffff; stroke-width: 3; paint-order: stroke; } .ink { fill: #1f2630; } .soft { fill: #5b6472; } .grid { stroke: #e4e8ee; }
.beyond { fill: #f3f5f8; } .limit { stroke: #c0182b; } .limit-text { fill: #c0182b; } .halo { stroke: #ffffff; }
.bound { stroke: #8b94a3; fill: none; } .plain { fill: #3f74c8; } .again { fill: #cf7a22; } .found { fill: #467a26; }
@media (prefers-color-scheme: dark) {
.sheet { fill: #14181f; } .name { fill: #e6eaf0; stroke: #14181f; } .ink { fill: #e6eaf0; } .soft { fill: #98a2b1; } .grid { stroke: #262d38; }
.beyond { fill: #1b212b; } .limit { stroke: #ff6b78; } .limit-text { fill: #ff6b78; } .halo { stroke: #14181f; }
.bound { stroke: #6d7787; } .plain { fill: #6b9be0; } .again { fill: #eb9f4d; } .found { fill: #8dbf68; }
}
</style>
)";

struct area {
  double x = 0, y = 0, width = 0, height = 0;
  bool meets(area const& o) const { return x < o.x + o.width && o.x < x + width && y < o.y + o.height && o.y < y + height; }
};

/// A step for an axis in bytes: 1, 2, 4, 8 … of a unit.
double byte_step(double range, double most_marks) {
  double step = 1;
  while (range / step > most_marks) step *= 2;
  return step;
}

char const* class_of(fit_point const& p) { return p.searched ? "found" : p.recomputed.empty() ? "plain" : "again"; }

/// A circle, a square where something is recomputed, a diamond where it was searched; filled if it fits.
std::string mark(double x, double y, fit_point const& p, bool fits) {
  double const r = p.searched ? 6.5 : 5;
  auto const at = [](double v) { return drawing::at(v); };
  std::string const look =
      std::string(" class=\"") + class_of(p) + " halo\" stroke-width=\"1.5\"" + (fits ? "" : " fill-opacity=\"0.4\"");
  if (p.searched)
    return "<polygon points=\"" + at(x) + "," + at(y - r) + " " + at(x + r) + "," + at(y) + " " + at(x) + "," + at(y + r) + " " +
           at(x - r) + "," + at(y) + "\"" + look;
  if (!p.recomputed.empty())
    return "<rect x=\"" + at(x - r + 0.5) + "\" y=\"" + at(y - r + 0.5) + "\" width=\"" + at(2 * r - 1) + "\" height=\"" +
           at(2 * r - 1) + "\"" + look;
  return "<circle cx=\"" + at(x) + "\" cy=\"" + at(y) + "\" r=\"" + at(r) + "\"" + look;
}

}  // namespace

std::string fit_picture(fit_chart const& chart, bool page) {
  double const left = 76, right = 930, top = 84, bottom = 500;
  // What needs far more memory than there is goes into a list at the edge, so that the rest stays apart.
  double least = 1e300, most = static_cast<double>(chart.memory);
  for (fit_point const& p : chart.points) least = std::min(least, static_cast<double>(p.bytes));
  double const edge = std::max(1.5 * static_cast<double>(chart.memory), 1.6 * least);
  double slowest = 0, fastest = 1e300;
  for (fit_point const& p : chart.points) fastest = std::min(fastest, p.bytes <= chart.memory ? p.time : 1e300);
  // Nor what takes twice as long as need be, if anything fits.
  double const longest = fastest < 1e300 ? 1.9 * fastest : fastest;
  std::vector<fit_point const*> slow;
  std::vector<fit_point const*> shown;
  std::vector<fit_point const*> beyond;
  for (fit_point const& p : chart.points) {
    if (static_cast<double>(p.bytes) > edge) {
      if (p.recomputed.empty()) beyond.push_back(&p);
      continue;
    }
    if (p.time > longest) {
      slow.push_back(&p);
      continue;
    }
    shown.push_back(&p);
    most = std::max(most, static_cast<double>(p.bytes));
    slowest = std::max(slowest, p.time);
    fastest = std::min(fastest, p.time);
  }
  if (shown.empty()) slowest = fastest = 1;
  for (auto const* line : {&chart.bound, &chart.bound_recomputed}) {
    for (fit_bound const& one : *line) {
      if (static_cast<double>(one.bytes) < most) fastest = std::min(fastest, one.time);
    }
  }
  double const x_most = most * 1.07, x_least = std::max(0.0, least - 0.12 * (most - least) * 1.5);
  double const room = std::max(slowest - fastest, 0.02 * slowest);
  double const y_least = std::max(0.0, fastest - 0.10 * room), y_most = slowest + 0.10 * room;
  auto const x_of = [&](double bytes) { return left + (bytes - x_least) / (x_most - x_least) * (right - left); };
  auto const y_of = [&](double time) { return bottom - (time - y_least) / (y_most - y_least) * (bottom - top); };

  drawing d;
  d.out += std::string("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 ") +
           (beyond.empty() && slow.empty() ? "574" : "592") + "\" role=\"img\"" +
           (page ? "" : std::string(" width=\"960\" height=\"") + (beyond.empty() && slow.empty() ? "574" : "592") + "\"") +
           ">\n<title>" + chevron::show::xml_text(chart.title) + "</title>\n" + style +
           "<rect class=\"sheet\" width=\"100%\" height=\"100%\" rx=\"6\"/>\n"
           "<g font-family=\"system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\" font-size=\"12\" "
           "class=\"soft\">\n";
  d.text(20, 34, chart.title, "font-size=\"18\" font-weight=\"600\" class=\"ink\"");
  d.text(20, 56, chart.subtitle);

  // Beyond what a rank has, the grid, the axes.
  double const limit = x_of(static_cast<double>(chart.memory));
  d.rect(limit, top, right - limit, bottom - top, "class=\"beyond\"");
  double const bytes_step = byte_step(x_most - x_least, 12);
  for (double b = std::ceil(x_least / bytes_step) * bytes_step; b <= x_most; b += bytes_step) {
    d.line(x_of(b), top, x_of(b), bottom, "class=\"grid\"");
    d.text(x_of(b), bottom + 19, chevron::show::bytes(static_cast<std::int64_t>(b)), "text-anchor=\"middle\" font-size=\"11\"");
  }
  double const time_step = chevron::show::axis_step(y_most - y_least, 8);
  for (double t = std::ceil(y_least / time_step) * time_step; t <= y_most; t += time_step) {
    d.line(left, y_of(t), right, y_of(t), "class=\"grid\"");
    d.text(left - 8, y_of(t) + 4, number(t), "text-anchor=\"end\" font-size=\"11\"");
  }
  d.text(right, bottom + 38, "memory of the fullest rank", "text-anchor=\"end\"");
  d.text(20, top - 8, chart.unit.empty() ? "step time" : "step time, " + chart.unit);

  // What no schedule can beat: a step wherever one more chunk may be held.
  std::vector<area> lines;
  auto const steps = [&](std::vector<fit_bound> const& line, char const* dashes) {
    std::string points;
    double before = 0, from = left;
    for (fit_bound const& one : line) {
      double const x = std::max(x_of(static_cast<double>(one.bytes)), left);
      if (x > right) break;
      if (y_of(one.time) < top) continue;
      points += (points.empty() ? drawing::at(x) + "," + drawing::at(top) : " " + drawing::at(x) + "," + drawing::at(before)) +
                " " + drawing::at(x) + "," + drawing::at(y_of(one.time));
      if (before > 0) {
        lines.push_back({from, before - 1, x - from, 2});
        lines.push_back({x - 1, before, 2, y_of(one.time) - before});
      }
      from = x;
      before = y_of(one.time);
    }
    if (before > 0) lines.push_back({from, before - 1, right - from, 2});
    if (points.empty()) return;
    d.out += "<polyline class=\"bound\" stroke-width=\"1.8\"" + std::string(dashes) + " points=\"" + points + " " +
             drawing::at(right) + "," + drawing::at(before) + "\"/>\n";
  };
  steps(chart.bound, "");
  steps(chart.bound_recomputed, " stroke-dasharray=\"5 4\"");
  d.line(limit, top - 4, limit, bottom, "class=\"limit\" stroke-width=\"1.5\"");
  std::string const has = "a rank has " + chevron::show::bytes(chart.memory);
  d.text(limit, top - 10, has, "text-anchor=\"middle\" class=\"limit-text\" font-weight=\"600\"");

  // Points, and a name wherever one fits without covering another: of what fits, the fastest first.
  std::stable_sort(shown.begin(), shown.end(), [&](auto const* a, auto const* b) {
    bool const a_fits = a->bytes <= chart.memory, b_fits = b->bytes <= chart.memory;
    return a_fits != b_fits ? a_fits : a->time < b->time;
  });
  std::vector<area> taken = lines;
  taken.push_back({limit - 2, top - 4, 4, bottom - top + 4});
  for (fit_point const* p : shown) {
    double const x = x_of(static_cast<double>(p->bytes)), y = y_of(p->time);
    taken.push_back({x - 8, y - 8, 16, 16});
  }
  std::string marks;
  drawing names;
  for (fit_point const* p : shown) {
    double const x = x_of(static_cast<double>(p->bytes)), y = y_of(p->time);
    std::string const words = p->schedule + (p->recomputed.empty() || p->all ? "" : ", " + p->recomputed);
    marks += mark(x, y, *p, p->bytes <= chart.memory) + "><title>" +
             chevron::show::xml_text(p->schedule + (p->recomputed.empty() ? "" : ", recomputed: " + p->recomputed) + ": " +
                                     number(p->time) + (chart.unit.empty() ? "" : " " + chart.unit) + ", " +
                                     chevron::show::bytes(p->bytes) + " on rank " + std::to_string(p->rank)) +
             "</title>" +
             (p->searched              ? "</polygon>\n"
              : !p->recomputed.empty() ? "</rect>\n"
                                       : "</circle>\n");
    double const size = 11.5, wide = text_width(words, size) + 2;
    std::array<area, 8> const places{area{x + 9, y - 7, wide, 14},         area{x - 9 - wide, y - 7, wide, 14},
                                     area{x + 7, y - 22, wide, 14},        area{x + 7, y + 8, wide, 14},
                                     area{x - 7 - wide, y - 22, wide, 14}, area{x - 7 - wide, y + 8, wide, 14},
                                     area{x - wide / 2, y - 23, wide, 14}, area{x - wide / 2, y + 9, wide, 14}};
    for (area const& at : places) {
      bool free = at.x > left && at.x + at.width < right && at.y > top && at.y + at.height < bottom;
      for (area const& other : taken) free = free && !at.meets(other);
      if (!free) continue;
      taken.push_back(at);
      names.text(at.x + 1, at.y + 11, words, p->searched ? "class=\"name\" font-weight=\"600\"" : "class=\"name\"");
      break;
    }
  }
  d.out += marks + "<g font-size=\"11.5\">\n" + names.out + "</g>\n";

  // The legend.
  double x = left;
  double const y = bottom + 58;
  auto const entry = [&](std::string const& shape, std::string const& words) {
    d.out += shape;
    d.text(x + 14, y, words);
    x += 14 + text_width(words, 12) + 20;
  };
  fit_point key;
  entry(mark(x + 4, y - 4, key, true) + "/>\n", "published");
  key.recomputed = "all";
  bool const any_again =
      std::any_of(shown.begin(), shown.end(), [](auto const* p) { return !p->recomputed.empty() && !p->searched; });
  if (any_again) entry(mark(x + 4, y - 4, key, true) + "/>\n", "with recomputation");
  key.searched = true;
  if (std::any_of(shown.begin(), shown.end(), [](auto const* p) { return p->searched; }))
    entry(mark(x + 4, y - 4, key, true) + "/>\n", "searched for this memory");
  auto const stroke = [&](char const* dashes) {
    return "<line class=\"bound\" stroke-width=\"1.8\" x1=\"" + drawing::at(x - 8) + "\" x2=\"" + drawing::at(x + 10) +
           "\" y1=\"" + drawing::at(y - 4) + "\" y2=\"" + drawing::at(y - 4) + "\"" + dashes + "/>\n";
  };
  x += 8;
  if (!chart.bound.empty()) entry(stroke(""), chart.sliced ? "of whole microbatches none is faster" : "none is faster");
  x += 8;
  if (!chart.bound_recomputed.empty()) entry(stroke(" stroke-dasharray=\"5 4\""), "none is faster with everything recomputed");
  std::string outside;
  for (auto const* list : {&beyond, &slow}) {
    if (list->empty()) continue;
    outside += std::string(outside.empty() ? "" : ".  ") + (list == &beyond ? "Further right: " : "Slower: ");
    for (fit_point const* p : *list) {
      outside += (p == list->front() ? "" : ", ") + p->schedule + (p->recomputed.empty() ? "" : " recomputed") + " " +
                 (list == &beyond ? chevron::show::bytes(p->bytes) : number(p->time));
    }
  }
  if (!outside.empty()) d.text(left, y + 20, outside);
  d.out += "</g>\n</svg>\n";
  if (!page) return d.out;
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
         "content=\"width=device-width\">\n"
         "<meta name=\"color-scheme\" content=\"light dark\">\n<title>" +
         chevron::show::xml_text(chart.title) +
         "</title>\n<style>body { margin: 2rem auto; max-width: 60rem; background: #ffffff; } svg { width: 100%; height: auto; "
         "}\n"
         "@media (prefers-color-scheme: dark) { body { background: #14181f; } }</style>\n</head>\n<body>\n" +
         d.out + "</body>\n</html>\n";
}

}  // namespace plan_program
