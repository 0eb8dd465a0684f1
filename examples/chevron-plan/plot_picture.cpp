// computes: curves of a hundred thousand points are made thinner
#include "plot_picture.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include <chevron/tools/show/svg_drawing.hpp>

namespace plan_program {
namespace {

using chevron::show::detail::drawing;
using chevron::show::detail::fitting;
using chevron::show::detail::text_width;

constexpr char const* style = R"(<style>
.sheet { fill: #ffffff; } .ink { fill: #1f2630; } .soft { fill: #5b6472; } .grid { stroke: #e4e8ee; } .axis { stroke: #8b94a3; }
.curve { fill: none; stroke-linejoin: round; stroke-linecap: round; }
.c0 { stroke: #3f74c8; } .c1 { stroke: #cf7a22; } .c2 { stroke: #467a26; } .c3 { stroke: #8d63c8; }
.c4 { stroke: #26918a; } .c5 { stroke: #c0486a; } .c6 { stroke: #a8982a; } .c7 { stroke: #6f7d90; }
@media (prefers-color-scheme: dark) {
.sheet { fill: #14181f; } .ink { fill: #e6eaf0; } .soft { fill: #98a2b1; } .grid { stroke: #262d38; } .axis { stroke: #6d7787; }
.c0 { stroke: #6b9be0; } .c1 { stroke: #eb9f4d; } .c2 { stroke: #8dbf68; } .c3 { stroke: #b597df; }
.c4 { stroke: #4db5ae; } .c5 { stroke: #e58ca1; } .c6 { stroke: #d9c95f; } .c7 { stroke: #a1acbb; }
}
</style>
)";
constexpr std::size_t colours = 8;
constexpr std::array<char const*, most_runs / colours> dashes = {"", "7 4", "2 3", "9 3 2 3"};

std::string look_of(std::size_t run) {
  std::string const pattern = dashes[run / colours % dashes.size()];
  return "c" + std::to_string(run % colours) + "\"" + (pattern.empty() ? "" : " stroke-dasharray=\"" + pattern + "\"");
}

std::string power_of_ten(int exponent) {
  static constexpr char const* raised[] = {"⁰", "¹", "²", "³", "⁴", "⁵", "⁶", "⁷", "⁸", "⁹"};
  std::string out = exponent < 0 ? "10⁻" : "10";
  for (char const digit : std::to_string(std::abs(exponent))) out += raised[digit - '0'];
  return out;
}

struct tick {
  double value;
  std::string words;  ///< empty: a line without a label
};

/// A stretch of numbers, drawn over a stretch of pixels, with round marks.
class axis {
 public:
  axis(double least, double most, bool logarithmic, double wanted) : logarithmic_(logarithmic), from_(least), to_(most) {
    if (logarithmic_)
      mark_powers(wanted);
    else
      mark_evenly(wanted, true);
  }
  void over(double begin, double end) {
    begin_ = begin;
    end_ = end;
  }
  double at(double value) const {
    double const share = logarithmic_ ? std::log(value / from_) / std::log(to_ / from_) : (value - from_) / (to_ - from_);
    return begin_ + share * (end_ - begin_);
  }
  std::vector<tick> const& ticks() const { return ticks_; }
  /// The factor that all labels lack, as words; empty for 1.
  std::string const& factor() const { return factor_; }

 private:
  void mark_evenly(double wanted, bool may_factor) {
    double const step = chevron::show::axis_step(to_ - from_, wanted);
    double const largest = std::max(std::abs(from_), std::abs(to_));
    int power = 0;
    if (may_factor && (largest >= 1e7 || largest < 1e-3)) {
      power = static_cast<int>(std::floor(std::log10(largest) + 1e-9));
      if (power > 0) power = power / 3 * 3;
      factor_ = power_of_ten(power);
    }
    double const unit = std::pow(10.0, power);
    int const decimals = std::max(0, static_cast<int>(std::ceil(-std::log10(step / unit) - 1e-9)));
    double const first = std::ceil(from_ / step - 1e-9);
    for (double k = first; k * step <= to_ + 1e-9 * step; ++k)
      ticks_.push_back({k * step, with_commas(chevron::show::fixed(k * step / unit, decimals))});
  }

  void mark_powers(double wanted) {
    int const low = static_cast<int>(std::floor(std::log10(from_))), high = static_cast<int>(std::ceil(std::log10(to_)));
    int const every = std::max(1, static_cast<int>(std::ceil((high - low) / wanted)));
    bool const plain = low >= -3 && high <= 5;
    for (int k = low; k <= high; ++k) {
      for (int const m : {1, 2, 5}) {
        double const value = m * std::pow(10.0, k);
        if (value < from_ * (1 - 1e-9) || value > to_ * (1 + 1e-9)) continue;
        bool const named = m == 1 ? k % every == 0 : high - low <= 3;
        std::string const digits = m == 1 ? "" : std::to_string(m) + "·";
        if (named || (m == 1 && high - low <= 40))
          ticks_.push_back({value, !named  ? ""
                                   : plain ? with_commas(chevron::show::fixed(value, std::max(0, -k)))
                                           : digits + power_of_ten(k)});
      }
    }
    if (ticks_.size() >= 3) return;
    ticks_.clear();
    mark_evenly(wanted, false);
  }

  bool logarithmic_;
  double from_, to_, begin_ = 0, end_ = 1;
  std::vector<tick> ticks_;
  std::string factor_;
};

struct span_of_values {
  double least = std::numeric_limits<double>::infinity(), most = -std::numeric_limits<double>::infinity();
  void take(double value) {
    least = std::min(least, value);
    most = std::max(most, value);
  }
  bool empty() const { return least > most; }
};

axis x_axis(plot_chart const& chart) {
  span_of_values x;
  for (plot_panel const& panel : chart.panels) {
    for (plot_curve const& curve : panel.curves) {
      for (auto const* parts : {&curve.parts, &curve.behind}) {
        for (auto const& part : *parts) {
          x.take(part.front().x);
          x.take(part.back().x);
        }
      }
      for (double const at : curve.not_finite) x.take(at);
    }
  }
  if (x.empty()) x = {0, 1};
  if (!(x.most > x.least)) {
    x.least -= 0.5;
    x.most += 0.5;
  }
  return {x.least, x.most, false, 9};
}

axis y_axis(plot_panel const& panel, bool logarithmic) {
  span_of_values y;
  for (plot_curve const& curve : panel.curves) {
    for (auto const* parts : {&curve.parts, &curve.behind}) {
      for (auto const& part : *parts) {
        for (plot_point const& p : part) y.take(p.y);
      }
    }
  }
  if (y.empty()) y = {logarithmic ? 0.1 : 0, 1};
  if (logarithmic) {
    double const room = std::max(std::pow(y.most / y.least, 0.05), 1.05);
    return {y.least / room, y.most * room, true, 8};
  }
  double const size = y.most - y.least;
  double const room = size > 0 ? 0.05 * size : y.most != 0 ? 0.1 * std::abs(y.most) : 1;
  double least = y.least - room;
  // Close to 0, the axis begins there.
  if (y.least >= 0 && (least < 0 || y.least < 0.15 * y.most)) least = 0;
  return {least, y.most + room, false, 8};
}

/// The path of a part, thinned out.
std::string path_of(std::vector<plot_point> const& part, axis const& x, axis const& y) {
  std::string out;
  auto const add = [&](plot_point const& p) {
    out += (out.empty() ? "M" : " L") + drawing::at(x.at(p.x)) + "," + drawing::at(y.at(p.y));
  };
  for (std::size_t i = 0; i < part.size();) {
    double const column = std::floor(2 * x.at(part[i].x));
    std::size_t end = i + 1, least = i, most = i;
    for (; end < part.size() && std::floor(2 * x.at(part[end].x)) == column; ++end) {
      if (part[end].y < part[least].y) least = end;
      if (part[end].y > part[most].y) most = end;
    }
    std::array<std::size_t, 4> kept{i, std::min(least, most), std::max(least, most), end - 1};
    for (std::size_t k = 0; k < kept.size(); ++k) {
      if (k == 0 || kept[k] != kept[k - 1]) add(part[kept[k]]);
    }
    i = end;
  }
  return out;
}

/// Names of the curves to the right of a panel, each at the height of its last value or as near as its neighbours allow.
void draw_names(drawing& d, plot_panel const& panel, axis const& y, double top, double bottom, double right, double width) {
  constexpr double apart = 15;
  struct label {
    plot_curve const* curve;
    double end, at;
  };
  std::vector<label> labels;
  for (plot_curve const& curve : panel.curves) {
    bool const drawn = !curve.parts.empty();
    double const end = drawn ? y.at(curve.parts.back().back().y) : top + 7;
    labels.push_back({&curve, end, end});
  }
  std::stable_sort(labels.begin(), labels.end(), [](label const& a, label const& b) { return a.end < b.end; });
  double free = top + 4;
  for (label& one : labels) {
    one.at = std::max(one.at, free);
    free = one.at + apart;
  }
  free = bottom - 2;
  for (auto one = labels.rbegin(); one != labels.rend(); ++one) {
    one->at = std::min(one->at, free);
    free = one->at - apart;
  }
  for (label const& one : labels) {
    std::string const from = drawing::at(right + 3) + "," + drawing::at(one.end);
    d.out += "<path class=\"curve " + look_of(one.curve->run) + " stroke-width=\"1.5\" d=\"M" + from + " L" +
             drawing::at(right + 15) + "," + drawing::at(one.at) + " L" + drawing::at(right + 27) + "," + drawing::at(one.at) +
             "\"/>\n";
    d.text(right + 32, one.at + 4, fitting(one.curve->name, 12, width), "class=\"ink name\"");
  }
}

void draw_curve(drawing& d, plot_curve const& curve, axis const& x, axis const& y, double top) {
  std::string const look = look_of(curve.run);
  auto const paths = [&](std::vector<std::vector<plot_point>> const& parts, char const* more) {
    for (auto const& part : parts) {
      if (part.size() == 1) {
        d.out += "<circle class=\"" + look + " fill=\"none\" cx=\"" + drawing::at(x.at(part.front().x)) + "\" cy=\"" +
                 drawing::at(y.at(part.front().y)) + "\" r=\"2.5\"" + more + "/>\n";
        continue;
      }
      d.out += "<path class=\"curve " + look + more + " d=\"" + path_of(part, x, y) + "\"/>\n";
    }
  };
  d.out += "<g class=\"run\"><title>" + chevron::show::xml_text(curve.name) + "</title>\n";
  paths(curve.behind, " stroke-width=\"1\" stroke-opacity=\"0.3\"");
  for (auto const& [a, b] : curve.gaps) {
    d.line(x.at(a.x), y.at(a.y), x.at(b.x), y.at(b.y),
           "class=\"gap c" + std::to_string(curve.run % colours) + "\" stroke-dasharray=\"1 4\"");
  }
  paths(curve.parts, " stroke-width=\"1.7\"");
  double next = -1e300;
  for (double const value : curve.not_finite) {
    double const at = x.at(value), r = 3.5, middle = top + 7;
    if (at < next) continue;
    next = at + r;
    d.out += "<path class=\"not-finite c" + std::to_string(curve.run % colours) + "\" stroke-width=\"1.7\" d=\"M" +
             drawing::at(at - r) + "," + drawing::at(middle - r) + " L" + drawing::at(at + r) + "," + drawing::at(middle + r) +
             " M" + drawing::at(at - r) + "," + drawing::at(middle + r) + " L" + drawing::at(at + r) + "," +
             drawing::at(middle - r) + "\"/>\n";
  }
  d.out += "</g>\n";
}

}  // namespace

std::string with_commas(std::string digits) {
  std::size_t const sign = digits.starts_with("-") ? 1 : 0;
  std::size_t const end = std::min(digits.find('.'), digits.size());
  if (end - sign < 5) return digits;
  for (std::size_t at = end; at > sign + 3;) digits.insert(at -= 3, ",");
  return digits;
}

plot_drawing plot_picture(plot_chart const& chart) {
  std::size_t runs = 0;
  double longest = 0;
  bool any_gap = false, any_not_finite = false;
  for (plot_panel const& panel : chart.panels) {
    runs = std::max(runs, panel.curves.size());
    for (plot_curve const& curve : panel.curves) {
      longest = std::max(longest, text_width(curve.name, 12));
      any_gap = any_gap || !curve.gaps.empty();
      any_not_finite = any_not_finite || !curve.not_finite.empty();
    }
  }
  // A single run is named by the title.
  double const name_width = runs > 1 ? std::min(longest, 220.0) : 0;
  double const width = 960, left = 76, right = runs > 1 ? width - 48 - name_width : width - 30;
  double const panel_height = std::max(chart.panels.size() == 1 ? 400.0 : 220.0, 15.0 * static_cast<double>(runs) + 10);
  double const first_top = 92, between = 44;
  double const height =
      first_top + static_cast<double>(chart.panels.size()) * (panel_height + between) + (any_gap || any_not_finite ? 28 : 8);

  drawing d;
  d.out += "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + drawing::at(width) + " " + drawing::at(height) +
           "\" role=\"img\" width=\"" + drawing::at(width) + "\" height=\"" + drawing::at(height) + "\">\n<title>" +
           chevron::show::xml_text(chart.title) + "</title>\n" + style +
           "<rect class=\"sheet\" width=\"100%\" height=\"100%\" rx=\"6\"/>\n"
           "<g font-family=\"system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\" font-size=\"12\" "
           "class=\"soft\">\n";
  d.text(20, 34, fitting(chart.title, 18, width - 40), "font-size=\"18\" font-weight=\"600\" class=\"ink\"");
  d.text(20, 56, fitting(chart.subtitle, 12, width - 40));

  axis x = x_axis(chart);
  x.over(left, right);
  double top = first_top;
  for (plot_panel const& panel : chart.panels) {
    double const bottom = top + panel_height;
    bool const last = &panel == &chart.panels.back();
    axis y = y_axis(panel, chart.logarithmic);
    y.over(bottom, top);
    d.out += "<g class=\"panel\">\n";
    d.text(20, top - 12, panel.words + (y.factor().empty() ? "" : ", " + y.factor()), "class=\"ink\" font-weight=\"600\"");
    for (tick const& one : x.ticks()) {
      d.line(x.at(one.value), top, x.at(one.value), bottom, "class=\"grid\"");
      if (last) d.text(x.at(one.value), bottom + 19, one.words, "text-anchor=\"middle\" font-size=\"11\" class=\"x-mark\"");
    }
    for (tick const& one : y.ticks()) {
      d.line(left, y.at(one.value), right, y.at(one.value), "class=\"grid\"");
      if (!one.words.empty())
        d.text(left - 8, y.at(one.value) + 4, one.words, "text-anchor=\"end\" font-size=\"11\" class=\"y-mark\"");
    }
    d.line(left, bottom, right, bottom, "class=\"axis\"");
    for (plot_curve const& curve : panel.curves) draw_curve(d, curve, x, y, top);
    if (runs > 1) draw_names(d, panel, y, top, bottom, right, name_width);
    d.out += "</g>\n";
    top = bottom + between;
  }
  double const foot = top - between;
  d.text(right, foot + 38, chart.x_words + (x.factor().empty() ? "" : ", " + x.factor()), "text-anchor=\"end\"");
  std::string marks;
  if (any_not_finite) marks = "× a value that is not finite";
  if (any_gap) marks += std::string(marks.empty() ? "" : "; ") + "··· steps without a line";
  if (!marks.empty()) d.text(left, foot + 58, marks);
  d.out += "</g>\n</svg>\n";
  return {std::move(d.out), width, height};
}

}  // namespace plan_program
