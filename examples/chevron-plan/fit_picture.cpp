#include <algorithm>
#include <cmath>

#include <chevron/tools/show/svg_drawing.hpp>

#include "fit.hpp"
#include "plane_drawing.hpp"

namespace plan_program {
namespace {

using chevron::show::number;
using chevron::show::detail::drawing;
using chevron::show::detail::text_width;

char const* class_of(fit_point const& p) { return p.searched ? "found" : p.recomputed.empty() ? "plain" : "again"; }

/// A circle, a square where something is recomputed, a diamond where it was searched.
mark_shape shape_of(fit_point const& p) {
  return p.searched ? mark_shape::diamond : p.recomputed.empty() ? mark_shape::circle : mark_shape::square;
}

/// A mark without its end; filled if it fits.
std::string mark(double x, double y, fit_point const& p, bool fits) {
  return mark_begin(shape_of(p), x, y, p.searched ? 6.5 : 5) + " class=\"" + class_of(p) + " halo\" stroke-width=\"1.5\"" +
         (fits ? "" : " fill-opacity=\"0.4\"");
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
  d.out += plane_begin(chart.title, 960, beyond.empty() && slow.empty() ? 574 : 592, page);
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
             "</title>" + end_of(shape_of(*p));
    double const size = 11.5, wide = text_width(words, size) + 2;
    area at;
    if (take_place(taken, {left, top, right - left, bottom - top}, x, y, wide, at))
      names.text(at.x + 1, at.y + 11, words, p->searched ? "class=\"name\" font-weight=\"600\"" : "class=\"name\"");
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
  return page ? plane_page(chart.title, d.out, 60) : d.out;
}

}  // namespace plan_program
