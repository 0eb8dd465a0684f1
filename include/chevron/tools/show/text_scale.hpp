#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/tools/show/picture.hpp>

/// \file
/// Fits a timeline into a terminal: columns, colours, bands and line breaks.

namespace chevron::show {

/// The width and colours of a terminal's text. The caller decides whether to colour: usually on terminals without NO_COLOR in
/// the environment.
struct text_style {
  int width = 80;       ///< number of columns
  bool colour = false;  ///< ANSI, 256 colours
  bool unicode = true;  ///< `·` and `─` rather than `.` and `-`
};

namespace detail {

inline std::string spaces(int n) { return std::string(static_cast<std::size_t>(std::max(n, 0)), ' '); }

/// The background colour of a kind's chunk, from the first chunk (light) to the last (dark).
inline int background_of(kind what, int chunk, int chunks) {
  static constexpr int shades[compute_kinds][4] = {{111, 69, 33, 26},    {215, 208, 172, 130}, {80, 44, 37, 30},
                                                   {114, 77, 34, 28},    {183, 141, 98, 61},   {217, 175, 168, 125},
                                                   {229, 185, 142, 100}, {252, 248, 244, 240}};
  int const level = chunks > 1 ? std::min(3, chunk * 3 / (chunks - 1)) : 0;
  return shades[static_cast<int>(what)][level];
}
inline int foreground_on(int background) {
  for (int dark : {33, 26, 130, 37, 30, 34, 28, 98, 61, 168, 125, 100, 240}) {
    if (background == dark) return 231;
  }
  return 16;
}

template <class = void>
std::string paint(int background, int foreground) {
  return "\x1b[0;48;5;" + std::to_string(background) + ";38;5;" + std::to_string(foreground) + "m";
}

/// The label of an action. With one chunk: `F3`. With two: `F3` and, for the second, `f3`. With more, the stage comes first:
/// `5F3`. With slices: `F3.1`.
template <class = void>
std::string label_of(box const& b, int chunks, int slices = 1) {
  std::string letter = letters_of(b.op.kind);
  if (chunks == 2 && b.chunk == 1) letter[0] = static_cast<char>(letter[0] - 'A' + 'a');
  std::string out = chunks > 2 ? std::to_string(b.op.stage) : "";
  return out + letter + unit_words(b.op, slices);
}

/// The column at which the second half of a fused pair begins, for a pair in columns [begin, end). Each half gets its label and a
/// share of the remaining columns; if a band ends within the pair and the labels fit, the halves are divided there.
inline int middle_of_pair(int begin, int end, int first_label, int second_label, int band) {
  int const cut = (begin / band + 1) * band;
  if (cut - begin > first_label && end - cut >= second_label) return cut;
  return std::min(end, begin + first_label + 1 + std::max(end - begin - first_label - 1 - second_label, 0) / 2);
}

struct cell {
  std::string glyph = " ";
  int background = 0;  ///< number of an ANSI colour; 0: idle
  bool edge = false;   ///< whether the cell ends in the thin line between two boxes, dark on every colour
};

/// A time of which the starts and ends of all compute boxes are multiples: the shortest box's duration divided by 1 to 6; 0 if
/// there is none.
template <class = void>
double time_grid(picture const& p, double zero) {
  double shortest = 0;
  for (box const& b : p.boxes) {
    double const length = b.end - b.start;
    if (is_compute(b.op.kind) && length > 1e-12 && (shortest == 0 || length < shortest)) shortest = length;
  }
  for (int parts = 1; parts <= 6 && shortest > 0; ++parts) {
    double const grid = shortest / parts;
    auto const on_grid = [&](double t) { return std::abs(t / grid - std::round(t / grid)) < 1e-6; };
    bool all = true;
    for (box const& b : p.boxes) {
      all = all && (!is_compute(b.op.kind) || (on_grid(b.start - zero) && on_grid(b.end - zero)));
    }
    if (all) return grid;
  }
  return 0;
}

/// The scale from time to columns.
struct scale {
  double columns_per_unit = 1;
  int columns = 0;        ///< number of columns of the whole picture
  int band = 0;           ///< columns of one band: the picture is cut into bands, one below another
  bool overview = false;  ///< too long for labels: one letter for each column
};

template <class = void>
scale scale_for(picture const& p, double zero, double makespan, int room) {
  std::vector<double> lengths;
  for (box const& b : p.boxes) {
    if (is_compute(b.op.kind) && b.end - b.start > 1e-12) lengths.push_back(b.end - b.start);
  }
  if (lengths.empty() || !(makespan > 0)) return {1, 0, room, false};
  std::vector<double> sorted = lengths;
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2), sorted.end());
  double const typical = sorted[sorted.size() / 2];
  // Columns per unit of time at which every label fits; boxes far shorter than the others get no label.
  double tight = 0;
  double loose = 0;
  int first_half = 0;
  for (box const& b : p.boxes) {
    double const length = b.end - b.start;
    if (!is_compute(b.op.kind) || length < 0.3 * typical) continue;
    int label = columns_of(label_of(b, p.size.chunks, p.size.slices));
    if (b.of_pair == half::second) label += 1 + first_half;
    first_half = label;
    if (b.of_pair == half::first) continue;
    tight = std::max(tight, label / length);
    loose = std::max(loose, (label + 1) / length);
  }
  double const grid = time_grid(p, zero);
  auto const whole = [&](double s) { return grid > 0 ? std::ceil(s * grid - 1e-6) / grid : s; };
  constexpr double most = 1e9;  // more columns than any drawing has; fits into an int
  auto const columns_at = [&](double s) { return static_cast<int>(std::ceil(std::min(makespan * s, most) - 1e-6)); };
  loose = whole(loose);
  // `10F211B0` cannot be read: labels that begin with a digit need a gap, even with colours.
  tight = p.size.chunks > 2 ? loose : whole(tight);
  // One band as wide as fits; a short picture is not stretched over a wide screen.
  if (columns_at(tight) <= room) {
    double best = tight;
    double const widest = 2 * loose;
    if (grid > 0) {
      while (best + 1 / grid <= widest && columns_at(best + 1 / grid) <= room) best += 1 / grid;
    } else {
      best = std::min(widest, room / makespan);
    }
    int const columns = std::min(columns_at(best), room);
    return {best, columns, std::max(columns, 1), false};
  }
  auto const bands_at = [&](double s) {
    if (grid > 0) {
      int const each = static_cast<int>(room / std::round(s * grid));  // number of grid steps in a band
      if (each < 1) return 1000000;
      return static_cast<int>(std::ceil(std::min(makespan / grid / each, most) - 1e-6));
    }
    return static_cast<int>(std::ceil(std::min(makespan * s / room, most) - 1e-6));
  };
  int const most_bands = 6;
  if (bands_at(tight) > most_bands) return {room / makespan, room, room, true};
  double const s = bands_at(loose) <= bands_at(tight) ? loose : tight;
  int const bands = bands_at(s);
  int band = static_cast<int>(std::ceil(columns_at(s) / static_cast<double>(bands)));
  if (grid > 0) {
    int const step = static_cast<int>(std::round(s * grid));
    band = (band + step - 1) / step * step;
  }
  return {s, columns_at(s), std::min(band, room), false};
}

/// Columns [from, to) of a row as a line of text, with as few escape sequences as possible.
template <class = void>
std::string render(std::vector<cell> const& row, int from, int to, bool colour) {
  std::string out;
  int current = 0;
  int ink = 0;
  for (int i = from; i < to; ++i) {
    cell const& c = row[static_cast<std::size_t>(i)];
    int const wanted_ink = c.background == 0 ? 0 : c.edge ? 16 : foreground_on(c.background);
    if (colour && (c.background != current || wanted_ink != ink)) {
      out += c.background == 0 ? "\x1b[0m" : paint(c.background, wanted_ink);
      current = c.background;
      ink = wanted_ink;
    }
    out += c.glyph;
  }
  if (current != 0) out += "\x1b[0m";
  return out;
}

template <class = void>
std::string axis(int from, int to, double columns_per_unit) {
  std::string out = spaces(to - from);
  double const step = axis_step((to - from) / columns_per_unit, (to - from) / 8.0);
  for (double t = std::ceil(from / columns_per_unit / step - 1e-9) * step;; t += step) {
    int const at = static_cast<int>(std::lround(t * columns_per_unit)) - from;
    if (at >= to - from) break;
    std::string const label = number(t);
    // A mark that would extend past the right end is left out.
    if (at < 0 || at + static_cast<int>(label.size()) > to - from) continue;
    out.replace(static_cast<std::size_t>(at), label.size(), label);
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

/// Words, separated by three spaces, broken into lines that fit. The escape sequences of a coloured letter take no columns.
template <class = void>
std::string wrapped(std::vector<std::string> const& words, int width) {
  std::string out, line;
  int columns = 0;
  for (std::string const& word : words) {
    int const escaped = word.find('\x1b') == std::string::npos ? 0 : static_cast<int>(word.find("m") + 1 + 4);
    int const each = columns_of(word) - escaped;
    if (columns > 0 && columns + 3 + each > width) {
      out += line + "\n";
      line.clear();
      columns = 0;
    }
    line += (columns > 0 ? "   " : "") + word;
    columns += (columns > 0 ? 3 : 0) + each;
  }
  return out + line + "\n";
}

inline std::string bold(std::string const& words, bool colour) { return colour ? "\x1b[1m" + words + "\x1b[0m" : words; }

}  // namespace detail

}  // namespace chevron::show
