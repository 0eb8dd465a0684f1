#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <chevron/show/figures.hpp>
#include <chevron/show/format.hpp>
#include <chevron/show/picture.hpp>
#include <chevron/show/svg_drawing.hpp>
#include <chevron/show/svg_progress.hpp>

/// \file
/// Timelines as SVG: a row a rank, a rectangle an action, one picture or several above one another on one axis.

namespace chevron::show {

struct svg_style {
  int width = 1000;            ///< in pixels at normal size
  bool standalone = true;      ///< with a size, a heading and a white sheet behind it; a page that embeds it has its own
  bool critical_path = false;  ///< a line along the boxes on which the makespan hangs, where a picture knows them
};

/// One or more pictures on one axis, the first on top. Times of all are in the same unit; each picture starts at its own first
/// compute. Every box of a picture is drawn: compute as a full row, messages, gradient sums and the optimizer thinner below it.
inline std::string svg(std::span<picture const> pictures, svg_style const& style = {}) {
  using detail::drawing;
  std::vector<figures> numbers;
  double longest = 0;
  bool present[program_kinds] = {};
  bool pairs = false;
  int chunks = 1;
  int most_rows = 0;
  std::size_t boxes = 0;
  for (picture const& p : pictures) {
    numbers.push_back(figures_of(p));
    double const zero = first_start(p);
    for (box const& b : p.boxes) {
      longest = std::max(longest, b.end - zero);
      present[static_cast<int>(b.op.kind)] = true;
      pairs = pairs || b.of_pair != half::none;
    }
    chunks = std::max(chunks, p.size.chunks);
    most_rows = std::max(most_rows, p.rows);
    boxes += p.boxes.size();
  }
  bool const several = pictures.size() > 1;
  bool const names_fit = most_rows <= 16;

  double const margin = 20;
  double const left = 72;
  double longest_note = 0;
  bool failed = false;
  for (picture const& p : pictures) {
    failed = failed || !p.note.empty();
    for (std::string const& words : p.row_notes) longest_note = std::max(longest_note, 12 + detail::text_width(words, 12));
  }
  double const right = style.width - margin - 4 - longest_note;
  double const row = names_fit ? 24 : 15;
  double const strip = 5;
  double const row_gap = names_fit ? 7 : 4;
  double const per_unit = longest > 0 ? (right - left) / longest : 1;
  picture const none;
  picture const& first = pictures.empty() ? none : pictures.front();
  std::string const unit = first.unit.empty() ? "" : " " + first.unit;
  std::string const name = first.schedule.empty() ? "schedule" : first.schedule;
  std::string const separator = " \xc2\xb7 ";
  double caption = left;  // right of the longest title
  for (picture const& p : pictures) caption = std::max(caption, margin + detail::text_width(p.title, 13) + 24);
  auto const sentence = [&](figures const& f) {
    auto const [least, most] = std::minmax_element(f.peak_in_flight.begin(), f.peak_in_flight.end());
    bool const many = f.peak_in_flight.size() > 16 && *least != *most;
    std::string const peaks = many ? std::to_string(*least) + " to " + std::to_string(*most) : per_rank(f.peak_in_flight);
    return "makespan " + number(f.makespan, 4) + unit + ", bubble " + percent(f.bubble_makespan) + separator + "span " +
           number(f.span, 4) + unit + ", bubble " + percent(f.bubble_span) + separator + "peak in flight " + peaks;
  };

  drawing d;
  double y = style.standalone ? margin + 18 : margin - 12;
  d.out +=
      "<g font-family=\"system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\" font-size=\"12\" "
      "fill=\"#1f2630\">\n";
  if (style.standalone) {
    d.text(margin, y, name, "font-size=\"18\" font-weight=\"600\"");
    d.text(style.width - margin, y, size_words(first), "text-anchor=\"end\" fill=\"#5b6472\"");
  }
  y += 20;
  if (!several && !numbers.empty()) {
    d.text(margin, y, failed ? first.note : sentence(numbers.front()),
           failed ? "font-size=\"13\" font-weight=\"600\"" : "fill=\"#5b6472\"");
    y += 8;
  }
  y += several ? 0 : 10;

  std::vector<std::pair<double, double>> rows_at;  // of each picture, from its first row to below its last
  struct label {
    double x, y;
    std::string words;
    char const* fill;
  };
  std::vector<label> labels;
  std::vector<label> pair_labels;
  std::vector<label> row_names;
  bool any_steps = false;
  drawing path;
  drawing shapes;
  drawing guides;
  for (std::size_t which = 0; which < pictures.size(); ++which) {
    picture const& p = pictures[which];
    double const zero = first_start(p);
    bool strips[2] = {};
    for (box const& b : p.boxes) {
      int const s = detail::strip_of(b.op.kind);
      if (s >= 0) strips[s] = true;
    }
    if (several) {
      y += which > 0 ? 14 : 0;
      d.text(margin, y + 10, p.title, "font-weight=\"600\"");
      d.text(caption, y + 10, sentence(numbers[which]), "fill=\"#5b6472\"");
      y += 22;
    }
    double const pitch = row + (strips[0] ? strip + 1.5 : 0) + (strips[1] ? strip + 1.5 : 0) + row_gap;
    double const makespan = numbers[which].makespan;
    double const top = y;
    for (int r = 0; r < p.rows; ++r) {
      shapes.rect(left, top + r * pitch, makespan * per_unit, row, failed ? "fill=\"#f3f5f8\"" : "fill=\"#eaedf2\"");
      row_names.push_back({margin, top + r * pitch + row / 2 + 4, "rank " + std::to_string(r + p.first_rank), ""});
      if (static_cast<std::size_t>(r) < p.row_notes.size())
        row_names.push_back({right + 12, top + r * pitch + row / 2 + 4, p.row_notes[static_cast<std::size_t>(r)],
                             detail::is_awaited_row(p, r) ? detail::alarm : ""});
    }
    std::vector<detail::place> places;
    for (box const& b : p.boxes) {
      double const x = left + (b.start - zero) * per_unit;
      double const width = (b.end - b.start) * per_unit;
      int const s = detail::strip_of(b.op.kind);
      double const gap = std::min(1.0, 0.15 * width);
      std::string hint;
      if (boxes <= 6000) {
        hint = "<title>" + xml_text(to_text(b.op).view()) + ", rank " + std::to_string(b.rank) + ", " + number(b.start - zero) +
               " to " + number(b.end - zero) + xml_text(unit) + "</title>";
      }
      if (s < 0) {
        detail::ink const ink = detail::ink_of(b.op.kind, b.chunk, chunks);
        // A pair is one box in two colours: the forward above its backward.
        double const height = b.of_pair == half::none ? row : row / 2;
        double const box_top = top + b.rank * pitch + (b.of_pair == half::second ? height : 0);
        shapes.rect(x, box_top, width - gap, height,
                    std::string("class=\"compute\"") + (width > 6 && b.of_pair == half::none ? " rx=\"2\"" : "") + " fill=\"" +
                        ink.fill + "\"" + detail::look_of(b.so_far),
                    hint);
        places.resize(p.boxes.size());
        places[static_cast<std::size_t>(&b - p.boxes.data())] = {x, box_top, width - gap, height};
        std::string const words = std::to_string(b.op.micro_batch);
        double const size = b.of_pair == half::none ? 11 : 9.5;
        if (detail::text_width(words, size) + 2 <= width - gap && height >= 11) {
          (b.of_pair == half::none ? labels : pair_labels)
              .push_back({x + (width - gap) / 2, box_top + height / 2 + (b.of_pair == half::none ? 4 : 3.4), words,
                          detail::is_faint(b.so_far) ? detail::faint_text : ink.text});
        }
      } else {
        double const below = top + b.rank * pitch + row + 1.5 + (s == 1 && strips[0] ? strip + 1.5 : 0);
        shapes.rect(x, below, width - gap, strip, std::string("class=\"other\" fill=\"") + detail::grey_of(b.op.kind) + "\"",
                    hint);
      }
    }
    // Where ranks go from one step to the next.
    std::vector<int> step_of(static_cast<std::size_t>(std::max(p.rows, 0)), -1);
    for (box const& b : p.boxes) {
      int& now = step_of[static_cast<std::size_t>(b.rank)];
      if (!is_compute(b.op.kind) || b.step <= now) continue;
      bool const begins = now < 0;
      now = b.step;
      if (begins) continue;
      any_steps = true;
      double const x = left + (b.start - zero) * per_unit - 0.5;
      guides.line(x, top + b.rank * pitch - row_gap / 2, x, top + b.rank * pitch + row + row_gap / 2,
                  "class=\"step\" stroke=\"#1f2630\" stroke-width=\"2\"");
    }
    std::string points;
    for (int i : style.critical_path ? p.critical_path : std::vector<int>{}) {
      box const& b = p.boxes[static_cast<std::size_t>(i)];
      double const at = top + b.rank * pitch + row - 1;
      for (double time : {b.start, b.end}) {
        points += (points.empty() ? "" : " ") + drawing::at(left + (time - zero) * per_unit) + "," + drawing::at(at);
      }
    }
    if (!points.empty()) {
      path.out += "<polyline points=\"" + points + "\" fill=\"none\" stroke=\"#c0182b\" stroke-width=\"2\" " +
                  "stroke-linejoin=\"round\"/>\n";
    }
    if (failed) guides.out += detail::progress_marks(p, places);
    y = top + p.rows * pitch - row_gap;
    rows_at.push_back({top - 2, y + 6});
    // Where the picture ends, so that two of them can be compared at a glance.
    if (several)
      guides.line(left + makespan * per_unit, top - 4, left + makespan * per_unit, y + 4,
                  "stroke=\"#1f2630\" stroke-dasharray=\"3 3\"");
  }

  // The axis and its faint lines, behind everything.
  double const step = axis_step(longest, (right - left) / 75);
  drawing grid;
  drawing marks;
  for (int i = 0; longest > 0 && i * step <= longest * (1 + 1e-9); ++i) {
    double const x = left + i * step * per_unit;
    // Not through the titles between the pictures.
    for (auto const& [from, to] : rows_at) grid.line(x, from, x, to, "");
    marks.text(x, y + 20, number(i * step));
  }
  if (!first.unit.empty()) d.text(margin, y + 20, first.unit, "font-size=\"11\" fill=\"#5b6472\"");
  d.out += "<g stroke=\"#dfe3e9\">\n" + grid.out + "</g>\n" + "<g fill=\"#5b6472\">\n";
  for (auto const& l : row_names)
    d.text(l.x, l.y, l.words, *l.fill == 0 ? "" : "font-weight=\"600\" fill=\"" + std::string(l.fill) + "\"");
  d.out +=
      "</g>\n<g font-size=\"11\" fill=\"#5b6472\" text-anchor=\"middle\">\n" + marks.out + "</g>\n" + shapes.out + guides.out;
  if (!path.out.empty()) d.out += "<g class=\"critical\">\n" + path.out + "</g>\n";
  for (auto const* list : {&labels, &pair_labels}) {
    for (char const* colour : {"#10233f", "#40250a", "#0b3331", "#1d3310", "#ffffff", detail::faint_text}) {
      drawing words;
      for (auto const& l : *list) {
        if (std::string_view(l.fill) == colour) words.text(l.x, l.y, l.words);
      }
      if (words.out.empty()) continue;
      d.out += std::string("<g font-size=\"") + (list == &labels ? "11" : "9.5") + "\" text-anchor=\"middle\" fill=\"" + colour +
               "\">\n" + words.out + "</g>\n";
    }
  }

  // The legend.
  y += 46;
  double x = left;
  auto const entry = [&](std::vector<char const*> const& fills, double height, std::string const& words) {
    double const width = 14.0 * static_cast<double>(fills.size()) + 6 + detail::text_width(words, 12) + 18;
    if (x + width > style.width - margin + 18 && x > left) {
      x = left;
      y += 20;
    }
    for (char const* fill : fills) {
      d.rect(x, y - 4 - height / 2, 13, height, std::string("class=\"key\" fill=\"") + fill + "\"");
      x += 14;
    }
    d.text(x + 4, y, words, "fill=\"#5b6472\"");
    x += width - 14.0 * static_cast<double>(fills.size());
  };
  for (int k = 0; k < compute_kinds; ++k) {
    if (!present[k]) continue;
    std::vector<char const*> fills;
    for (int c = 0; c < std::min(chunks, 4); ++c) {
      fills.push_back(detail::ink_of(static_cast<kind>(k), c * (chunks - 1) / std::max(1, std::min(chunks, 4) - 1), chunks).fill);
    }
    entry(fills, 12, std::string(letters_of(static_cast<kind>(k))) + " " + row_of(static_cast<kind>(k)).words);
  }
  auto const has = [&](kind a, kind b) { return present[static_cast<int>(a)] || present[static_cast<int>(b)]; };
  if (has(kind::send_forward, kind::send_backward)) entry({detail::grey_of(kind::send_forward)}, 5, "send");
  if (has(kind::receive_forward, kind::receive_backward)) entry({detail::grey_of(kind::receive_forward)}, 5, "receive");
  if (has(kind::wait_send_forward, kind::wait_send_backward))
    entry({detail::grey_of(kind::wait_send_forward)}, 5, "wait for send");
  if (has(kind::reduce_gradients, kind::reduce_gradients)) entry({detail::grey_of(kind::reduce_gradients)}, 5, "gradient sum");
  if (has(kind::optimizer_step, kind::optimizer_step)) entry({detail::grey_of(kind::optimizer_step)}, 5, "optimizer");
  if (pairs) entry({}, 12, "two colours in one box: a pair, run as one");
  if (any_steps) entry({}, 12, "dark line: the rank's next step");
  if (!path.out.empty() && style.standalone) entry({"#c0182b"}, 2.5, "critical path");
  if (failed) {
    x = left;
    y += 22;
    d.out += detail::progress_legend(first, x, y, 12);
  } else {
    entry({"#eaedf2"}, 12,
          std::string("idle") + (chunks > 1 ? "; darker: later chunk" : "") + (labels.empty() ? "" : "; numbers: microbatches"));
  }
  d.out += "</g>\n";
  double const height = y + margin - 4;

  std::string const size = "0 0 " + std::to_string(style.width) + " " + drawing::at(height);
  std::string head = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"" + size + "\" role=\"img\"";
  if (style.standalone) head += " width=\"" + std::to_string(style.width) + "\" height=\"" + drawing::at(height) + "\"";
  head += ">\n<title>" + xml_text(name + " on " + size_words(first)) + "</title>\n";
  if (style.standalone) head += "<rect class=\"sheet\" width=\"100%\" height=\"100%\" rx=\"6\" fill=\"#ffffff\"/>\n";
  return head + d.out + "</svg>\n";
}

inline std::string svg(picture const& one, svg_style const& style = {}) { return svg(std::span<picture const>(&one, 1), style); }

inline std::string svg(plan_view const& plan, cost_view const& costs, svg_style const& style = {}) {
  return svg(picture_of(plan, costs), style);
}

}  // namespace chevron::show
