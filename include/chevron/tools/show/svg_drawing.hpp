#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include <chevron/base/format.hpp>
#include <chevron/plan/action.hpp>

/// \file
/// Helpers of the SVG drawings: colours of actions, rectangles, lines and words.

namespace chevron::show {

namespace detail {

struct ink {
  char const* fill;
  char const* text;
};

/// The colours of a kind's chunk, from the first chunk (light) to the last (dark), similar to the shades in papers.
inline ink ink_of(kind what, int chunk, int chunks) {
  static constexpr ink shades[compute_kinds][4] = {
      {{"#9cc0f2", "#10233f"}, {"#6b9be0", "#10233f"}, {"#3f74c8", "#ffffff"}, {"#2858a6", "#ffffff"}},   // F blue
      {{"#f8c182", "#40250a"}, {"#eb9f4d", "#40250a"}, {"#cf7a22", "#ffffff"}, {"#b06012", "#ffffff"}},   // B orange
      {{"#83d3cd", "#0b3331"}, {"#4db5ae", "#0b3331"}, {"#26918a", "#ffffff"}, {"#16716b", "#ffffff"}},   // I teal
      {{"#b4d996", "#1d3310"}, {"#8dbf68", "#1d3310"}, {"#629a3c", "#ffffff"}, {"#467a26", "#ffffff"}},   // W green
      {{"#d3c0ee", "#2a1145"}, {"#b597df", "#2a1145"}, {"#8d63c8", "#ffffff"}, {"#6c43a6", "#ffffff"}},   // R violet
      {{"#f4b3c2", "#471020"}, {"#e58ca1", "#471020"}, {"#c95f79", "#ffffff"}, {"#a5405a", "#ffffff"}},   // X rose
      {{"#ece08f", "#3d3705"}, {"#d9c95f", "#3d3705"}, {"#a8982a", "#ffffff"}, {"#857715", "#ffffff"}},   // Y gold
      {{"#c3cbd6", "#1d2733"}, {"#a1acbb", "#1d2733"}, {"#6f7d90", "#ffffff"}, {"#546174", "#ffffff"}}};  // Z slate
  int const level = chunks > 1 ? std::min(3, chunk * 3 / (chunks - 1)) : 0;
  return shades[static_cast<int>(what)][level];
}
inline char const* grey_of(kind what) {
  if (is_send(what)) return "#8b94a3";
  if (is_receive(what)) return "#c3c9d3";
  if (is_wait(what)) return "#a8b0bd";
  return is_of_stage(what) ? "#5b6472" : "#2b313b";
}

/// The strip below a row in which an action is drawn: -1 for computations (in the row), 0 for messages, 1 for gradient sums and
/// the optimizer.
inline int strip_of(kind what) {
  return is_compute(what) ? -1 : static_cast<int>(what) < static_cast<int>(kind::reduce_gradients) ? 0 : 1;
}

struct drawing {
  std::string out;
  // Two decimals of a pixel are finer than a printer's dots.
  static std::string at(double v) { return number(std::round(v * 100) / 100, 9); }
  void rect(double x, double y, double width, double height, std::string const& more, std::string const& inside = "") {
    out += "<rect x=\"" + at(x) + "\" y=\"" + at(y) + "\" width=\"" + at(std::max(width, 0.0)) + "\" height=\"" + at(height) +
           "\" " + more + (inside.empty() ? "/>\n" : ">" + inside + "</rect>\n");
  }
  void text(double x, double y, std::string const& words, std::string const& more = "") {
    out +=
        "<text x=\"" + at(x) + "\" y=\"" + at(y) + "\"" + (more.empty() ? "" : " " + more) + ">" + xml_text(words) + "</text>\n";
  }
  void line(double x1, double y1, double x2, double y2, std::string const& more) {
    out += "<line x1=\"" + at(x1) + "\" y1=\"" + at(y1) + "\" x2=\"" + at(x2) + "\" y2=\"" + at(y2) + "\" " + more + "/>\n";
  }
};

/// An estimate of a text's width in a sans-serif font, good enough to decide whether it fits.
inline double text_width(std::string const& words, double size) { return 0.56 * size * columns_of(words); }

/// A text cut to a width, in a sans-serif font of this size.
inline std::string fitting(std::string words, double size, double width) {
  if (text_width(words, size) <= width) return words;
  while (!words.empty() && text_width(words + "…", size) > width) {
    for (bool inside = true; inside && !words.empty();) {  // a character
      inside = (static_cast<unsigned char>(words.back()) & 0xc0) == 0x80;
      words.pop_back();
    }
  }
  return words + "…";
}

}  // namespace detail

}  // namespace chevron::show
