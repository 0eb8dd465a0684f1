#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <chevron/plan/finding.hpp>
#include <chevron/show/format.hpp>
#include <chevron/show/picture.hpp>

/// \file
/// Timelines for a terminal: one line a rank, time from left to right.
// The larger functions are templates, so that only who draws compiles them: <chevron/schedule.hpp> brings them to everybody.

namespace chevron::show {

/// How a terminal wants its text. Whether to colour is the caller's decision: a terminal, and no NO_COLOR in the environment.
struct text_style {
  int width = 80;       ///< columns
  bool colour = false;  ///< ANSI, 256 colours
  bool unicode = true;  ///< `·` and `─` rather than `.` and `-`
};

namespace detail {

inline std::string spaces(int n) { return std::string(static_cast<std::size_t>(std::max(n, 0)), ' '); }

/// Background colours of a kind, from the first chunk (light) to the last (dark).
inline int background_of(kind what, int chunk, int chunks) {
  static constexpr int shades[compute_kinds][4] = {{111, 69, 33, 26}, {215, 208, 172, 130}, {80, 44, 37, 30}, {114, 77, 34, 28}};
  int const level = chunks > 1 ? std::min(3, chunk * 3 / (chunks - 1)) : 0;
  return shades[static_cast<int>(what)][level];
}
inline int foreground_on(int background) {
  for (int dark : {33, 26, 130, 37, 30, 34, 28}) {
    if (background == dark) return 231;
  }
  return 16;
}

template <class = void>
std::string paint(int background, int foreground) {
  return "\x1b[0;48;5;" + std::to_string(background) + ";38;5;" + std::to_string(foreground) + "m";
}

/// What is written for an action. One chunk: `F3`. Two: `F3` and, for the second, `f3`. More: with the stage in front, `5F3`.
template <class = void>
std::string label_of(box const& b, int chunks) {
  std::string letter = letters_of(b.what.what);
  if (chunks == 2 && b.chunk == 1) letter[0] = static_cast<char>(letter[0] - 'A' + 'a');
  std::string out = chunks > 2 ? std::to_string(b.what.stage) : "";
  return out + letter + std::to_string(b.what.micro_batch);
}

/// Where in the columns [begin, end) of a pair its second half begins: each half has its label and its share of what the labels
/// leave, and where a band ends within the pair, the halves part there if their labels fit.
inline int middle_of_pair(int begin, int end, int first_label, int second_label, int band) {
  int const cut = (begin / band + 1) * band;
  if (cut - begin > first_label && end - cut >= second_label) return cut;
  return std::min(end, begin + first_label + 1 + std::max(end - begin - first_label - 1 - second_label, 0) / 2);
}

struct cell {
  std::string glyph = " ";
  int background = 0;  ///< 0: idle
  bool edge = false;   ///< the thin line between two boxes, dark on every colour
};

/// The smallest time that all starts and ends are multiples of, if there is one of a fair size; else 0.
template <class = void>
double time_grid(picture const& p, double zero) {
  double shortest = 0;
  for (box const& b : p.boxes) {
    double const length = b.end - b.start;
    if (is_compute(b.what.what) && length > 1e-12 && (shortest == 0 || length < shortest)) shortest = length;
  }
  for (int parts = 1; parts <= 6 && shortest > 0; ++parts) {
    double const grid = shortest / parts;
    auto const on_grid = [&](double t) { return std::abs(t / grid - std::round(t / grid)) < 1e-6; };
    bool all = true;
    for (box const& b : p.boxes) {
      all = all && (!is_compute(b.what.what) || (on_grid(b.start - zero) && on_grid(b.end - zero)));
    }
    if (all) return grid;
  }
  return 0;
}

/// How time becomes columns.
struct scale {
  double columns_per_unit = 1;
  int columns = 0;        ///< of the whole picture
  int band = 0;           ///< columns of one band: the picture is cut into as many as it needs, one below the other
  bool overview = false;  ///< too long for labels: one letter a column
};

template <class = void>
scale scale_for(picture const& p, double zero, double makespan, int room) {
  std::vector<double> lengths;
  for (box const& b : p.boxes) {
    if (is_compute(b.what.what) && b.end - b.start > 1e-12) lengths.push_back(b.end - b.start);
  }
  if (lengths.empty() || !(makespan > 0)) return {1, 0, room, false};
  std::vector<double> sorted = lengths;
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2), sorted.end());
  double const typical = sorted[sorted.size() / 2];
  // Columns per unit at which every label fits; boxes far shorter than the others do without.
  double tight = 0;
  double loose = 0;
  int first_half = 0;
  for (box const& b : p.boxes) {
    double const length = b.end - b.start;
    if (!is_compute(b.what.what) || length < 0.3 * typical) continue;
    int label = columns_of(label_of(b, p.size.chunks));
    if (b.of_pair == half::second) label += 1 + first_half;
    first_half = label;
    if (b.of_pair == half::first) continue;
    tight = std::max(tight, label / length);
    loose = std::max(loose, (label + 1) / length);
  }
  double const grid = time_grid(p, zero);
  auto const whole = [&](double s) { return grid > 0 ? std::ceil(s * grid - 1e-6) / grid : s; };
  constexpr double most = 1e9;  // more than anybody draws, and an int
  auto const columns_at = [&](double s) { return static_cast<int>(std::ceil(std::min(makespan * s, most) - 1e-6)); };
  loose = whole(loose);
  // `10F211B0` cannot be read: labels that begin with a digit need a gap, with colours as well.
  tight = p.size.chunks > 2 ? loose : whole(tight);
  // One band: as wide as fits, without stretching a short picture over a wide screen.
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
      int const each = static_cast<int>(room / std::round(s * grid));  // grid steps in a band
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

/// A line with as few escape sequences as it takes.
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
std::string axis(int from, int to, double columns_per_unit, double zero_shown) {
  std::string out = spaces(to - from);
  double const step = axis_step((to - from) / columns_per_unit, (to - from) / 8.0);
  for (double t = std::ceil(from / columns_per_unit / step - 1e-9) * step;; t += step) {
    int const at = static_cast<int>(std::lround(t * columns_per_unit)) - from;
    if (at >= to - from) break;
    std::string const label = number(t + zero_shown);
    // A mark that would stick out on the right is left away.
    if (at < 0 || at + static_cast<int>(label.size()) > to - from) continue;
    out.replace(static_cast<std::size_t>(at), label.size(), label);
  }
  while (!out.empty() && out.back() == ' ') out.pop_back();
  return out;
}

/// Words, separated by three spaces, broken into lines that fit.
template <class = void>
std::string wrapped(std::vector<std::string> const& words, int width, std::string const& indent = "") {
  std::string out;
  std::string line;
  for (std::string const& word : words) {
    if (!line.empty() && columns_of(line) + 3 + columns_of(word) > width) {
      out += line + "\n";
      line.clear();
    }
    line += line.empty() ? (out.empty() ? word : indent + word) : "   " + word;
  }
  return line.empty() ? out : out + line + "\n";
}

inline std::string bold(std::string const& words, bool colour) { return colour ? "\x1b[1m" + words + "\x1b[0m" : words; }

}  // namespace detail

/// The rows of a picture: an axis and one line a rank, in as many bands as the width asks for, and the legend. Only compute
/// is drawn. A picture that would need too many bands becomes an overview: each column shows the letter that fills most of it.
template <class = void>
std::string rows_text(picture const& p, text_style const& style = {}) {
  char const* const dot = style.unicode ? "\xc2\xb7" : ".";
  char const* const bar = style.unicode ? "\xe2\x94\x80" : "-";
  char const* const edge = style.unicode ? "\xe2\x96\x95" : " ";
  int const digits = static_cast<int>(std::to_string(std::max(p.rows - 1, 0)).size());
  int const prefix = std::max(5, digits + 2);
  int const room = std::max(20, style.width - prefix);
  double const zero = first_start(p);
  double makespan = 0;
  for (box const& b : p.boxes) {
    if (is_compute(b.what.what)) makespan = std::max(makespan, b.end - zero);
  }
  detail::scale const scale = detail::scale_for(p, zero, makespan, room);
  if (scale.columns == 0) return "nothing to draw\n";

  std::vector<std::vector<detail::cell>> rows(static_cast<std::size_t>(p.rows),
                                              std::vector<detail::cell>(static_cast<std::size_t>(scale.columns)));
  // Overview: how much of each column each kind and chunk fills.
  int const chunks = std::max(p.size.chunks, 1);
  std::size_t const sorts = static_cast<std::size_t>(compute_kinds * chunks);
  std::vector<double> covered(scale.overview ? rows.size() * static_cast<std::size_t>(scale.columns) * sorts : 0);
  for (auto& row : rows) {
    for (auto& c : row) c.glyph = style.colour ? " " : dot;
  }
  bool present[compute_kinds] = {};
  bool pairs = false;
  for (std::size_t index = 0; index < p.boxes.size(); ++index) {
    box const& b = p.boxes[index];
    if (!is_compute(b.what.what)) continue;
    present[static_cast<int>(b.what.what)] = true;
    auto& row = rows[static_cast<std::size_t>(b.rank)];
    double left = (b.start - zero) * scale.columns_per_unit;
    double right = (b.end - zero) * scale.columns_per_unit;
    int const background = style.colour ? detail::background_of(b.what.what, b.chunk, p.size.chunks) : 1;
    if (scale.overview) {
      if (b.of_pair != half::none) (b.of_pair == half::first ? right : left) = (left + right) / 2;
      for (int i = static_cast<int>(left); i < scale.columns && i < right; ++i) {
        std::size_t const at = static_cast<std::size_t>(b.rank * scale.columns + i) * sorts;
        covered[at + static_cast<std::size_t>(static_cast<int>(b.what.what) * chunks + std::min(b.chunk, chunks - 1))] +=
            std::min(right, i + 1.0) - std::max(left, static_cast<double>(i));
      }
      continue;
    }
    int begin = static_cast<int>(std::lround(left));
    int end = std::min(static_cast<int>(std::lround(right)), scale.columns);
    std::string const label = detail::label_of(b, p.size.chunks);
    int const length = static_cast<int>(label.size());
    if (b.of_pair != half::none) {
      pairs = true;
      std::size_t const other = b.of_pair == half::first ? index + 1 : index - 1;
      int const others = static_cast<int>(detail::label_of(p.boxes[other], p.size.chunks).size());
      bool const first = b.of_pair == half::first;
      int const middle = detail::middle_of_pair(begin, end, first ? length : others, first ? others : length, scale.band);
      (first ? end : begin) = middle;
    }
    // A box cut by the end of a band carries its label where there is more room.
    int const cut = (begin / scale.band + 1) * scale.band;
    int const label_at = cut < end && cut - begin < length && end - cut > cut - begin ? cut : begin;
    for (int i = begin; i < end; ++i) {
      int const in_label = i - label_at;
      bool const last = i == end - 1 && end - begin > length;
      auto& c = row[static_cast<std::size_t>(i)];
      c.edge = last && style.colour && b.of_pair != half::first;
      if (in_label >= 0 && in_label < length)
        c.glyph = label[static_cast<std::size_t>(in_label)];
      else if (last && b.of_pair == half::first)
        c.glyph = style.colour ? " " : "+";
      else if (last)
        c.glyph = style.colour ? edge : " ";
      else
        c.glyph = style.colour ? " " : bar;
      c.background = background;
    }
  }

  for (std::size_t column = 0; column * sorts < covered.size(); ++column) {
    auto const from = covered.begin() + static_cast<std::ptrdiff_t>(column * sorts);
    auto const most = std::max_element(from, from + static_cast<std::ptrdiff_t>(sorts));
    double busy = 0;
    for (auto i = from; i != from + static_cast<std::ptrdiff_t>(sorts); ++i) busy += *i;
    if (busy < 0.5) continue;
    int const which = static_cast<int>(most - from);
    box sample;
    sample.what.what = static_cast<kind>(which / chunks);
    sample.chunk = which % chunks;
    std::string const label = detail::label_of(sample, std::min(chunks, 2));
    int const background = style.colour ? detail::background_of(sample.what.what, sample.chunk, chunks) : 1;
    rows[column / static_cast<std::size_t>(scale.columns)][column % static_cast<std::size_t>(scale.columns)] = {
        label.substr(0, 1), background, false};
  }

  std::string out;
  for (int from = 0; from < scale.columns; from += scale.band) {
    int const to = std::min(from + scale.band, scale.columns);
    if (from > 0) out += "\n";
    out += "rank" + detail::spaces(prefix - 4) + detail::axis(from, to, scale.columns_per_unit, 0) + "\n";
    for (int r = 0; r < p.rows; ++r) {
      std::string const name = std::to_string(r);
      out += detail::spaces(prefix - 1 - static_cast<int>(name.size())) + name + " ";
      std::string line = detail::render(rows[static_cast<std::size_t>(r)], from, to, style.colour);
      while (!line.empty() && line.back() == ' ') line.pop_back();
      out += line + "\n";
    }
  }

  std::vector<std::string> legend;
  static constexpr char const* meaning[compute_kinds] = {"forward", "backward", "input gradient", "weight gradient"};
  for (int k = 0; k < compute_kinds; ++k) {
    if (!present[k]) continue;
    std::string const letter = letters_of(static_cast<kind>(k));
    std::string sample = letter;
    if (style.colour) {
      int const background = detail::background_of(static_cast<kind>(k), 0, p.size.chunks);
      sample = detail::paint(background, detail::foreground_on(background)) + letter + "\x1b[0m";
    }
    legend.push_back(sample + " " + meaning[k]);
  }
  if (scale.overview) {
    legend.push_back("overview: a column is " + number(1 / scale.columns_per_unit, 3) + (p.unit.empty() ? "" : " " + p.unit));
  } else {
    legend.push_back(p.size.chunks > 2 ? "5F3: stage 5, microbatch 3" : "F3: microbatch 3");
  }
  if (p.size.chunks == 2) legend.push_back("lower case: second chunk");
  if (pairs) legend.push_back(style.colour ? "two colours: a pair, run as one" : "F3+B1: a pair, run as one");
  if (!style.colour) legend.push_back(std::string(dot) + " idle");
  // Escape sequences take no columns: break the lines by the plain words.
  std::string line;
  int columns = 0;
  out += "\n";
  for (std::string const& word : legend) {
    int const width = columns_of(word) - (word.find('\x1b') == std::string::npos ? 0 : static_cast<int>(word.find("m") + 1 + 4));
    if (columns > 0 && columns + 3 + width > style.width) {
      out += line + "\n";
      line.clear();
      columns = 0;
    }
    line += (columns > 0 ? "   " : "") + word;
    columns += (columns > 0 ? 3 : 0) + width;
  }
  return out + line + "\n";
}

/// The numbers above a picture: schedule and sizes, makespan and span with their bubbles, peak in flight.
template <class = void>
std::string header_text(picture const& p, figures const& f, text_style const& style = {}) {
  std::string const unit = p.unit.empty() ? "" : " " + p.unit;
  std::string out = detail::bold(p.schedule.empty() ? "schedule" : p.schedule, style.colour) + "   " +
                    size_words(p, style.unicode ? "\xc3\x97" : "x") + "\n";
  std::string const makespan = number(f.makespan) + unit;
  std::string const span = number(f.span) + unit;
  std::string const steady = f.steady > 0 ? number(f.steady) + unit : "";
  int const width = std::max({columns_of(makespan), columns_of(span), columns_of(steady)});
  auto const line = [&](char const* name, std::string const& length, double bubble, char const* meaning) {
    std::string const share = percent(bubble);
    std::string const words = std::string(name) + detail::spaces(width - columns_of(length)) + length + "   bubble" +
                              detail::spaces(std::max(7 - columns_of(share), 1)) + share;
    bool const fits = columns_of(words) + 3 + columns_of(meaning) <= style.width;
    return words + (fits ? std::string("   ") + meaning : "") + "\n";
  };
  out += line("makespan ", makespan, f.bubble_makespan, "first start to last end over all ranks");
  out += line("span     ", span, f.bubble_span, "the longest single rank");
  if (f.steady > 0) out += line("steady   ", steady, f.bubble_steady, "each of many steps without a barrier between");
  std::string const sent = f.message_bytes >= 0 ? ", " + bytes(f.message_bytes) : "";
  out += detail::wrapped(
      {"in flight, peak chunks: " + per_rank(f.peak_in_flight), "messages: " + std::to_string(f.messages) + sent}, style.width);
  return out;
}

/// A whole timeline: header, rows and legend.
template <class = void>
std::string timeline_text(picture const& p, text_style const& style = {}) {
  return header_text(p, figures_of(p), style) + "\n" + rows_text(p, style);
}

template <class = void>
std::string timeline_text(plan_view const& plan, cost_view const& costs, text_style const& style = {}) {
  return timeline_text(picture_of(plan, costs), style);
}

/// Each rank's list, position by position, as a table: a column a rank. The row of a finding is marked `<-- ` with its
/// sentence; a `+` joins a pair. Nothing is simulated, so a broken plan prints as well as a sound one.
template <class = void>
std::string steps_text(plan_view const& plan, finding const& mark = {}) {
  int longest = 0;
  for (int r = 0; r < plan.size.ranks; ++r) longest = std::max(longest, plan.length(r));
  int const digits = std::max(2, static_cast<int>(std::to_string(std::max(longest - 1, 0)).size()));
  std::vector<int> width(static_cast<std::size_t>(plan.size.ranks));
  auto const spelled = [](action a) { return to_text(a).str() + (a.fused != 0 ? "+" : ""); };
  for (int r = 0; r < plan.size.ranks; ++r) {
    int& w = width[static_cast<std::size_t>(r)];
    w = columns_of("Rank " + std::to_string(r));
    for (int i = 0; i < plan.length(r); ++i) w = std::max(w, columns_of(spelled(plan.at(r, i))));
  }
  auto const padded = [](std::string s, int w) { return s + detail::spaces(w - columns_of(s)); };
  std::string out = padded("", 6 + digits) + " ";
  for (int r = 0; r < plan.size.ranks; ++r) out += padded("Rank " + std::to_string(r), width[static_cast<std::size_t>(r)] + 1);
  std::string table;
  auto const finish = [&](std::string line) {
    while (!line.empty() && line.back() == ' ') line.pop_back();
    table += line + "\n";
  };
  finish(out);
  for (int i = 0; i < longest; ++i) {
    std::string name = std::to_string(i);
    std::string line = "Step " + std::string(static_cast<std::size_t>(digits) - name.size(), '0') + name + ": ";
    for (int r = 0; r < plan.size.ranks; ++r) {
      line += padded(i < plan.length(r) ? spelled(plan.at(r, i)) : "", width[static_cast<std::size_t>(r)]) + " ";
    }
    if (mark && mark.position == i) line += "<-- " + describe(mark).str();
    finish(line);
  }
  if (mark && (mark.position < 0 || mark.position >= longest)) table += "<-- " + describe(mark).str() + "\n";
  return table;
}

}  // namespace chevron::show
