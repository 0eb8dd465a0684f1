#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/tools/show/figures.hpp>
#include <chevron/tools/show/picture.hpp>
#include <chevron/tools/show/svg_drawing.hpp>
#include <chevron/tools/show/svg_progress.hpp>

/// \file
/// Timelines as SVG: a row for each rank, a rectangle for each action; several pictures are drawn above one another on one axis.

namespace chevron::show {

/// The size of an SVG drawing, and its parts.
struct svg_style {
  int width = 1000;            ///< in pixels at normal size
  bool standalone = true;      ///< with a size, a heading and a white background; pages that embed the drawing turn this off
  bool critical_path = false;  ///< draws a line along the boxes of the critical path, if the picture has one
};

namespace detail {

/// Draws pictures on one axis, part by part: heading, pictures, axis, labels, legend.
class svg_sheet {
 public:
  svg_sheet(std::span<picture const> pictures, svg_style const& style)
      : pictures_(pictures), style_(style), first_(pictures.empty() ? none_ : pictures.front()), several_(pictures.size() > 1) {
    measure();
    unit_ = first_.unit.empty() ? "" : " " + first_.unit;
    name_ = first_.schedule.empty() ? "schedule" : first_.schedule;
  }
  // Deleted, since `first_` may refer to this object's own empty picture.
  svg_sheet(svg_sheet const&) = delete;
  svg_sheet& operator=(svg_sheet const&) = delete;

  std::string drawn() {
    draw_heading();
    for (std::size_t which = 0; which < pictures_.size(); ++which) draw_picture(which);
    draw_axis();
    draw_labels();
    draw_legend();
    d_.out += "</g>\n";
    return head(y_ + margin - 4) + d_.out + "</svg>\n";
  }

 private:
  static constexpr double margin = 20, left = 72, strip = 5;
  struct label {
    double x, y;
    std::string words;
    char const* fill;
  };
  /// The position of a picture in the drawing.
  struct frame {
    picture const& of;
    double zero, top, pitch;
    bool sends_below;  // messages are drawn in a strip between the rows and the gradient sums
  };

  /// Finds widths and heights, the longest makespan, and the kinds that a legend explains.
  void measure() {
    double longest_note = 0;
    int most_rows = 0;
    for (picture const& p : pictures_) {
      numbers_.push_back(figures_of(p));
      double const zero = first_start(p);
      for (box const& b : p.boxes) {
        longest_ = std::max(longest_, b.end - zero);
        present_[static_cast<int>(b.op.kind)] = true;
        pairs_ = pairs_ || b.of_pair != half::none;
      }
      chunks_ = std::max(chunks_, p.size.chunks);
      most_rows = std::max(most_rows, p.rows);
      boxes_ += p.boxes.size();
      failed_ = failed_ || !p.note.empty();
      for (std::string const& words : p.row_notes) longest_note = std::max(longest_note, 12 + text_width(words, 12));
      caption_ = std::max(caption_, margin + text_width(p.title, 13) + 24);
    }
    bool const names_fit = most_rows <= 16;
    right_ = style_.width - margin - 4 - longest_note;
    row_ = names_fit ? 24 : 15;
    row_gap_ = names_fit ? 7 : 4;
    per_unit_ = longest_ > 0 ? (right_ - left) / longest_ : 1;
  }

  std::string sentence(figures const& f) const {
    std::string const separator = " \xc2\xb7 ";
    auto const [least, most] = std::minmax_element(f.peak_in_flight.begin(), f.peak_in_flight.end());
    bool const many = f.peak_in_flight.size() > 16 && *least != *most;
    std::string const peaks = many ? std::to_string(*least) + " to " + std::to_string(*most) : per_rank(f.peak_in_flight);
    return "makespan " + number(f.makespan, 4) + unit_ + ", bubble " + percent(f.bubble_makespan) + separator + "span " +
           number(f.span, 4) + unit_ + ", bubble " + percent(f.bubble_span) + separator + "peak in flight " + peaks;
  }

  void draw_heading() {
    y_ = style_.standalone ? margin + 18 : margin - 12;
    d_.out +=
        "<g font-family=\"system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\" font-size=\"12\" "
        "fill=\"#1f2630\">\n";
    if (style_.standalone) {
      d_.text(margin, y_, name_, "font-size=\"18\" font-weight=\"600\"");
      d_.text(style_.width - margin, y_, size_words(first_), "text-anchor=\"end\" fill=\"#5b6472\"");
    }
    y_ += 20;
    if (!several_ && !numbers_.empty()) {
      d_.text(margin, y_, failed_ ? first_.note : sentence(numbers_.front()),
              failed_ ? "font-size=\"13\" font-weight=\"600\"" : "fill=\"#5b6472\"");
      y_ += 8;
    }
    y_ += several_ ? 0 : 10;
  }

  void draw_picture(std::size_t which) {
    picture const& p = pictures_[which];
    bool strips[2] = {};
    for (box const& b : p.boxes) {
      int const s = strip_of(b.op.kind);
      if (s >= 0) strips[s] = true;
    }
    if (several_) {
      y_ += which > 0 ? 14 : 0;
      d_.text(margin, y_ + 10, p.title, "font-weight=\"600\"");
      d_.text(caption_, y_ + 10, sentence(numbers_[which]), "fill=\"#5b6472\"");
      y_ += 22;
    }
    double const pitch = row_ + (strips[0] ? strip + 1.5 : 0) + (strips[1] ? strip + 1.5 : 0) + row_gap_;
    frame const at{p, first_start(p), y_, pitch, strips[0]};
    double const width = numbers_[which].makespan * per_unit_;
    draw_rows(at, width);
    std::vector<place> places;
    for (box const& b : p.boxes) draw_box(at, b, places);
    draw_steps(at);
    if (style_.critical_path) draw_critical_path(at);
    if (failed_) guides_.out += progress_marks(p, places);
    y_ = at.top + p.rows * pitch - row_gap_;
    rows_at_.push_back({at.top - 2, y_ + 6});
    // Marks the end of the picture, so that two pictures can be compared at a glance.
    if (several_) guides_.line(left + width, at.top - 4, left + width, y_ + 4, "stroke=\"#1f2630\" stroke-dasharray=\"3 3\"");
  }

  void draw_rows(frame const& at, double width) {
    picture const& p = at.of;
    for (int r = 0; r < p.rows; ++r) {
      double const top = at.top + r * at.pitch;
      shapes_.rect(left, top, width, row_, failed_ ? "fill=\"#f3f5f8\"" : "fill=\"#eaedf2\"");
      row_names_.push_back({margin, top + row_ / 2 + 4, "rank " + std::to_string(r * p.ranks_apart + p.first_rank), ""});
      if (static_cast<std::size_t>(r) < p.row_notes.size())
        row_names_.push_back(
            {right_ + 12, top + row_ / 2 + 4, p.row_notes[static_cast<std::size_t>(r)], is_awaited_row(p, r) ? alarm : ""});
    }
  }

  void draw_box(frame const& at, box const& b, std::vector<place>& places) {
    double const x = left + (b.start - at.zero) * per_unit_;
    double const width = (b.end - b.start) * per_unit_;
    double const gap = std::min(1.0, 0.15 * width);
    int const s = strip_of(b.op.kind);
    std::string hint;
    if (boxes_ <= 6000) {
      hint = "<title>" + xml_text(to_text(b.op, at.of.size.slices).view()) + ", rank " + std::to_string(b.rank) + ", " +
             number(b.start - at.zero) + " to " + number(b.end - at.zero) + xml_text(unit_) + "</title>";
    }
    if (s >= 0) {
      double const below = at.top + b.rank * at.pitch + row_ + 1.5 + (s == 1 && at.sends_below ? strip + 1.5 : 0);
      shapes_.rect(x, below, width - gap, strip, std::string("class=\"other\" fill=\"") + grey_of(b.op.kind) + "\"", hint);
      return;
    }
    ink const colours = ink_of(b.op.kind, b.chunk, chunks_);
    bool const whole = b.of_pair == half::none;
    // A fused pair is one box in two colours, the forward above its backward.
    double const height = whole ? row_ : row_ / 2;
    double const top = at.top + b.rank * at.pitch + (b.of_pair == half::second ? height : 0);
    shapes_.rect(x, top, width - gap, height,
                 std::string("class=\"compute\"") + (width > 6 && whole ? " rx=\"2\"" : "") + " fill=\"" + colours.fill + "\"" +
                     look_of(b.so_far),
                 hint);
    places.resize(at.of.boxes.size());
    places[static_cast<std::size_t>(&b - at.of.boxes.data())] = {x, top, width - gap, height};
    std::string const words = unit_words(b.op, at.of.size.slices);
    if (text_width(words, whole ? 11 : 9.5) + 2 > width - gap || height < 11) return;
    (whole ? labels_ : pair_labels_)
        .push_back(
            {x + (width - gap) / 2, top + height / 2 + (whole ? 4 : 3.4), words, is_faint(b.so_far) ? faint_text : colours.text});
  }

  /// Draws a line on each rank between two training steps.
  void draw_steps(frame const& at) {
    std::vector<int> step_of(static_cast<std::size_t>(std::max(at.of.rows, 0)), -1);
    for (box const& b : at.of.boxes) {
      int& now = step_of[static_cast<std::size_t>(b.rank)];
      if (!is_compute(b.op.kind) || b.step <= now) continue;
      bool const begins = now < 0;
      now = b.step;
      if (begins) continue;
      any_steps_ = true;
      double const x = left + (b.start - at.zero) * per_unit_ - 0.5;
      double const top = at.top + b.rank * at.pitch;
      guides_.line(x, top - row_gap_ / 2, x, top + row_ + row_gap_ / 2, "class=\"step\" stroke=\"#1f2630\" stroke-width=\"2\"");
    }
  }

  void draw_critical_path(frame const& at) {
    std::string points;
    for (int i : at.of.critical_path) {
      box const& b = at.of.boxes[static_cast<std::size_t>(i)];
      double const y = at.top + b.rank * at.pitch + row_ - 1;
      for (double time : {b.start, b.end}) {
        points += (points.empty() ? "" : " ") + drawing::at(left + (time - at.zero) * per_unit_) + "," + drawing::at(y);
      }
    }
    if (points.empty()) return;
    path_.out += "<polyline points=\"" + points + "\" fill=\"none\" stroke=\"#c0182b\" stroke-width=\"2\" " +
                 "stroke-linejoin=\"round\"/>\n";
  }

  /// Draws the axis and its faint lines, behind all boxes and around the titles between pictures.
  void draw_axis() {
    double const step = axis_step(longest_, (right_ - left) / 75);
    drawing grid;
    drawing marks;
    for (int i = 0; longest_ > 0 && i * step <= longest_ * (1 + 1e-9); ++i) {
      double const x = left + i * step * per_unit_;
      for (auto const& [from, to] : rows_at_) grid.line(x, from, x, to, "");
      marks.text(x, y_ + 20, number(i * step));
    }
    if (!first_.unit.empty()) d_.text(margin, y_ + 20, first_.unit, "font-size=\"11\" fill=\"#5b6472\"");
    d_.out += "<g stroke=\"#dfe3e9\">\n" + grid.out + "</g>\n" + "<g fill=\"#5b6472\">\n";
    for (label const& l : row_names_)
      d_.text(l.x, l.y, l.words, *l.fill == 0 ? "" : "font-weight=\"600\" fill=\"" + std::string(l.fill) + "\"");
    d_.out +=
        "</g>\n<g font-size=\"11\" fill=\"#5b6472\" text-anchor=\"middle\">\n" + marks.out + "</g>\n" + shapes_.out + guides_.out;
    if (!path_.out.empty()) d_.out += "<g class=\"critical\">\n" + path_.out + "</g>\n";
  }

  /// Writes the numbers of microbatches on boxes, in one SVG group for each colour.
  void draw_labels() {
    for (auto const* list : {&labels_, &pair_labels_}) {
      for (char const* colour : {"#10233f", "#40250a", "#0b3331", "#1d3310", "#ffffff", faint_text}) {
        drawing words;
        for (label const& l : *list) {
          if (std::string_view(l.fill) == colour) words.text(l.x, l.y, l.words);
        }
        if (words.out.empty()) continue;
        d_.out += std::string("<g font-size=\"") + (list == &labels_ ? "11" : "9.5") + "\" text-anchor=\"middle\" fill=\"" +
                  colour + "\">\n" + words.out + "</g>\n";
      }
    }
  }

  void draw_legend() {
    y_ += 46;
    x_ = left;
    for (int k = 0; k < compute_kinds; ++k) {
      if (!present_[k]) continue;
      auto const what = static_cast<kind>(k);
      int const shades = std::min(chunks_, 4);
      std::vector<char const*> fills;
      for (int c = 0; c < shades; ++c) fills.push_back(ink_of(what, c * (chunks_ - 1) / std::max(1, shades - 1), chunks_).fill);
      draw_key(fills, 12, std::string(letters_of(what)) + " " + row_of(what).words);
    }
    for (auto const& [of, or_of, words] : {std::tuple{kind::send_forward, kind::send_backward, "send"},
                                           {kind::receive_forward, kind::receive_backward, "receive"},
                                           {kind::wait_send_forward, kind::wait_send_backward, "wait for send"},
                                           {kind::reduce_gradients, kind::reduce_gradients, "gradient sum"},
                                           {kind::optimizer_step, kind::optimizer_step, "optimizer"},
                                           {kind::unshard, kind::unshard, "gather of parameters"}}) {
      if (present_[static_cast<int>(of)] || present_[static_cast<int>(or_of)]) draw_key({grey_of(of)}, 5, words);
    }
    if (pairs_) draw_key({}, 12, "two colours in one box: a pair, run as one");
    if (any_steps_) draw_key({}, 12, "dark line: the rank's next step");
    if (!path_.out.empty() && style_.standalone) draw_key({"#c0182b"}, 2.5, "critical path");
    if (failed_) {
      x_ = left;
      y_ += 22;
      d_.out += progress_legend(first_, x_, y_, 12);
    } else {
      draw_key(
          {"#eaedf2"}, 12,
          std::string("idle") + (chunks_ > 1 ? "; darker: later chunk" : "") + (labels_.empty() ? "" : number_words(first_)));
    }
  }
  /// Draws one entry of the legend, on a new line if it does not fit.
  void draw_key(std::vector<char const*> const& fills, double height, std::string const& words) {
    double const width = 14.0 * static_cast<double>(fills.size()) + 6 + text_width(words, 12) + 18;
    if (x_ + width > style_.width - margin + 18 && x_ > left) {
      x_ = left;
      y_ += 20;
    }
    for (char const* fill : fills) {
      d_.rect(x_, y_ - 4 - height / 2, 13, height, std::string("class=\"key\" fill=\"") + fill + "\"");
      x_ += 14;
    }
    d_.text(x_ + 4, y_, words, "fill=\"#5b6472\"");
    x_ += width - 14.0 * static_cast<double>(fills.size());
  }

  std::string head(double height) const {
    std::string const size = "0 0 " + std::to_string(style_.width) + " " + drawing::at(height);
    std::string out = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"" + size + "\" role=\"img\"";
    if (style_.standalone) out += " width=\"" + std::to_string(style_.width) + "\" height=\"" + drawing::at(height) + "\"";
    out += ">\n<title>" + xml_text(name_ + " on " + size_words(first_)) + "</title>\n";
    if (style_.standalone) out += "<rect class=\"sheet\" width=\"100%\" height=\"100%\" rx=\"6\" fill=\"#ffffff\"/>\n";
    return out;
  }

  std::span<picture const> pictures_;
  svg_style const& style_;
  picture const none_{};
  picture const& first_;
  bool several_, failed_ = false, pairs_ = false, any_steps_ = false;
  bool present_[program_kinds] = {};
  int chunks_ = 1;
  std::size_t boxes_ = 0;
  std::vector<figures> numbers_;
  std::string unit_, name_;
  double longest_ = 0, per_unit_ = 1;  // length in time of the longest picture; pixels for a unit of time
  double right_ = 0, row_ = 0, row_gap_ = 0;
  double caption_ = left;                           // right end of the longest title
  double x_ = 0, y_ = 0;                            // position of the next part
  std::vector<std::pair<double, double>> rows_at_;  // top of each picture's first row, and bottom of its last
  std::vector<label> labels_, pair_labels_, row_names_;
  drawing d_, path_, shapes_, guides_;
};

}  // namespace detail

/// One or more pictures drawn on one axis, the first on top. All have the same unit of time; each starts at its first
/// computation. Computations fill their row; messages, gradient sums and the optimizer are drawn thinner below the row.
inline std::string svg(std::span<picture const> pictures, svg_style const& style = {}) {
  return detail::svg_sheet(pictures, style).drawn();
}

/// The drawing of one picture.
inline std::string svg(picture const& one, svg_style const& style = {}) { return svg(std::span<picture const>(&one, 1), style); }
/// The drawing of a plan under these costs.
inline std::string svg(plan_view const& plan, cost_view const& costs, svg_style const& style = {}) {
  return svg(picture_of(plan, costs), style);
}

}  // namespace chevron::show
